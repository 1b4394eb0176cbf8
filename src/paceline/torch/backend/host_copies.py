"""Collectives of device tensors through copies in host memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from paceline.torch.backend.future import CallFuture
from paceline.torch.backend.work import CallWork


def through_host(call: Callable[..., Work], arguments: Sequence[Any]) -> Work:
    """Call with host copies of the tensors, then copy the first argument's copies back."""
    copies: list[tuple[Tensor, Tensor]] = []

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            copies.append((value, value.detach().to("cpu", copy=True)))
            return copies[-1][1]
        return [copied(part) for part in value] if isinstance(value, (list, tuple)) else value

    results = copied(arguments[0])
    filled = copies.copy()
    return HostWork(call(results, *(copied(argument) for argument in arguments[1:])), filled)


class HostWork(CallWork):
    """A call on host copies; `filled` has the device tensors that the call fills, with their copies."""

    def __init__(self, call: Work, filled: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__([tensor for tensor, _ in filled])
        self._call, self._filled = call, filled
        self._lock = threading.Lock()
        self._is_copied = False
        if call.is_success():
            self._copy()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._call.wait(timeout)
        self._copy()
        return True

    def is_completed(self) -> bool:
        return self._call.is_completed()

    def exception(self) -> Any:
        return self._call.exception()

    def source_rank(self) -> int:
        return self._call.source_rank()

    _source_rank = source_rank

    def get_future(self) -> CallFuture:
        future = CallFuture(devices=list({tensor.device for tensor, _ in self._filled if tensor.is_cuda}))

        def complete(_: Any) -> None:
            try:
                future.set_result(self.result())
            except Exception as error:  # the group's thread does not handle exceptions
                future.fail(error, is_one_tensor=False)

        self._call.get_future().add_done_callback(complete)
        return future

    def _copy(self) -> None:
        with self._lock:
            if not self._is_copied:
                for tensor, copy in self._filled:
                    tensor.data.copy_(copy)
                for device in {tensor.device for tensor, _ in self._filled if tensor.is_cuda}:
                    torch.cuda.current_stream(device).synchronize()
                self._is_copied = True
