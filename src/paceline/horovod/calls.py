"""Request operations, and keep their handles until :func:`synchronize`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.horovod.context import Context, current
from paceline.horovod.engine import HorovodEngine
from paceline.horovod.entries import TensorEntry
from paceline.horovod.execution import AVERAGE
from paceline.horovod.process_sets import ProcessSet, number_of
from paceline.kernels.combine import DTYPES
from paceline.protocol.negotiation.requests import Key, TensorRequest

_DTYPES: Final = {getattr(torch, name): name for name in DTYPES}
_MOST_REQUESTS: Final = 20_000


class Splits(NamedTuple):
    """The splits of an all-to-all."""

    rows: Sequence[int]
    """The number of rows that this rank sends to each rank."""
    like: Tensor
    """A tensor of the dtype and the device of the received splits."""


@dataclass(slots=True)
class ResultForm:
    """The form of the result of a call that is not one tensor."""

    are_arrays: Sequence[bool]
    """Whether the result of each entry is a NumPy array."""
    is_list: bool
    splits: Splits | None
    """None for operations other than all-to-all."""

    def make(self, entries: Sequence[TensorEntry]) -> Any:
        results: list[Any] = []
        for entry, is_array in zip(entries, self.are_arrays, strict=True):
            output: Any = entry.output.numpy() if is_array and entry.output is not None else entry.output
            if self.splits is not None:
                output = output, self.splits.like.new_tensor(entry.received_splits)
            results.append(output)
        return results if self.is_list else results[0]


_calls: dict[int, tuple[HorovodEngine, Sequence[TensorEntry], ResultForm | None]] = {}
"""The engine, the entries and the form of the result of each handle."""
_handles = itertools.count()


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

    With `in_place`, the operation writes its results into the tensors. If `in_place` is False, it writes them into new
    tensors of the same shapes. None means that the shapes of the results depend on the other ranks.
    """
    context = current()
    # A training repeats its calls, so the requests of the last equal call are used again.
    number = getattr(process_set, "process_set_id", None)
    call = (name, number, operation, reduction, root, scales, len(tensors) if is_grouped else -1)
    requests = context.requests.get(call)
    are_arrays: Sequence[bool] = [False] * len(tensors)
    if requests is None or not all(map(_fits, requests.values(), tensors)):
        number = _check_member(context, process_set, operation)
        are_arrays = [not isinstance(value, Tensor) for value in tensors]
        tensors = [as_tensor(value, is_target=bool(in_place)) for value in tensors]
        own_name = context.next_name(number) if name in (None, "") else _check_name(name)
        requests = _make_requests(
            tensors, own_name, operation, reduction, root, scales, is_grouped=is_grouped, process_set=number
        )
        if name:
            if len(context.requests) >= _MOST_REQUESTS:
                context.requests.clear()
            context.requests[call] = requests
    form: ResultForm | None = None
    if is_grouped or splits is not None or are_arrays[0]:
        form = ResultForm(are_arrays, is_grouped, splits)
    outputs: Sequence[Tensor | None] = tensors
    if in_place is None:
        outputs = [None] * len(tensors)
    elif not in_place:
        outputs = [
            torch.empty_like(tensor, requires_grad=False, memory_format=torch.contiguous_format) for tensor in tensors
        ]
    entries = list(map(TensorEntry, requests.values(), tensors, outputs))
    if splits is not None:
        entries[0].splits = splits.rows
    if entries:
        context.engine.submit(requests, entries)
    handle = next(_handles)
    _calls[handle] = context.engine, entries, form
    return handle


def _check_member(context: Context, process_set: ProcessSet, operation: str) -> int:
    """Return the number of a process set. Raises UsageError if this rank cannot use it."""
    number = number_of(process_set)
    if not process_set.included():
        raise UsageError(f"rank {context.group.rank} is not in {process_set}, so it cannot run {operation} there")
    return number


