"""Numba loops on raw arrays. Their references in NumPy are in ``tests/reference``."""
