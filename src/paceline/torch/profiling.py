"""Events for PyTorch's profiler, named as Gloo's are: ``paceline:all_reduce``, ``paceline:send``, ..."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

is_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled


class TracedOperation:
    """One operation, from here to :meth:`end`, which may come in another thread."""

    def __init__(self, name: str, tensors: Sequence[Tensor]) -> None:
        self._began_in = threading.get_ident()
        self._handle: Any = torch._C._autograd._record_function_with_args_enter(f"paceline:{name}", *tensors)

    def end(self) -> None:
        """Say that the operation is done. The profiler takes it for asynchronous if the thread is another one."""
        if threading.get_ident() != self._began_in:
            self._exit()
        else:
            thread = threading.Thread(target=self._exit, name="paceline-profiler")
            thread.start()
            thread.join()

    def _exit(self) -> None:
        torch._C._autograd._record_function_with_args_exit(self._handle)
