"""The model, outputs, losses and gradients that the training loop uses. They behave as in one process."""
