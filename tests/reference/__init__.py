"""Reference implementations of the kernels in NumPy and Python, and the cases of the comparisons."""
