"""Reductions over all ranks: all-reduce and reduce-scatter, of dense and sparse tensors.

Each operation has a form that waits, and a form ``*_async`` that returns a handle for :func:`synchronize`. Forms with
a final ``_`` write their results into their arguments. ``name`` identifies the operation on all ranks, so the ranks may
request operations in different orders. Operations without a name are numbered in each process set.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.horovod.calls import request, synchronize
from paceline.horovod.compression import Compression, Compressor
from paceline.horovod.context import current
from paceline.horovod.errors import HorovodInternalError
from paceline.horovod.exchanges import allgather_async, grouped_allgather
from paceline.horovod.execution import AVERAGE
from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.protocol.negotiation.requests import ADASUM, ALLREDUCE, REDUCESCATTER

Average: Final = 0
Sum: Final = 1
Adasum: Final = 2
Min: Final = 3
Max: Final = 4
Product: Final = 5

_REDUCTIONS: Final = {Average: AVERAGE, Sum: "sum", Adasum: ADASUM, Min: "min", Max: "max", Product: "product"}


def reduction_of(op: int | None, average: bool | None = None) -> str:
    """Return the name of the reduction `op`. Raises UsageError."""
    if average is not None:
        if op is not None:
            raise UsageError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn("the parameter `average` is deprecated; pass op=Average or op=Sum", DeprecationWarning, 4)
        op = Average if average else Sum
    name = _REDUCTIONS.get(Average if op is None else op)
    if name is None:
        raise UsageError(f"got op={op!r}, expected Average, Sum, Adasum, Min, Max or Product")
    return name


def _check_adasum(process_set: ProcessSet) -> None:
    size = current().group.size
    if process_set is not global_process_set:
        raise NotImplementedError("Adasum supports only the process set of all ranks")
    if size & (size - 1):
        raise NotImplementedError(f"Adasum needs a power of two as the number of ranks, got {size}")


def request_all_reduce(
    tensors: Sequence[Any],
    average: bool | None,
    name: str | None,
    op: int | None,
    scales: tuple[float, float],
    process_set: ProcessSet,
    *,
    in_place: bool,
    is_grouped: bool = False,
) -> int:
    """Start the all-reduce of one tensor or of a group, and return its handle. `scales` are the two factors."""
    reduction = reduction_of(op, average)
    if reduction == ADASUM:
        _check_adasum(process_set)
    return request(
        ALLREDUCE,
        tensors,
        name,
        process_set,
        is_grouped=is_grouped,
        in_place=in_place,
        reduction=reduction,
        scales=scales,
    )


def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an all-reduce, by default an average, and return its handle. See :func:`allreduce`."""
    scales = prescale_factor, postscale_factor
    return request_all_reduce([tensor], average, name, op, scales, process_set, in_place=False)


def allreduce_async_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an all-reduce that writes its result into `tensor`, and return its handle. See :func:`allreduce`."""
    scales = prescale_factor, postscale_factor
    return request_all_reduce([tensor], average, name, op, scales, process_set, in_place=True)


def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Write the reduction of `tensor` over all ranks into `tensor`. See :func:`allreduce`."""
    return synchronize(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set))


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the reduction of `tensor` over all ranks, by default the average. Gradients flow through it.

    `prescale_factor` multiplies the tensor before the reduction, and `postscale_factor` the result.
    Raises HorovodInternalError if the ranks' tensors differ in shape or dtype, or if a rank is lost.
    """
    scales = prescale_factor, postscale_factor
    compressed, ctx = compression.compress(tensor)
    (reduced,) = _AllReduceFunction.apply((average, name, op, scales, process_set, False), compressed)  # type: ignore[no-untyped-call]
    return compression.decompress(reduced, ctx)


def grouped_allreduce_async(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an all-reduce of several tensors as one operation, and return its handle. See :func:`allreduce`."""
    scales = prescale_factor, postscale_factor
    return request_all_reduce(tensors, average, name, op, scales, process_set, in_place=False, is_grouped=True)


