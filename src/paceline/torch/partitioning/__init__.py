"""Split a model's graph over the devices of one process."""
