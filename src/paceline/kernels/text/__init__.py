"""Numba kernels that parse text, a module for each kind of format, and their twins in :mod:`.reference`."""
