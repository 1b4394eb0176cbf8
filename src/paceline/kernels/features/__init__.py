"""Numba kernels that prepare features for a model: crosses, scaled numbers, counts."""
