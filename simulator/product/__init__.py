"""Product runs: the product's own servers, scheduler and clients, its tables and kernels, in virtual time.

Only the system under the product is replaced: event loops (`loop`), threads and clocks (`primitives`), streams
(`streams`, `transport`). One thread runs at a time, and the seed decides which one is next: every run replays.
"""

from simulator.product.cluster import ProductCluster
from simulator.product.faults import KINDS

__all__ = ["KINDS", "ProductCluster"]
