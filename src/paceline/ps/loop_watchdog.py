"""Detection of a blocked event loop, so that the thread for heartbeats sends no heartbeats for a blocked process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable


class LoopWatchdog:
    """Checks at every heartbeat, in the heartbeat thread, that a loop runs.

    `on_hung` is called when the loop has not run for `patience_s`, and when it runs again.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_hung: Callable[[str], None]) -> None:
        self._loop = loop
        self._on_hung = on_hung
        self.patience_s = 10.0
        self._request_s: float | None = None  # the time at which the pending check was scheduled
        self._was_hung = False

    def is_running(self) -> bool:
        """Return whether the loop has run recently, and schedule its next check."""
        time_s, request_s = time.monotonic(), self._request_s
        if request_s is None:
            if self._was_hung:
                self._was_hung = False
                self._on_hung("the event loop continues")
            self._request_s = time_s
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._answer)
            return True
        is_hung = time_s - request_s > self.patience_s
        if is_hung and not self._was_hung:
            self._was_hung = True
            self._on_hung(
                f"the event loop was blocked for {time_s - request_s:.1f} s: requests and heartbeats are delayed"
            )
        return not is_hung

    def _answer(self) -> None:
        self._request_s = None
