"""Protocol runs: the protocol's cores, each with a thin adapter, on a virtual clock and network."""

from simulator.protocol.cluster import FOLLOWING, KINDS, ProtocolCluster

__all__ = ["FOLLOWING", "KINDS", "ProtocolCluster"]
