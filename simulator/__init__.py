"""Simulate whole clusters in virtual time. One seed selects all faults, and every guarantee of Paceline is checked.

Nodes of *protocol runs* are the protocol's cores with thin adapters, nodes of *product runs* the product's own
processes. ``python -m simulator`` runs many.
"""

from simulator.cluster import Cluster, Outcome
from simulator.oracle import Violation
from simulator.protocol import FOLLOWING, KINDS, ProtocolCluster
from simulator.settings import RunSettings

__all__ = ["FOLLOWING", "KINDS", "Cluster", "Outcome", "ProtocolCluster", "RunSettings", "Violation"]
