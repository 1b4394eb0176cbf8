"""The model, outputs, losses and gradients that the training loop sees; they behave as in one process."""
