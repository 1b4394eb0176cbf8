"""Repeated attempts to reach a peer, and the pauses between them."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from typing import Final, TypeVar

from paceline.errors import AddressError, ConnectionLostError, DeadlineError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.25
_REPORT_S: Final = 2.0
_Reached = TypeVar("_Reached")


class Backoff:
    """A sequence of pauses. Each pause is twice the previous pause, up to a maximum.

    Every pause is shortened by a random fraction of at most `spread` (0 to 1), so that the clients of a lost peer do
    not all reconnect at the same moment.
    """

    def __init__(self, first_s: float, longest_s: float, *, spread: float = 0.0) -> None:
        self._first_s, self._longest_s, self._spread = first_s, longest_s, spread
        self._pause_s = first_s
        self._random = secrets.SystemRandom()  # the random module's state belongs to the user's seeded program

    def next_s(self, left_s: float = math.inf) -> float:
        pause_s = self._pause_s * self._random.uniform(1.0 - self._spread, 1.0)
        self._pause_s = min(2.0 * self._pause_s, self._longest_s)
        return max(min(pause_s, left_s), 0.0)

    def reset(self) -> None:
        self._pause_s = self._first_s


def reach(
    connect: Callable[[], _Reached],
    patience_s: float,
    check: Callable[[], None] = lambda: None,
    *,
    name: str = "the scheduler",
    on_wait: Callable[[], None] = lambda: None,
) -> _Reached:
    """Repeat `check` and `connect` until the peer answers. Call `on_wait` once, if this takes some seconds.

    `name` is the peer's name for errors. Raises DeadlineError after `patience_s`.
    """
    start_s, is_reported = time.monotonic(), False
    backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
    while True:
        check()
        try:
            return connect()
        except (AddressError, ConnectionLostError, DeadlineError) as error:
            waited_s = time.monotonic() - start_s
            if waited_s >= patience_s:
                raise DeadlineError(f"{name} did not answer within {patience_s:g} s: {error}") from None
        if waited_s >= _REPORT_S and not is_reported:
            is_reported = True
            on_wait()
        time.sleep(backoff.next_s(patience_s - waited_s))
