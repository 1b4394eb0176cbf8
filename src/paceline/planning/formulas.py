"""The closed formulas for the time to combine M bytes of gradients of n workers.

B is the speed of a machine's link in bytes per second in each direction, k the number of separate machines for servers.
Pure.

Sources: Patarasuk and Yuan 2009 for the ring; Jiang et al., "A Unified Architecture for Accelerating Distributed DNN
Training in Heterogeneous GPU/CPU Clusters" (BytePS), OSDI 2020, for servers and the optimum.
"""

from __future__ import annotations


def ring_s(num_bytes: float, workers: int, bytes_per_s: float, latency_s: float = 0.0) -> float:
    """Return the seconds of an all-reduce by the ring: 2 (n - 1) (α + M / (n B))."""
    return 2 * (workers - 1) * (latency_s + num_bytes / (workers * bytes_per_s))


def byteps_optimum_s(num_bytes: float, workers: int, servers: int, bytes_per_s: float) -> float:
    """Return the shortest time with k separate servers and a server on each worker's machine, for k up to n.

    It is 2n (n - 1) M / ((n² + kn - 2k) B).
    """
    denominator = workers * workers + servers * workers - 2 * servers
    return 2 * workers * (workers - 1) * num_bytes / (denominator * bytes_per_s)


def pipeline_bubble(ranks: int, microbatches: int, parts_per_rank: int = 1) -> float:
    """Return the share of waiting in a pipeline's step with equal stages: (p - 1) / (v m + p - 1).

    v is the number of stages per rank (Narayanan et al., SC 2021, section 2.2).
    """
    return (ranks - 1) / (parts_per_rank * microbatches + ranks - 1)
