"""Futures of calls, with a place of their own for the calls that are made when they are done.

What is chained to a future (a communication hook's ``then``) may make calls itself and wait for them, as PowerSGD's
does. It runs in the group's thread, which then is not free for them, or, if the future is done already, in the
caller's; which of the two differs from rank to rank, and so does its place among the calls of the main thread. So these
calls go to a group of their own: there the order is that of the futures they follow, the same on all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import torch


class _Here(threading.local):
    depth = 0


_here = _Here()


def is_in_callback() -> bool:
    """Return whether this thread is carrying out what was chained to a future of ours."""
    return _here.depth > 0


_AnyTensor: Any = torch.Tensor
"""Its overridable methods are untyped."""


class _Failed(_AnyTensor):  # type: ignore[misc]
    """Stands where a result would: whoever uses it raises the error. So C++ hears of it, which sees values only."""

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
    """A future that knows what is chained to it."""

    def fail(self, error: Exception, *, is_one_tensor: bool) -> None:
        """Complete it with an error, which is raised by ``wait()`` and ``value()``, and by who uses it in C++.

        ``is_one_tensor``: that, and not a list of tensors, is what C++ expects of it.
        """

        def unwrap(_: Any) -> None:
            raise error

        self._set_unwrap_func(unwrap)
        self.set_result(_Failed(error) if is_one_tensor else [_Failed(error)])

    def then(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> CallFuture:
        """Return a future of what `callback` returns; it is called with this one when it is done."""
        child = CallFuture()

        def run(done: torch.futures.Future[Any]) -> None:
            _here.depth += 1
            try:
                result = callback(done)
            except Exception as error:
                child.fail(error, is_one_tensor=True)  # as hooks return it
            else:
                child.set_result(result)
            finally:
                _here.depth -= 1

        self.add_done_callback(run)
        return child
