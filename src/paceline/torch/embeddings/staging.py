"""Copy rows between a process's memory, which has the tables, and a CUDA device, through pinned memory."""

from __future__ import annotations

import numpy as np
import torch

from paceline.tables.types import Floats

_SIDE_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def to_device(rows: Floats, device: torch.device) -> torch.Tensor:
    """Return rows as a tensor on `device`: the same memory on the CPU, otherwise a copy made on a side stream."""
    tensor = torch.from_numpy(rows)
    if device.type != "cuda":
        return tensor if device.type == "cpu" else tensor.to(device)
    side = _SIDE_STREAMS.get(device)
    if side is None:
        side = _SIDE_STREAMS[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    pinned = tensor.pin_memory()
    with torch.cuda.stream(side):
        copy = pinned.to(device, non_blocking=True)
    current = torch.cuda.current_stream(device)
    current.wait_stream(side)
    copy.record_stream(current)
    return copy


class HostCopy:
    """A copy of a tensor from CUDA to the process's memory, in flight; :meth:`wait` returns it as an array."""

    __slots__ = ("_copied", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(tensor.device))
        else:
            self._tensor = tensor.cpu()

    def wait(self) -> Floats:
        """Return the values, float32 and contiguous."""
        if self._copied is not None:
            self._copied.synchronize()
        array: Floats = np.ascontiguousarray(self._tensor.numpy(), np.float32)
        return array
