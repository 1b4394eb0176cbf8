"""Capture the graph of a model's forward with `torch.fx`, else with `torch.export`, for `pipeline` and `partition`."""
