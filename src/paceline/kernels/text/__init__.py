"""Numba kernels that parse text formats, one module for each format, and the codes and values that they share."""