def _check_name(name: object) -> str:
    """Return the name of an operation. Raises UsageError if the other ranks cannot receive it."""
    try:
        if isinstance(name, str) and name.encode():
            return name
    except UnicodeEncodeError:
        pass
    raise UsageError(f"got name={name!r}, expected text without surrogates, or None")


def _make_requests(
    tensors: Sequence[Tensor],
    name: str,
    operation: str,
    reduction: str,
    root: int,
    scales: tuple[float, float],
    *,
    is_grouped: bool,
    process_set: int,
) -> dict[Key, TensorRequest]:
    requests: dict[Key, TensorRequest] = {}
    for place, tensor in enumerate(tensors):
        if tensor.dtype == torch.bool and reduction == AVERAGE:
            raise UsageError("booleans have no average. Pass op=Max (any rank), op=Min (all ranks), or tensor.float()")
        if tensor.device.type not in ("cpu", "cuda"):
            raise UsageError(
                f"got a tensor on the device {tensor.device}, expected the CPU or CUDA; move it with .cpu()"
            )
        request = TensorRequest(
            name=f"{name}.{place + 1}of{len(tensors)}" if is_grouped else name,
            operation=operation,
            dtype=_name_of_dtype(tensor),
            shape=tuple(tensor.shape),
            num_bytes=tensor.nbytes,
            reduction=reduction,
            root=root,
            prescale=float(scales[0]),
            postscale=float(scales[1]),
            device=tensor.device.type,
            group=f"{name}.{len(tensors)}" if is_grouped else "",
            process_set=process_set,
        )
        requests[request.key] = request
    return requests


def _fits(request: TensorRequest, tensor: Tensor) -> bool:
    """Return whether the tensor has the properties in a request."""
    return (
        tensor.shape == request.shape
        and _DTYPES.get(tensor.dtype) == request.dtype
        and (tensor.is_cpu if request.device == "cpu" else tensor.device.type == request.device)
        and tensor.layout is torch.strided
        and 0 not in tensor.stride()
    )


def as_tensor(value: Any, *, is_target: bool = False) -> Tensor:
    """Return a tensor with the memory of `value`. `is_target` means that the operation writes its result into it."""
    tensor: Tensor = value
    if isinstance(value, np.ndarray):
        if is_target and not value.flags.writeable:
            raise UsageError("the array is read-only, so no result can be written into it; pass a writable array")
        tensor = torch.from_numpy(value if value.flags.writeable else value.copy())
    elif not isinstance(value, Tensor):
        raise UsageError(f"got {type(value).__name__}, expected a PyTorch tensor or a NumPy array")
    strides = zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout is torch.strided else ()
    if is_target and tensor.numel() and any(length > 1 and stride == 0 for length, stride in strides):
        raise UsageError("items of the tensor share memory, as in an expanded tensor; pass a copy for the result")
    return tensor


def _name_of_dtype(tensor: Tensor) -> str:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided:
        raise UsageError(
            f"Tensor type {tensor.type()} is not supported. Pass a dense tensor of {', '.join(_DTYPES.values())}; for "
            "sparse tensors call sparse_allreduce_async()"
        )
    return dtype


def drop_handles() -> None:
    """Make all handles unknown. Otherwise, the handles of failed operations would keep their tensors in memory."""
    _calls.clear()


def poll(handle: int) -> bool:
    """Return whether an operation is done: :func:`synchronize` would not wait."""
    call = _calls.get(handle)
    return call is None or all(entry.is_done for entry in call[1])


def synchronize(handle: int) -> Any:
    """Wait for an operation, and return its result. Return None if the handle is unknown or was synchronized before.

    Raises HorovodInternalError if the operation failed.
    """
    call = _calls.pop(handle, None)
    if call is None:
        return None
    engine, entries, form = call
    for entry in entries:
        if not entry.is_done or entry.error:
            engine.wait(entry)
    return entries[0].output if form is None else form.make(entries)
