"""Numba loops on raw arrays, each beside its NumPy reference (see :mod:`paceline.kernels.reference`)."""
