"""Reference implementations of the kernels in NumPy and plain Python, and the cases that compare the two."""
