"""Batch normalization over all ranks."""

from paceline.horovod import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