def grouped_allreduce_async_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an all-reduce of several tensors that writes into the tensors, and return its handle."""
    scales = prescale_factor, postscale_factor
    return request_all_reduce(tensors, average, name, op, scales, process_set, in_place=True, is_grouped=True)


def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Write the reductions of several tensors over all ranks into the tensors. See :func:`allreduce`."""
    scales = prescale_factor, postscale_factor
    result: list[Any] = synchronize(grouped_allreduce_async_(tensors, average, name, op, *scales, process_set))
    return result


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the reductions of several tensors over all ranks. Gradients flow through them. See :func:`allreduce`."""
    scales = prescale_factor, postscale_factor
    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced = _AllReduceFunction.apply((average, name, op, scales, process_set, True), *(pair[0] for pair in pairs))  # type: ignore[no-untyped-call]
    return [compression.decompress(tensor, pair[1]) for tensor, pair in zip(reduced, pairs, strict=True)]


class _AllReduceFunction(torch.autograd.Function):
    """The all-reduce of one or more tensors. The gradients are reduced in the same way."""

    @staticmethod
    def forward(ctx: Any, arguments: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.arguments = arguments
        average, name, op, scales, process_set, is_grouped = arguments
        handle = request_all_reduce(
            tensors, average, name, op, scales, process_set, in_place=False, is_grouped=is_grouped
        )
        result = synchronize(handle)
        return tuple(result) if is_grouped else (result,)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        average, name, *rest = ctx.arguments
        arguments = (average, None if name is None else f"{name}.gradient", *rest)
        return None, *_AllReduceFunction.apply(arguments, *gradients)  # type: ignore[no-untyped-call]


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start the sum or average of a sparse COO tensor. Return a function that waits and returns the result."""
    if op not in (Average, Sum):
        raise UsageError(f"got op={op!r} for a sparse tensor, expected Average or Sum")
    own = tensor.coalesce()
    indices_handle = allgather_async(own.indices().t().contiguous(), name and f"{name}.indices", process_set)
    values_handle = allgather_async(own.values(), name and f"{name}.values", process_set)

    def wait() -> Tensor:
        indices, values = synchronize(indices_handle), synchronize(values_handle)
        if op == Average:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False).coalesce()

    return wait


def _reduce_scatter(
    tensors: Sequence[Any],
    name: str | None,
    op: int,
    process_set: ProcessSet,
    scales: tuple[float, float],
    *,
    is_grouped: bool,
) -> int:
    reduction = reduction_of(op)
    if reduction == ADASUM:
        raise HorovodInternalError("reducescatter does not support Adasum; pass op=Average or op=Sum")
    return request(
        REDUCESCATTER,
        tensors,
        name,
        process_set,
        is_grouped=is_grouped,
        reduction=reduction,
        scales=scales,
    )


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a reduce-scatter, and return its handle. See :func:`reducescatter`."""
    return _reduce_scatter([tensor], name, op, process_set, (prescale_factor, postscale_factor), is_grouped=False)


def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start the reduce-scatters of several tensors, and return one handle. See :func:`reducescatter`."""
    return _reduce_scatter(tensors, name, op, process_set, (prescale_factor, postscale_factor), is_grouped=True)


def reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce `tensor` over all ranks, divide the result along the first axis, and return this rank's part.

    If the number of rows is not a multiple of the number of ranks, each of the first ranks gets one more row.
    """
    scales = prescale_factor, postscale_factor
    compressed, ctx = compression.compress(tensor)
    (reduced,) = _ReduceScatterFunction.apply((name, op, process_set, scales, False), compressed)  # type: ignore[no-untyped-call]
    return compression.decompress(reduced, ctx)


def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Return the results of :func:`reducescatter` of several tensors. Gradients flow through them."""
    scales = prescale_factor, postscale_factor
    pairs = [compression.compress(tensor) for tensor in tensors]
    arguments = name, op, process_set, scales, True
    reduced = _ReduceScatterFunction.apply(arguments, *(pair[0] for pair in pairs))  # type: ignore[no-untyped-call]
    return [compression.decompress(tensor, pair[1]) for tensor, pair in zip(reduced, pairs, strict=True)]


class _ReduceScatterFunction(torch.autograd.Function):
    """The reduce-scatter of one or more tensors.

    The gradient is the all-gather of the ranks' gradients, scaled as in Horovod.
    """

    @staticmethod
    def forward(ctx: Any, arguments: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        name, op, process_set, scales, is_grouped = arguments
        result = synchronize(_reduce_scatter(tensors, name, op, process_set, scales, is_grouped=is_grouped))
        ctx.process_set, ctx.scale = process_set, scales[0] * scales[1] * (process_set.size() if op == Sum else 1)
        return tuple(result) if is_grouped else (result,)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        scaled = [gradient * ctx.scale for gradient in gradients]
        return None, *grouped_allgather(scaled, process_set=ctx.process_set)
