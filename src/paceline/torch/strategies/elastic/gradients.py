"""Average gradients over the samples of an elastic group. If a rank dies, backward repeats the average without it."""

# No `from __future__ import annotations`: PyTorch compares the annotations of a hook with types, not with text.
from dataclasses import dataclass
from typing import Any, NoReturn, Optional

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from paceline.collectives import CollectiveTicket, Group
from paceline.collectives.elastic import ElasticGroup
from paceline.errors import CollectiveError, UsageError
from paceline.torch.strategies.elastic.state import broadcast_copies
from paceline.torch.strategies.elastic.steps import ElasticSteps


@dataclass
class _Mean:
    local: Tensor
    """This rank's values, on the CPU. They do not change, because the average is repeated if a rank dies."""
    mean: Tensor
    """The mean over the ranks, on the CPU."""
    ticket: Optional[CollectiveTicket] = None  # noqa: UP045  (see the comment above)


@dataclass
class _Bucket:
    gradients: list[tuple[Tensor, Tensor]]
    """The parameters, each with its part of `buffer`; empty without a global batch."""
    buffer: Tensor
    """DistributedDataParallel's memory of the bucket, to which the mean is written."""
    value: _Mean
    """`value.mean` is `buffer` itself if the buffer is on the CPU."""
    future: Future[Tensor]


class ElasticGradients:
    """Averages the gradients of one model. Backward ends when all living ranks have the same mean.

    The mean is over samples: each rank's gradients have the number of its samples as weight. If a step has several
    batches, the gradients of all batches except the last are added to `_earlier`, and the optimizer gets zeros.
    """

    def __init__(self, group: ElasticGroup, model: nn.Module, steps: ElasticSteps) -> None:
        self._group = group
        self._model = model
        self._steps = steps
        self._buckets: list[_Bucket] = []
        self._weight = _Mean(torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
        """The total weight of this rank's batches in the step, and its mean over the ranks."""
        self._batch_weight = 1.0
        self._batch = -1
        """The number of the last batch with gradients."""
        self._earlier: dict[Tensor, Tensor] = {}
        """The weighted gradients of earlier batches of the step; empty in its first batch."""
        self._local: dict[int, Tensor] = {}
        """Memory for copies of this rank's gradients, by bucket; each backward pass uses it again."""

    def hook(self, _: Any, bucket: GradBucket) -> Future[Tensor]:
        """Start to average a bucket. DistributedDataParallel calls this hook for every bucket."""
        if bucket.index() == 0:
            self._begin()
        buffer = bucket.buffer().detach()
        has_steps = self._steps.global_batch is not None
        gradients = list(zip(bucket.parameters(), bucket.gradients(), strict=True)) if has_steps else []
        if not self._batch_weight:
            buffer.zero_()  # instead of a product with 0: infinity times 0 is NaN
        elif self._batch_weight != 1.0:
            buffer.mul_(self._batch_weight)
        if self._earlier:
            for parameter, gradient in gradients:
                gradient.add_(self._earlier[parameter])
        local = self._local.get(bucket.index())
        if local is None or local.shape != buffer.shape or local.dtype != buffer.dtype:
            local = self._local[bucket.index()] = torch.empty_like(buffer, device="cpu")
        local.copy_(buffer)
        mean = buffer if buffer.is_cpu else torch.empty_like(local)
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else [])
        self._buckets.append(_Bucket(gradients, buffer, _Mean(local, mean), future))
        if not self._steps.is_last_batch:
            if bucket.is_last():
                self._keep()
        elif bucket.is_last():
            self._finish()
        else:
            self._start(self._buckets[-1].value)
        return future

    def _begin(self) -> None:
        """Begin a backward pass."""
        self._buckets = []  # drop the buckets of an interrupted backward pass
        self._batch_weight = self._steps.take_weight() * self._group.is_ready
        if self._steps.is_first_batch:
            self._earlier = {}
        if not self._earlier:
            self._weight.local.zero_()
        if self._steps.global_batch is not None and self._group.quorum:
            if self._batch == self._steps.num_batches:
                self.reject_backward()
            self._batch = self._steps.num_batches
        self._weight.local += self._batch_weight
        if self._steps.is_last_batch:
            self._start(self._weight)

    def reject_backward(self, *_: Any) -> NoReturn:
        """Raise UsageError for a second backward pass of a batch."""
        raise UsageError(
            "--global-batch: backward() was called a second time for one batch: call it once, on the sum of the losses"
        )

    def _start(self, value: _Mean) -> None:
        if not self._steps.lacks(self._group.ready):
            value.ticket = self._group.start_mean(value.local, value.mean)

    def _finish(self) -> None:
        """Wait for the averages of all buckets. After the death of a rank, compute them again."""
        values = [self._weight, *(bucket.value for bucket in self._buckets)]
        is_repeated = False

        def average(group: Group) -> Optional[list[Tensor]]:  # noqa: UP045
            """Average the values over `group`. Return rank 0's buffers, or None if samples of the step are missing."""
            nonlocal is_repeated
            is_first, is_repeated = not is_repeated, True
            if self._steps.lacks(self._group.ready):
                return None
            for value in values[:-1] if is_first else ():
                if value.ticket is None:
                    raise CollectiveError("the group failed before the average of a gradient bucket was started")
                value.ticket.wait()
            for value in values[-1:] if is_first else values:
                group.all_reduce(value.local, "mean", out=value.mean)
            return broadcast_copies(group, self._floating_buffers(), 0)

        shared = self._group.exchange(average, is_step=True)
        self._steps.exchanged(self._group.contributors, is_complete=shared is not None)
        if shared is None:
            self._keep()
            return
        for tensor, value in zip(self._floating_buffers(), shared, strict=True):
            tensor.copy_(value)
        # If all ranks with samples have died, all weights and all gradients are zero. Avoid a division by zero.
        weight = self._weight.mean.item() or 1.0
        self._earlier = {}
        for bucket in self._buckets:
            if weight != 1.0:
                bucket.value.mean.div_(weight)
            if bucket.value.mean is not bucket.buffer:
                bucket.buffer.copy_(bucket.value.mean)
        self._return()

    def _keep(self) -> None:
        """Store the gradients for the next batch of the step, and give zeros to the optimizer."""
        self._group.load_part()  # before the loop changes other states, such as an average of the model
        for bucket in self._buckets:
            bucket.buffer.copy_(bucket.value.local)
            for parameter, gradient in bucket.gradients:
                self._earlier.setdefault(parameter, torch.empty_like(gradient)).copy_(gradient)
            bucket.buffer.zero_()
        self._return()

    def _return(self) -> None:
        """End the backward pass."""
        buckets, self._buckets = self._buckets, []
        for bucket in buckets:
            bucket.future.set_result(bucket.buffer)

    def _floating_buffers(self) -> list[Tensor]:
        if not self._model.training:
            return []
        return [buffer.detach() for buffer in self._model.buffers() if buffer.is_floating_point() and buffer.numel()]
