"""The requests of this rank that are not done, with their tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.protocol.negotiation.requests import Key, TensorRequest


class TensorEntry:
    """A request of this rank with its tensors and its result."""

    __slots__ = (
        "error", "is_done", "output", "received_splits", "request", "requested_ns", "splits", "stream", "tensor",
    )  # fmt: skip

    def __init__(self, request: TensorRequest, tensor: Tensor | None = None, output: Tensor | None = None) -> None:
        """`output` receives the result. Without it, the operation creates a tensor, whose size depends on all ranks."""
        self.request, self.tensor, self.output = request, tensor, output
        self.splits: Sequence[int] = ()
        self.received_splits: Sequence[int] = ()
        self.is_done = False
        self.error = ""
        self.requested_ns = 0
        """The time of the request, if a timeline is recorded."""
        self.stream: Any = None
        if tensor is not None and tensor.is_cuda:
            self.stream = torch.cuda.current_stream(tensor.device)

    def source(self) -> Tensor:
        """Return the tensor, in the host's memory."""
        assert self.tensor is not None
        if self.stream is None:
            return self.tensor
        with torch.cuda.stream(self.stream):  # runs after the kernels that compute the tensor
            return self.tensor.cpu()

    def finish(self, result: Tensor) -> None:
        """Store the result of the operation, which is in the host's memory."""
        if self.stream is not None:
            if self.output is None:
                self.output = result.to(self.stream.device)
                self.output.record_stream(self.stream)
            else:
                self._copy(result)
            torch.cuda.current_stream(self.stream.device).synchronize()
        elif self.output is None:
            self.output = result
        elif self.output.data_ptr() != result.data_ptr():
            self._copy(result)

    def _copy(self, result: Tensor) -> None:
        assert self.output is not None
        with torch.inference_mode():  # the output may be from the inference mode of the caller
            self.output.copy_(result)


class EntryTable:
    """The entries of requests that are not done. It is not thread-safe."""

    def __init__(self) -> None:
        self._entries: dict[Key, TensorEntry] = {}
        self._running: Sequence[TensorEntry | None] = ()
        """The entries of the running operation."""

    def add(self, keys: Iterable[Key], entries: Iterable[TensorEntry]) -> None:
        self._entries.update(zip(keys, entries))  # noqa: B905  (takes less time)

    def take(self, keys: Sequence[Key]) -> Sequence[TensorEntry | None]:
        """Remove and return the entries of an operation; None for the requests of other ranks only."""
        entries = self._running = [*map(self._entries.get, keys)]
        if len(entries) == len(self._entries) and None not in entries:
            self._entries.clear()  # takes less time
        else:
            for key in keys:
                self._entries.pop(key, None)
        return entries

    def operation_ended(self) -> None:
        self._running = ()

    def take_all(self) -> list[TensorEntry | None]:
        """Remove and return all entries, with those of the running operation."""
        entries = [*self._entries.values(), *self._running]
        self._entries.clear()
        return entries
