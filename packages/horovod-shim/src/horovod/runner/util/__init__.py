"""Tools of the launcher that Horovod's own tests use."""
