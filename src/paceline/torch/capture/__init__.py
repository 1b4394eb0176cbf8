"""Capture the graph of a model's forward, with `torch.fx` or, if this fails, with `torch.export`."""
