"""Copy gradients and values between parameters and the memory of messages.

A bucket that lies in one float32 parameter on the CPU needs no copy. Any other bucket has a buffer of its size. If the
parameters are on CUDA, the buffer is in pinned memory, and a side stream copies it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.torch.strategies.ranks import Ranks
from paceline.torch.strategies.server.dense_tables import Bucket, Slot
from paceline.torch.strategies.server.watched import memory_of

Floats = npt.NDArray[np.float32]


class Staging:
    """Copies gradients and values of a strategy's parameters, which are all on `device`.

    With `summed`, the gradients are divided by the number of these ranks, because the servers sum them.
    """

    def __init__(self, device: torch.device, summed: Ranks | None) -> None:
        self._device = device
        self._summed = summed
        self.share = 1.0
        """The factor of gradients that were not averaged over the ranks. With 0, they are not sent."""
        self._uncopied: set[Bucket] = set()
        """The buckets whose gradients are sent from the parameter's memory."""
        self._is_cuda = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._buffers: dict[Bucket, torch.Tensor] = {}
        self._copied: dict[Bucket, Any] = {}  # the CUDA event after a bucket's last copy on the side stream

    def collect(self, bucket: Bucket) -> None:
        """Start to copy a bucket's gradients. Backward's thread calls this when it has computed all of them."""
        slot = bucket.slots[0]
        if self._is_direct(bucket) and _is_plain(slot.grad) and self._factor(slot) == 1.0:
            self._uncopied.add(bucket)
            return
        self._uncopied.discard(bucket)
        self.prepare_copies()
        self._on_stream(self._copy_out, bucket)

    def _factor(self, slot: Slot) -> float:
        factor = 1.0 if slot.is_averaged else self.share
        return factor if self._summed is None else factor / self._summed.size

    def _on_stream(self, copy: Callable[[Bucket], None], bucket: Bucket) -> None:
        if self._stream is None:
            copy(bucket)
            return
        with torch.cuda.stream(self._stream):
            copy(bucket)
            self._copied[bucket] = self._stream.record_event()

    def _copy_out(self, bucket: Bucket) -> None:
        buffer = self._buffer(bucket)
        with torch.no_grad():
            for slot, source, target in _pieces(bucket):
                grad = slot.grad
                if grad is None:
                    continue
                flat = (grad.to_dense() if grad.layout is not torch.strided else grad).reshape(-1)[source]
                buffer[target].copy_(flat, non_blocking=self._is_cuda)
                if self._is_cuda:
                    grad.record_stream(self._stream)
                factor = self._factor(slot)
                if factor != 1.0:
                    if self._stream is not None:
                        self._stream.synchronize()
                    buffer[target].mul_(factor)

    def gradients(self, bucket: Bucket) -> list[tuple[int, Floats]]:
        """Return a bucket's gradients in contiguous pieces: (number of the first element in the table, gradients)."""
        if bucket in self._uncopied:
            slot = bucket.slots[0]
            assert slot.grad is not None
            array: Floats = slot.grad.detach().view(-1).numpy()
            return [(bucket.start, array[bucket.start - slot.start : bucket.stop - slot.start])]
        if bucket in self._copied:
            self._copied[bucket].synchronize()
        buffer: Floats = self._buffer(bucket).numpy()
        runs: list[tuple[int, int]] = []
        for slot, _, target in _pieces(bucket):
            if slot.grad is None or not self._factor(slot):
                continue
            if runs and runs[-1][1] == target.start:
                runs[-1] = (runs[-1][0], target.stop)
            else:
                runs.append((target.start, target.stop))
        return [(bucket.start + a, buffer[a:b]) for a, b in runs]

    def prepare_copies(self) -> None:
        """Make later copies on the side stream wait for the work that is queued on the device."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def target(self, bucket: Bucket) -> Floats:
        slot = bucket.slots[0]
        if self._is_direct(bucket):
            array: Floats = memory_of(slot.parameter).view(-1).numpy()
            return array[bucket.start - slot.start : bucket.stop - slot.start]
        if bucket in self._copied:
            self._copied[bucket].synchronize()
        staged: Floats = self._buffer(bucket).numpy()
        return staged

    def arrived(self, bucket: Bucket) -> None:
        if not self._is_direct(bucket):
            self._on_stream(self._copy_in, bucket)

    def _copy_in(self, bucket: Bucket) -> None:
        buffer = self._buffer(bucket)
        with torch.no_grad():
            for slot, source, target in _pieces(bucket):
                values = memory_of(slot.parameter)
                if values.is_contiguous():
                    values.view(-1)[source].copy_(buffer[target], non_blocking=self._is_cuda)
                else:
                    values.copy_(buffer[target].view(values.shape))

    def wait(self, bucket: Bucket) -> None:
        """Make later work on this thread's stream wait until a bucket's values are on the device."""
        if bucket in self._copied:
            torch.cuda.current_stream(self._device).wait_event(self._copied[bucket])

    def _is_direct(self, bucket: Bucket) -> bool:
        parameter = bucket.slots[0].parameter
        return (
            len(bucket.slots) == 1
            and not self._is_cuda
            and parameter.dtype is torch.float32
            and parameter.is_contiguous()
        )

    def _buffer(self, bucket: Bucket) -> torch.Tensor:
        buffer = self._buffers.get(bucket)
        if buffer is None:
            size = bucket.stop - bucket.start
            buffer = self._buffers[bucket] = torch.empty(size, dtype=torch.float32, pin_memory=self._is_cuda)
        return buffer


def _is_plain(grad: torch.Tensor | None) -> bool:
    return grad is not None and grad.layout is torch.strided and grad.dtype is torch.float32 and grad.is_contiguous()


def _pieces(bucket: Bucket) -> list[tuple[Slot, slice, slice]]:
    """Return for each parameter of a bucket: slot, range of elements in the parameter, and range in the bucket."""
    pieces = []
    for slot in bucket.slots:
        start, stop = max(bucket.start, slot.start), min(bucket.stop, slot.start + slot.size)
        own, place = (slice(start - first, stop - first) for first in (slot.start, bucket.start))
        pieces.append((slot, own, place))
    return pieces
