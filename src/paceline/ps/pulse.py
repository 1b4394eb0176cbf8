"""Whether a process's event loop goes round: its signs of life come from a thread, which goes on when it does not."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable


class Pulse:
    """Asks a loop for an answer at every heartbeat; for the thread that sends them.

    A loop that has not answered for `patience_s` is told of once, by `on_hung`, and of again when it goes on.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_hung: Callable[[str], None]) -> None:
        self._loop = loop
        self._on_hung = on_hung
        self.patience_s = 10.0
        self._asked_s: float | None = None  # when, if there is no answer yet
        self._was_hung = False

    def beats(self) -> bool:
        """Return whether the loop has gone round lately, and ask it."""
        now, asked_s = time.monotonic(), self._asked_s
        if asked_s is None:
            if self._was_hung:
                self._was_hung = False
                self._on_hung("its event loop goes on")
            self._asked_s = now
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._answer)
            return True
        is_hung = now - asked_s > self.patience_s
        if is_hung and not self._was_hung:
            self._was_hung = True
            self._on_hung(
                f"its event loop has not gone round for {now - asked_s:.1f} s: it answers nobody, and gives no signs "
                "of life until it does"
            )
        return not is_hung

    def _answer(self) -> None:
        self._asked_s = None
