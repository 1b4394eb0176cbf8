"""Product runs: the product's own servers, scheduler and clients, its tables and kernels, in virtual time.

The simulation replaces only the system under the product: event loops (`loop`), threads and clocks (`primitives`), and
connections (`streams`, `transport`). One thread runs at a time, and the seed determines which, so runs can be repeated.
"""

from simulator.product.cluster import ProductCluster
from simulator.product.faults import KINDS

__all__ = ["KINDS", "ProductCluster"]
