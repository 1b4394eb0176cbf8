"""Defer signals that must not interrupt an exchange with a server."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class DeferredSignals:
    """Records SIGINT, SIGTERM and SIGHUP during its block. They take effect at :meth:`check` and at its end.

    A second signal takes effect immediately. Signals without a Python handler, and signals outside the main thread,
    are not deferred.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._recorded: int | None = None

    def __enter__(self) -> DeferredSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._record)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if error is None:
            self.check()
        self._handlers = {}

    def check(self) -> None:
        """Call the handler of a recorded signal, which usually raises KeyboardInterrupt."""
        if self._recorded is not None:
            number, self._recorded = self._recorded, None
            self._handlers[number](number, None)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self._recorded is not None:
            self._recorded = None
            self._handlers[number](number, frame)
        else:
            self._recorded = number
