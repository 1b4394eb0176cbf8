"""Requests of operations, and the handles of these requests."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.horovod.context import current
from paceline.horovod.engine import HorovodEngine
from paceline.horovod.execution import AVERAGE, TensorEntry
from paceline.horovod.process_sets import ProcessSet
from paceline.kernels.combine import DTYPES
from paceline.protocol.negotiation.requests import UNNAMED, TensorRequest

_DTYPES: Final = {getattr(torch, name): name for name in DTYPES}


class Splits(NamedTuple):
    """The splits of an all-to-all."""

    rows: Sequence[int]
    """The number of rows that this rank sends to each rank."""
    like: Tensor
    """A tensor of the dtype and the device of the received splits."""


class HorovodCall:
    """A call whose handle the user has: its entries and the form of its result."""

    __slots__ = ("are_arrays", "engine", "entries", "is_list", "splits")

    def __init__(
        self,
        engine: HorovodEngine,
        entries: Sequence[TensorEntry],
        are_arrays: Sequence[bool],
        *,
        is_list: bool,
        splits: Splits | None,
    ) -> None:
        """`splits` is None for operations other than all-to-all."""
        self.engine, self.entries, self.are_arrays, self.is_list = engine, entries, are_arrays, is_list
        self.splits = splits

    def result(self) -> Any:
        results: list[Any] = []
        for entry, is_array in zip(self.entries, self.are_arrays, strict=True):
            output: Any = entry.output.numpy() if is_array and entry.output is not None else entry.output
            results.append(
                output if self.splits is None else (output, self.splits.like.new_tensor(entry.received_splits))
            )
        return results if self.is_list else results[0]


_calls: dict[int, HorovodCall] = {}
_handles = itertools.count()
_naming = threading.Lock()


def request(
    operation: str,
    tensors: Sequence[Any],
    name: str | None,
    process_set: ProcessSet,
    *,
    in_place: bool | None = None,
    is_grouped: bool = False,
    splits: Splits | None = None,
    reduction: str = "",
    scales: tuple[float, float] = (1.0, 1.0),
    root: int = -1,
) -> int:
    """Submit one request per tensor, and return the handle.

    With `in_place` True, the results are written into the tensors, and with False into new tensors of the same shapes.
    With None, the shapes of the results depend on the other ranks.
    """
    context = current()
    number = process_set.process_set_id
    if number is None:
        raise UsageError(f"{process_set} was not added; pass it to init() or add_process_set() first")
    if not process_set.included():
        raise UsageError(f"rank {context.group.rank} is not in {process_set}, so it cannot run {operation} there")
    if name is None:
        with _naming:
            index = context.num_unnamed.get(number, 0)
            context.num_unnamed[number] = index + 1
        name = f"{UNNAMED}{index}"
    group = f"{name}.{len(tensors)}" if is_grouped else ""
    entries: list[TensorEntry] = []
    for place, value in enumerate(tensors):
        tensor = as_tensor(value, is_target=bool(in_place))
        if tensor.dtype == torch.bool and reduction == AVERAGE:
            raise UsageError("booleans have no average. Pass op=Max (any rank), op=Min (all ranks), or tensor.float()")
        one = TensorRequest(
            f"{name}.{place + 1}of{len(tensors)}" if is_grouped else name,
            operation,
            _name_of_dtype(tensor),
            tuple(tensor.shape),
            tensor.nbytes,
            reduction,
            root,
            float(scales[0]),
            float(scales[1]),
            "cpu" if tensor.is_cpu else tensor.device.type,
            group,
            number,
        )
        output = tensor if in_place else None
        if in_place is False:
            output = torch.empty_like(tensor, requires_grad=False, memory_format=torch.contiguous_format)
        entries.append(TensorEntry(one, tensor, output, () if splits is None else splits.rows))
    if entries:
        context.engine.submit(entries)
    handle = next(_handles)
    are_arrays = [not isinstance(value, Tensor) for value in tensors]
    _calls[handle] = HorovodCall(context.engine, entries, are_arrays, is_list=is_grouped, splits=splits)
    return handle


def as_tensor(value: Any, *, is_target: bool = False) -> Tensor:
    """Return the tensor, or a tensor with the memory of a NumPy array. `is_target`: a result is written into it."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, np.ndarray):
        raise UsageError(f"got {type(value).__name__}, expected a PyTorch tensor or a NumPy array")
    if not value.flags.writeable:
        if is_target:
            raise UsageError("the array is read-only, so no result can be written into it; pass a writable array")
        value = value.copy()
    return torch.from_numpy(value)


def _name_of_dtype(tensor: Tensor) -> str:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided:
        raise UsageError(
            f"Tensor type {tensor.type()} is not supported. Pass a dense tensor of {', '.join(_DTYPES.values())}; for "
            "sparse tensors call sparse_allreduce_async()"
        )
    return dtype


def forget_calls() -> None:
    """Drop all handles. Handles of failed calls that no caller synchronizes would keep their tensors."""
    _calls.clear()


def poll(handle: int) -> bool:
    """Return whether an operation is done, so that :func:`synchronize` does not wait."""
    call = _calls.get(handle)
    return call is None or all(entry.is_done for entry in call.entries)


def synchronize(handle: int) -> Any:
    """Wait for an operation, and return its result. Return None for an unknown or synchronized handle.

    Raises HorovodInternalError if the operation failed.
    """
    call = _calls.pop(handle, None)
    if call is None:
        return None
    for entry in call.entries:
        call.engine.wait(entry)
    return call.result()
