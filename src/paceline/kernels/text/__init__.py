"""Numba kernels that parse text, a module for each kind of format, and the values and codes of text."""
