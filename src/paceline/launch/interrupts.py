"""Signals that must not cut an exchange with a server in two: noted when they come, obeyed at the next good moment."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class DeferredSignals:
    """While its block runs, SIGINT, SIGTERM and SIGHUP are noted; they take effect at :meth:`check` and at its end.

    A second signal before that takes effect at once. What has no handler in Python is left alone, and so are all
    signals outside the main thread.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._noted: int | None = None

    def __enter__(self) -> DeferredSignals:
        """Take the signals over."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give them back."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if error is None:
            self.check()
        self._handlers = {}

    def check(self) -> None:
        """Do what the signal that came meanwhile asks for: as a rule, raise KeyboardInterrupt."""
        if self._noted is not None:
            number, self._noted = self._noted, None
            self._handlers[number](number, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted is not None:
            self._noted = None
            self._handlers[number](number, frame)
        else:
            self._noted = number
