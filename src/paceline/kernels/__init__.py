"""Numba loops on raw arrays. The reference implementations in NumPy are in ``tests/reference``."""
