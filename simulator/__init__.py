"""Simulate whole clusters in virtual time. One seed selects all faults, and every guarantee of Paceline is checked.

The nodes of a *protocol run* are the protocol's cores with thin adapters. The nodes of a *product run* are the
product's own processes. ``python -m simulator`` runs many simulations.
"""

from simulator.cluster import Cluster, Outcome
from simulator.oracle import Violation
from simulator.protocol import FOLLOWING, KINDS, ProtocolCluster
from simulator.settings import RunSettings

__all__ = ["FOLLOWING", "KINDS", "Cluster", "Outcome", "ProtocolCluster", "RunSettings", "Violation"]
