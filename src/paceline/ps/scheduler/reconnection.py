"""Schedule of a process's attempts to reconnect to a scheduler. The caller passes the time."""

from __future__ import annotations

from typing import Final

from paceline.transport.backoff import Backoff

_SHORTEST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 0.25
_LASTING_S: Final = 1.0
"""A connection that lasts this long was not rejected."""
_ELSEWHERE_PAUSE_S: Final = 2.0
"""Used while another cluster is at the scheduler's address."""


class Reconnection:
    """The attempts of one process, for `patience_s` after the first of several short-lived connections broke."""

    def __init__(self, patience_s: float, time_s: float) -> None:
        self.patience_s = patience_s
        self._connected_s = time_s
        self._refused_since_s: float | None = None
        self._backoff = Backoff(_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S, spread=0.5)

    def lost(self, time_s: float, heartbeat_s: float) -> float:
        """Note that the connection broke; return the pause before the first attempt."""
        # Many members lose their scheduler at the same moment.
        longest_s = min(_LONGEST_PAUSE_S, max(heartbeat_s, _SHORTEST_PAUSE_S))
        self._backoff = Backoff(_SHORTEST_PAUSE_S, longest_s, spread=0.5)
        if self._refused_since_s is None or time_s > self._connected_s + _LASTING_S:
            self._refused_since_s = time_s
            return 0.0
        return _SHORTEST_PAUSE_S

    def remaining_s(self, time_s: float) -> float:
        """Return the remaining time for attempts."""
        assert self._refused_since_s is not None
        return self._refused_since_s + self.patience_s - time_s

    def connected(self, time_s: float) -> None:
        """Note that a process listens at the scheduler's address."""
        self._connected_s = time_s

    def resumed(self) -> None:
        """Note that the scheduler has welcomed this member again."""
        self._refused_since_s = None

    def pause_s(self, time_s: float, *, is_elsewhere: bool) -> float:
        """Return the pause before the next attempt."""
        if is_elsewhere:
            self._backoff = Backoff(_ELSEWHERE_PAUSE_S, _ELSEWHERE_PAUSE_S, spread=0.5)
        return self._backoff.next_s(self.remaining_s(time_s))
