"""Futures of calls, whose callbacks use a separate group.

A callback, such as PowerSGD's communication hook, may make calls and wait for them. It runs in the group's thread,
which cannot run these calls, or in the caller's thread if the future is done. The thread and the order among the main
thread's calls differ between ranks. So callbacks use a second group, whose calls follow the order of the futures, which
is equal on all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import torch


class _CallbackDepth(threading.local):
    depth = 0


_callbacks = _CallbackDepth()


def is_in_callback() -> bool:
    return _callbacks.depth > 0


_AnyTensor: Any = torch.Tensor
"""Its overridable methods are untyped."""


class _Failed(_AnyTensor):  # type: ignore[misc]
    """The value of a failed call: each use raises the error. C++ code receives values only."""

    error: Exception

    @staticmethod
    def __new__(cls, error: Exception) -> _Failed:
        tensor: Any = torch.Tensor._make_wrapper_subclass(cls, (0,))
        tensor.error = error
        return cast("_Failed", tensor)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument in args:
            if isinstance(argument, _Failed):
                raise argument.error
        raise RuntimeError("a call whose result is used has failed")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"the result of a call that failed: {self.error}"


class CallFuture(torch.futures.Future[Any]):
    """A future that marks its callbacks."""

    def fail(self, error: Exception, *, is_one_tensor: bool) -> None:
        """Complete the future with an error, which ``wait()``, ``value()`` and uses of the value in C++ raise.

        ``is_one_tensor``: C++ expects one tensor, not a list.
        """

        def unwrap(_: Any) -> None:
            raise error

        self._set_unwrap_func(unwrap)
        self.set_result(_Failed(error) if is_one_tensor else [_Failed(error)])

    def then(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> CallFuture:
        child = CallFuture()

        def run(done: torch.futures.Future[Any]) -> None:
            _callbacks.depth += 1
            try:
                result = callback(done)
            except Exception as error:
                child.fail(error, is_one_tensor=True)  # as the result of a hook
            else:
                child.set_result(result)
            finally:
                _callbacks.depth -= 1

        self.add_done_callback(run)
        return child
