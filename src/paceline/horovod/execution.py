"""Run agreed operations on tensors with Paceline's collectives. All ranks run them in the same order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from paceline.collectives import Group
from paceline.horovod.entries import TensorEntry
from paceline.protocol.negotiation.requests import (
    ADASUM,
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BROADCAST,
    GLOBAL_SET,
    REDUCESCATTER,
    TensorRequest,
)

AVERAGE: Final = "average"
_ADASUM_TAG: Final = 1
_MOST_FUSED: Final = 16


class TensorExecutor:
    """Runs operations one after another."""

    def __init__(self, group: Group) -> None:
        """`group` has all ranks."""
        self.groups = {GLOBAL_SET: group}
        """The groups of the process sets that this rank belongs to."""
        self._phases: list[tuple[str, int]] = []
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        """The memory of every fused tensor. Only one of them is in use at a time."""
        self._fused: dict[int, tuple[Sequence[TensorRequest], Tensor, list[Tensor], bool]] = {}
        """The results of :meth:`_fusion_buffer`, by the identity of the requests."""

    def run(
        self, requests: Sequence[TensorRequest], entries: Sequence[TensorEntry | None]
    ) -> Sequence[tuple[str, int]]:
        """Run one operation, and return the name and the end of each of its phases, for the timeline.

        A rank without an entry has joined, and contributes nothing to the result. The ends are in nanoseconds of the
        monotonic clock.
        """
        request, entry = requests[0], entries[0]
        self._phases = []
        self._end_phase("QUEUE")
        group = self.groups[request.process_set]
        is_fused = len(requests) > 1
        if is_fused:
            with torch.inference_mode():  # saves time, and allows outputs from the inference mode of the caller
                self._all_reduce_fused(group, requests, entries)
        else:
            with torch.inference_mode(False), torch.no_grad():
                self._run_one(group, request, entry)
        self._end_phase("MEMCPY_OUT_FUSION_BUFFER" if is_fused else f"PACELINE_{request.operation.upper()}")
        return self._phases

    def _end_phase(self, name: str) -> None:
        self._phases.append((name, time.monotonic_ns()))

    def _run_one(self, group: Group, request: TensorRequest, entry: TensorEntry | None) -> None:
        if request.operation == BROADCAST:
            self._broadcast(group, request, entry)
        elif request.operation in (ALLREDUCE, ALLGATHER, ALLTOALL, REDUCESCATTER):
            # The contribution of a joined rank is neutral without the scale.
            source = _neutral_tensor(request) if entry is None else _scale(entry.source(), request.prescale)
            if request.operation == ALLREDUCE and request.reduction == ADASUM:
                result = _scale(adasum(group, source), request.postscale)
            elif request.operation == ALLREDUCE:
                out = entry.output if entry is not None and entry.stream is None else None
                result = _reduce(group, source, request, out=out)
            elif request.operation == ALLGATHER:
                result = group.all_gather(source, sizes=group.gather_sizes(source))
            elif request.operation == ALLTOALL:
                result = _all_to_all(group, source, entry)
            else:
                rows = _divide_rows(request.shape[0], group.size)
                result = _reduce(group, source, request, rows)
            if entry is not None:
                entry.finish(result)
        else:
            group.barrier()

    def _all_reduce_fused(
        self, group: Group, requests: Sequence[TensorRequest], entries: Sequence[TensorEntry | None]
    ) -> None:
        own: list[Any] = [*filter(None, entries)]
        is_on_host = requests[0].device == "cpu" and len(own) == len(entries)
        if is_on_host:
            sources = [entry.tensor for entry in own]
        else:
            pairs = zip(requests, entries, strict=True)
            sources = [
                _neutral_tensor(request) if entry is None else _scale(entry.source(), request.prescale)
                for request, entry in pairs
            ]
        fused, parts, are_vectors = self._fusion_buffer(requests)
        if are_vectors:
            torch.cat(sources, out=fused)  # takes half as long
        else:
            torch._foreach_copy_(parts, sources)
        self._end_phase("MEMCPY_IN_FUSION_BUFFER")
        source = _scale(fused, requests[0].prescale) if is_on_host else fused
        result = _reduce(group, source, requests[0], out=fused)
        if result.data_ptr() != fused.data_ptr():
            fused.copy_(result)
        self._end_phase("PACELINE_ALLREDUCE")
        if is_on_host:
            torch._foreach_copy_([entry.output for entry in own], parts)
            return
        for entry, part in zip(entries, parts, strict=True):
            if entry is not None:
                entry.finish(part)

    def _fusion_buffer(self, requests: Sequence[TensorRequest]) -> tuple[Tensor, list[Tensor], bool]:
        """Return a tensor for all tensors of an all-reduce, its parts, and whether all parts are vectors.

        Equal calls reuse the tensors.
        """
        known = self._fused.get(id(requests))
        if known is not None and known[0] is requests:
            return known[1:]
        num_bytes = sum(request.num_bytes for request in requests)
        if num_bytes > self._buffer.numel() or len(self._fused) >= _MOST_FUSED:
            self._fused.clear()
        if num_bytes > self._buffer.numel():
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        fused = self._buffer[:num_bytes].view(getattr(torch, requests[0].dtype))
        sizes = [request.num_bytes // fused.element_size() for request in requests]
        parts = [part.view(request.shape) for part, request in zip(torch.split(fused, sizes), requests, strict=True)]
        are_vectors = all(len(request.shape) == 1 for request in requests)
        self._fused[id(requests)] = requests, fused, parts, are_vectors
        return fused, parts, are_vectors

    def _broadcast(self, group: Group, request: TensorRequest, entry: TensorEntry | None) -> None:
        root = group.ranks.index(self.groups[GLOBAL_SET].ranks[request.root])
        if entry is None:
            group.broadcast(_neutral_tensor(request), root=root)
            return
        assert entry.tensor is not None
        assert entry.output is not None
        if group.rank == root:
            source = entry.source()
            group.broadcast(source, root=root)
            if entry.output is not entry.tensor:
                entry.finish(source)
        else:
            target = entry.output if entry.stream is None else torch.empty_like(entry.output, device="cpu")
            entry.finish(group.broadcast(target, root=root))


def _reduce(
    group: Group, source: Tensor, request: TensorRequest, rows: Sequence[int] | None = None, out: Tensor | None = None
) -> Tensor:
    """Return the reduction of a tensor over all ranks, times the second scale. With `rows`, return this rank's rows."""
    name, divides = request.reduction, False
    if name == AVERAGE:
        # Another number of ranks has no exact inverse, so its average is the divided sum. Then the mean of equal
        # values is the same value.
        divides = not source.is_floating_point() or group.size & (group.size - 1) > 0
        name = "sum" if divides else "mean"
    if rows is not None:
        result: Tensor = group.reduce_scatter(source, name, sizes=rows)
    else:
        result = group.all_reduce(source, name, out=out)
    if divides:
        with torch.inference_mode():  # the result may be a tensor from the inference mode of the caller
            result.div_(group.size, rounding_mode=None if result.is_floating_point() else "trunc")
    return _scale(result, request.postscale)


