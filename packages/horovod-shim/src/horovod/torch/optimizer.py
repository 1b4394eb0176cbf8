"""The optimizer."""

from paceline.horovod import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
