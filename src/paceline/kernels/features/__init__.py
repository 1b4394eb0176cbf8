"""Numba kernels of what is made of features before a model sees them: crosses, scaled numbers, counts."""
