"""Events for PyTorch's profiler, with names like Gloo's: ``paceline:all_reduce``, ``paceline:send``, ..."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

is_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled


class TracedOperation:
    """One operation, from its creation to :meth:`end`, which may be called in another thread."""

    def __init__(self, name: str, tensors: Sequence[Tensor]) -> None:
        self._began_in = threading.get_ident()
        self._handle: Any = torch._C._autograd._record_function_with_args_enter(f"paceline:{name}", *tensors)

    def end(self) -> None:
        """End the operation. The profiler treats it as asynchronous if this is another thread."""
        if threading.get_ident() != self._began_in:
            self._exit()
        else:
            thread = threading.Thread(target=self._exit, name="paceline-profiler")
            thread.start()
            thread.join()

    def _exit(self) -> None:
        torch._C._autograd._record_function_with_args_exit(self._handle)
