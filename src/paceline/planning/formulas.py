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


def separate_servers_s(num_bytes: float, workers: int, servers: int, bytes_per_s: float) -> float:
    """Return the seconds with servers on k machines of their own, if pushes overlap with pulls: max(M/B, nM/(kB))."""
    return max(num_bytes / bytes_per_s, workers * num_bytes / (servers * bytes_per_s))


def colocated_servers_s(num_bytes: float, workers: int, bytes_per_s: float) -> float:
    """Return the seconds with one server on each worker's machine: 2 (n - 1) M / (n B)."""
    return 2 * (workers - 1) * num_bytes / (workers * bytes_per_s)


def byteps_optimum_s(num_bytes: float, workers: int, servers: int, bytes_per_s: float) -> float:
    """Return the shortest time with k separate servers and a server on each worker's machine, for k up to n.

    It is 2n (n - 1) M / ((n² + kn - 2k) B).
    """
    return 2 * workers * (workers - 1) * num_bytes / (_denominator(workers, servers) * bytes_per_s)


def byteps_share(workers: int, servers: int) -> float:
    """Return the share of the bytes on the separate servers together, for the optimum: 2k (n - 1) / (n² + kn - 2k)."""
    return 2 * servers * (workers - 1) / _denominator(workers, servers)


def _denominator(workers: int, servers: int) -> int:
    return workers * workers + servers * workers - 2 * servers


def pipeline_bubble(stages: int, microbatches: int) -> float:
    """Return the share of waiting in a pipeline's step with equal stages: (p - 1) / (m + p - 1)."""
    return (stages - 1) / (microbatches + stages - 1)
