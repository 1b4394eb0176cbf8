"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from paceline.horovod.context import rank, size
from paceline.horovod.reductions import Sum, allreduce_
from paceline.torch.strategies.replicas.sync_batch_norm import RankSums, SyncBatchNorm


class HorovodSums(RankSums):
    """Sums over the ranks of Horovod."""

    @property
    def rank(self) -> int:
        return rank()

    @property
    def size(self) -> int:
        return size()

    @override
    def add_(self, tensor: Tensor) -> None:
        allreduce_(tensor, op=Sum)


class HorovodSyncBatchNorm(SyncBatchNorm):
    """``BatchNorm1d``, ``2d`` or ``3d`` over the inputs [N, C, ...] of all ranks, on CPU and CUDA."""

    sums = HorovodSums()
