"""Clusters of the product itself in virtual time: its servers, scheduler and clients, its tables and kernels.

Nothing of the product is replaced but the system under it: event loops (`loop`), threads and clocks (`world`,
`primitives`), connections (`network`, `transport`). One thread runs at a time, and a seed decides which is next: so
every run replays. `faults` breaks what can break; `truth` says what every bucket must hold.
"""

from simulator.product.cluster import ProductCluster, ProductOutcome
from simulator.product.faults import KINDS as PRODUCT_KINDS
from simulator.product.state import ProductSettings

__all__ = ["PRODUCT_KINDS", "ProductCluster", "ProductOutcome", "ProductSettings"]
