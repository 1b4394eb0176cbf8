"""Operations that move tensors between ranks: all-gather, broadcast, all-to-all, barrier and join."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.horovod.calls import Splits, request, synchronize
from paceline.horovod.context import current
from paceline.horovod.execution import AVERAGE
from paceline.horovod.process_sets import ProcessSet, global_process_set, number_of
from paceline.protocol.negotiation.requests import ALLGATHER, ALLREDUCE, ALLTOALL, BARRIER, BROADCAST


def allgather_async(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start an all-gather, and return its handle. See :func:`allgather`."""
    return request(ALLGATHER, [tensor], name, process_set)


def grouped_allgather_async(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start the all-gathers of several tensors, and return one handle. See :func:`allgather`."""
    return request(ALLGATHER, tensors, name, process_set, is_grouped=True)


def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Return the tensors of all ranks, concatenated along the first axis. The numbers of rows may differ."""
    return _AllGatherFunction.apply(name, process_set, False, tensor)[0]  # type: ignore[no-untyped-call]


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the results of :func:`allgather` of several tensors. Gradients flow through them."""
    return [*_AllGatherFunction.apply(name, process_set, True, *tensors)]  # type: ignore[no-untyped-call]


class _AllGatherFunction(torch.autograd.Function):
    """The all-gather of one or more tensors.

    The gradient is this rank's rows of the average over all ranks, as in Horovod.
    """

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, is_grouped: bool, *tensors: Any) -> Any:
        result = synchronize(request(ALLGATHER, tensors, name, process_set, is_grouped=is_grouped))
        ctx.num_rows, ctx.process_set = [len(tensor) for tensor in tensors], process_set
        return tuple(result) if is_grouped else (result,)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        rows = allgather(torch.tensor([ctx.num_rows]), process_set=ctx.process_set)
        starts = rows[: ctx.process_set.rank()].sum(0).tolist()
        averages = synchronize(
            request(ALLREDUCE, gradients, None, ctx.process_set, in_place=False, is_grouped=True, reduction=AVERAGE)
        )
        parts = zip(averages, starts, ctx.num_rows, strict=True)
        return None, None, None, *(average.narrow(0, start, length) for average, start, length in parts)


def _broadcast(tensor: Any, root_rank: int, name: str | None, process_set: ProcessSet, *, in_place: bool) -> int:
    current()
    number_of(process_set)
    if root_rank not in process_set.ranks:
        raise UsageError(f"got root_rank={root_rank}, expected one of the ranks {process_set.ranks}")
    return request(BROADCAST, [tensor], name, process_set, in_place=in_place, root=int(root_rank))


def broadcast_async(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a broadcast, and return its handle. See :func:`broadcast`."""
    return _broadcast(tensor, root_rank, name, process_set, in_place=False)


def broadcast_async_(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a broadcast into `tensor`, and return its handle. See :func:`broadcast`."""
    return _broadcast(tensor, root_rank, name, process_set, in_place=True)


def broadcast_(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Copy the tensor of rank `root_rank` into the tensors of all ranks."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the tensor of the global rank `root_rank`. The tensors of all ranks must have the same shape."""
    return _BroadcastFunction.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]


class _BroadcastFunction(torch.autograd.Function):
    """The broadcast. As in Horovod, the root's gradient is the average over all ranks, and the others are 0."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        average = _average(gradient, ctx.process_set)
        return average if current().group.rank == ctx.root_rank else torch.zeros_like(average), None, None, None


def alltoall_async(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an all-to-all, and return its handle. The result is the received rows and splits."""
    current()
    number_of(process_set)
    size = len(process_set.ranks)
    shape = tuple(getattr(tensor, "shape", ()))
    if splits is None:
        if shape and shape[0] % size:
            raise UsageError(f"got {shape[0]} rows, which {size} ranks cannot divide equally; pass splits")
        rows = [shape[0] // size] * size if shape else []
    else:
        try:
            rows = [operator.index(number) for number in (splits.tolist() if hasattr(splits, "tolist") else splits)]
        except TypeError:
            raise UsageError(f"got splits={splits!r}, expected a list, an array or a tensor of integers") from None
        if len(rows) != size or min(rows) < 0 or not shape or sum(rows) != shape[0]:
            raise UsageError(
                f"got splits {rows} for {shape[0] if shape else 0} rows and {size} ranks; pass one number per rank, "
                "whose sum is the number of rows"
            )
    like = splits if isinstance(splits, Tensor) else torch.empty(0, dtype=torch.int32)
    return request(ALLTOALL, [tensor], name, process_set, splits=Splits(rows, like))


def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send rows of `tensor` to each rank, and return the received rows in the order of ranks.

    `splits` is the number of rows for each rank. Without it, all ranks get the same number of rows. With it, return a
    pair: the received rows, and the number of rows from each rank.
    """
    output, received = _AllToAllFunction.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
    return output if splits is None else (output, received)


class _AllToAllFunction(torch.autograd.Function):
    """The all-to-all. The gradients travel back with the received splits."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        output, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.received, ctx.process_set = received, process_set
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        return alltoall(gradient, ctx.received, process_set=ctx.process_set)[0], None, None, None


def _average(tensor: Tensor, process_set: ProcessSet) -> Any:
    return synchronize(request(ALLREDUCE, [tensor], None, process_set, in_place=False, reduction=AVERAGE))


def join(device: int = -1) -> int:
    """Take part in the operations of the other ranks until all ranks have joined. Return the rank that joined last.

    Call it when this rank has no more data. While it waits, this rank contributes zeros to sums and averages, the
    neutral value to other reductions, and no rows to all-gathers and all-to-alls. `device` has no effect.
    """
    context = current()
    last = context.engine.join()
    context.num_unnamed.clear()  # the ranks have requested different numbers of operations
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the process set have called this function."""
    synchronize(request(BARRIER, [torch.empty(0)], None, process_set))
