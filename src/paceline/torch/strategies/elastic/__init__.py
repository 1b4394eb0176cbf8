"""All-reduce whose ranks may die, and join, during the training."""
