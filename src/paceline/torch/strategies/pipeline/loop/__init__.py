"""The view of the training loop: a model, outputs, losses and gradients as in one process."""
