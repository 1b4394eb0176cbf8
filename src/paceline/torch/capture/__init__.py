"""The graph of a model's forward: by `torch.fx`, else by `torch.export`. For `pipeline` and `partition`."""
