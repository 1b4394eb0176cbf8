"""Numba kernels that parse text formats. Each format has a module; codes and values are common to all."""
