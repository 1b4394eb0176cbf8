"""Futures of calls, with a place of their own for the calls that are made when they are done.

What is chained to a future (a communication hook's ``then``) may make calls itself and wait for them, as PowerSGD's
does. It runs in the group's thread, which then is not free for them, or, if the future is done already, in the
caller's; which of the two differs from rank to rank, and so does its place among the calls of the main thread. So these
calls go to a group of their own: there the order is that of the futures they follow, the same on all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


class _Here(threading.local):
    depth = 0


_here = _Here()


def is_in_callback() -> bool:
    """Return whether this thread is carrying out what was chained to a future of ours."""
    return _here.depth > 0


class CallFuture(torch.futures.Future[Any]):
    """A future that knows what is chained to it."""

    def then(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> CallFuture:
        """Return a future of what `callback` returns; it is called with this one when it is done."""
        child = CallFuture()

        def run(done: torch.futures.Future[Any]) -> None:
            _here.depth += 1
            try:
                result = callback(done)
            except Exception as error:
                child.set_exception(error)
            else:
                child.set_result(result)
            finally:
                _here.depth -= 1

        self.add_done_callback(run)
        return child
