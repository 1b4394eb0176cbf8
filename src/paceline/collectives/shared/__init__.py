"""Run collectives of ranks on one host with kernels on shared memory."""
