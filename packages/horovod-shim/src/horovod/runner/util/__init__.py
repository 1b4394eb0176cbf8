"""Functions that Horovod's own tests use."""
