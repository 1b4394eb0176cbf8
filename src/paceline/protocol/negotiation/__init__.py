"""Negotiate the order of the collective operations that ranks request by name, as Horovod does."""
