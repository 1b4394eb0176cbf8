"""The engine for ranks on one host: kernels on shared memory."""
