"""The requests of this rank that are not done, with their tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, Final

import torch
from torch import Tensor

from paceline.protocol.negotiation.requests import Key, TensorRequest

_MOST_ORDERS: Final = 16


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
        self._orders: dict[int, tuple[Sequence[Key], list[Key], Callable[..., Any]]] = {}
        """For operations that took all entries: the keys of the operation, the keys of the table, and a function that
        puts the entries into the order of the operation. The key of this dictionary is the identity of the first.
        """

    def add(self, keys: Iterable[Key], entries: Iterable[TensorEntry]) -> None:
        self._entries.update(zip(keys, entries))  # noqa: B905  (takes less time)

    def take(self, keys: Sequence[Key]) -> Sequence[TensorEntry | None]:
        """Remove and return the entries of an operation; None for the requests of other ranks only.

        A training repeats its operations, so the order of the last equal operation is used again.
        """
        present = list(self._entries) if len(keys) == len(self._entries) > 1 else []
        known, order_of, sort = self._orders.get(id(keys), ((), [], tuple))
        if present and known is keys and order_of == present:
            self._running = sort(list(self._entries.values()))
            self._entries.clear()
            return self._running
        self._running = [self._entries.pop(key, None) for key in keys]
        if present and not self._entries:
            if len(self._orders) >= _MOST_ORDERS:
                self._orders.clear()
            places = {key: place for place, key in enumerate(present)}
            self._orders[id(keys)] = keys, present, itemgetter(*map(places.__getitem__, keys))
        return self._running

    def operation_ended(self) -> None:
        self._running = ()

    def take_all(self) -> list[TensorEntry | None]:
        """Remove and return all entries, with those of the running operation."""
        entries = [*self._entries.values(), *self._running]
        self._entries.clear()
        return entries