def _scale(tensor: Tensor, factor: float) -> Tensor:
    """Return `tensor * factor`. As in Horovod, compute integers in float64 and half precision in float32."""
    if factor == 1.0:
        return tensor
    if not tensor.is_floating_point():
        return (tensor.double() * factor).to(tensor.dtype)
    wide = tensor.float() if tensor.element_size() < 4 else tensor
    return (wide * factor).to(tensor.dtype)


def _divide_rows(num_rows: int, size: int) -> list[int]:
    return [num_rows // size + (rank < num_rows % size) for rank in range(size)]


def _all_to_all(group: Group, source: Tensor, entry: TensorEntry | None) -> Tensor:
    sends = [0] * group.size if entry is None else list(entry.splits)
    receives = [int(number) for number in group.all_to_all(np.array(sends, np.int64))]
    if entry is not None:
        entry.received_splits = receives
    result: Tensor = group.all_to_all(source, send_sizes=sends, receive_sizes=receives)
    return result


def _neutral_tensor(request: TensorRequest) -> Tensor:
    """Return the tensor of a joined rank: without rows, or with values that do not change the reduction."""
    dtype: torch.dtype = getattr(torch, request.dtype)
    if request.operation in (ALLGATHER, ALLTOALL):
        return torch.zeros((0, *request.shape), dtype=dtype, device="cpu")
    value: float = 1 if request.reduction == "product" else 0
    if request.reduction in ("min", "max") and dtype != torch.bool:
        limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        value = limits.max if request.reduction == "min" else limits.min
    elif request.reduction == "min":
        value = 1
    return torch.full(request.shape, value, dtype=dtype, device="cpu")


def adasum(group: Group, source: Tensor) -> Tensor:
    """Return the Adasum of a tensor over all ranks, whose number is a power of two.

    Adasum adds gradients that are orthogonal, and averages gradients that are parallel (Maleki et al., MLSys 2021,
    section 3). Each of log2(size) steps combines the results of two ranks.
    """
    result, distance = source.contiguous().clone(), 1
    while distance < group.size:
        peer = group.rank ^ distance
        received = torch.empty_like(result)
        ticket = group.send_async(result, peer, tag=_ADASUM_TAG)
        group.recv(received, peer, tag=_ADASUM_TAG)
        ticket.wait()
        # Both ranks of a pair compute the same sum in the same order, so all ranks get the same bits.
        first, second = (result, received) if group.rank < peer else (received, result)
        result = _adasum_of_two(first, second)
        distance *= 2
    return result


def _adasum_of_two(first: Tensor, second: Tensor) -> Tensor:
    a, b = first.double().reshape(-1), second.double().reshape(-1)
    product, norm_a, norm_b = float(a @ b), float(a @ a), float(b @ b)
    factor_a = 1.0 - product / (2.0 * norm_a) if norm_a else 1.0
    factor_b = 1.0 - product / (2.0 * norm_b) if norm_b else 1.0
    return (factor_a * a + factor_b * b).view(first.shape).to(first.dtype)
