"""A model's graph cut over the devices of one process."""
