"""Average gradients over the ranks of an elastic group, again if a rank dies, within the backward pass."""

# Annotations are not postponed, because PyTorch compares a hook's.
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from paceline.collectives import CollectiveTicket, Group
from paceline.collectives.elastic import ElasticGroup
from paceline.errors import CollectiveError
from paceline.torch.strategies.elastic.state import broadcast_copies


@dataclass
class _Bucket:
    buffer: Tensor
    """DistributedDataParallel's memory, which receives the mean."""
    local: Tensor
    """This rank's gradients, on the CPU. They stay unchanged, to be averaged again if a rank dies."""
    mean: Tensor
    """The mean on the CPU: `buffer` itself, unless it is on another device."""
    future: Future[Tensor]
    ticket: Optional[CollectiveTicket] = None  # noqa: UP045  (postponed annotations are not allowed here)


class ElasticGradients:
    """The gradients of one model. Backward ends when all ranks have the mean, or when all survivors have theirs."""

    def __init__(self, group: ElasticGroup, model: nn.Module) -> None:
        self.num_committed = 0
        """Number of backward passes whose gradients were averaged."""
        self.contributors = group.members
        """The incarnations of the ranks whose gradients are in the last mean."""
        self._group = group
        self._model = model
        self._buckets: list[_Bucket] = []
        self._local: dict[int, Tensor] = {}
        """Memory of the local gradients by bucket, for the next backward pass."""

    def hook(self, _: Any, bucket: GradBucket) -> Future[Tensor]:
        """Average a bucket: the hook of ``DistributedDataParallel.register_comm_hook``."""
        if bucket.index() == 0:
            self._buckets = []  # the previous backward pass may have been interrupted
        buffer = bucket.buffer().detach()
        local = self._local.get(bucket.index())
        if local is None or local.shape != buffer.shape or local.dtype != buffer.dtype:
            local = self._local[bucket.index()] = torch.empty_like(buffer, device="cpu")
        local.copy_(buffer)
        mean = buffer if buffer.is_cpu else torch.empty_like(local)
        entry = _Bucket(buffer, local, mean, Future(devices=[buffer.device] if buffer.is_cuda else []))
        self._buckets.append(entry)
        if bucket.is_last():
            self._finish()
        else:
            entry.ticket = self._group.start_mean(local, mean)
        return entry.future

    def _finish(self) -> None:
        """Wait for all buckets, or average them again after the death of a rank."""
        buckets, self._buckets = self._buckets, []
        is_repeated = False

        def average(group: Group) -> list[Tensor]:
            nonlocal is_repeated
            is_first, is_repeated = not is_repeated, True
            for bucket in buckets:
                if is_first and bucket is not buckets[-1]:
                    if bucket.ticket is None:
                        raise CollectiveError("the group failed before this bucket")
                    bucket.ticket.wait()
                else:
                    group.all_reduce(bucket.local, "mean", out=bucket.mean)
            return self._share_buffers(group)

        shared = self._group.exchange(average)
        for tensor, value in zip(self._floating_buffers(), shared, strict=True):
            tensor.copy_(value)
        for bucket in buckets:
            if bucket.mean is not bucket.buffer:
                bucket.buffer.copy_(bucket.mean)
            bucket.future.set_result(bucket.buffer)
        self.num_committed += 1
        self.contributors = self._group.contributors

    def _floating_buffers(self) -> list[Tensor]:
        if not self._model.training:
            return []
        return [buffer.detach() for buffer in self._model.buffers() if buffer.is_floating_point() and buffer.numel()]

    def _share_buffers(self, group: Group) -> list[Tensor]:
        """Return rank 0's buffers, such as the statistics of BatchNorm."""
        buffers = self._floating_buffers()
        if group.size == 1:
            return buffers
        return broadcast_copies(group, buffers, 0)
