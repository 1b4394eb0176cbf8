"""Whole clusters of the protocol's machines on a virtual clock and network, from one seed.

A :class:`Cluster` runs a scheduler, servers and workers as thin as the real ones around the same machines, lets drawn
faults happen, and checks after every event what Paceline promises. ``python -m simulator`` runs many.
"""

from simulator.cluster import Cluster, ClusterSize, Outcome
from simulator.faults import FOLLOWING, KINDS
from simulator.oracle import Violation

__all__ = ["FOLLOWING", "KINDS", "Cluster", "Outcome", "ClusterSize", "Violation"]
