"""Decide when a rank runs a round of the negotiation, and when it wakes the other ranks for it. Pure.

A thread that waits for an operation runs the rounds itself, because this takes less time than waking another thread. If
no thread waits, the background thread runs a round a short time after the request, because more requests may follow.
The background thread also takes part in the rounds that other ranks start. It sleeps if there are no requests.

In the steady state, all ranks start each round at about the same time. So a waiting thread starts a round without
waking the other ranks. If the round does not begin soon, the background thread wakes them, and the next rounds wake
them at once.
"""

from __future__ import annotations

from typing import Final, NamedTuple

NO_ROUND: Final = -1
GRACE_S: Final = 0.002
"""The background thread runs a round this time after the first request."""
_TICK_S: Final = 0.004
"""After a request, the background thread stays awake for this time, because waking it for each request takes longer."""
_LATE_S: Final = 0.01
"""If a round does not begin within this time, the background thread wakes the other ranks."""
_NUM_EARLY: Final = 10
"""The number of rounds that wake the other ranks at once, after a round in which ranks were late."""
_CHECK_S: Final = 1.0
"""A rank with pending requests starts a round after this time. In the round it detects ranks that have died."""
_IDLE_S: Final = 86_400.0


class ThreadAction(NamedTuple):
    """The next action of the background thread."""

    wakes_ranks: bool
    """Whether it wakes the other ranks for the round that a waiting thread has started."""
    runs_round: bool
    """Whether it runs a round. Otherwise it waits until another rank starts a round, or for `timeout_s`."""
    timeout_s: float


class RoundSchedule:
    """The times of one rank's requests and rounds."""

    def __init__(self) -> None:
        self.number = 0
        """The number of the next round."""
        self.is_asleep = False
        """Whether the background thread must be woken to see new requests."""
        self._started = NO_ROUND
        """The last round that another rank has started."""
        self._requested_s = 0.0
        """The time of the first request after the last vote."""
        self._silent_since_s: float | None = None
        """The time of the vote of a round for which no rank was woken. None if there is no such round."""
        self._num_early = 0
        """The number of next rounds that wake the other ranks at once."""
        self._is_active = False
        """Whether there were requests since the last action of the background thread."""

    @property
    def is_started(self) -> bool:
        """Whether another rank has started the next round."""
        return self._started >= self.number

    def request(self, time_s: float | None) -> None:
        """Record a request. `time_s` is the time of the first request after the last vote, else None."""
        self._is_active = True
        if time_s is not None:
            self._requested_s = time_s

    def begin_round(self, time_s: float, *, is_background: bool, has_idle_ranks: bool) -> bool:
        """Return whether this rank must wake the other ranks before it votes."""
        wakes_ranks = is_background or has_idle_ranks or self.is_asleep or self._num_early > 0
        # After a round in the background, other ranks may sleep until this rank requests the same operations.
        self._num_early = max(self._num_early - 1, 1 if is_background else 0)
        self._silent_since_s = None if wakes_ranks else time_s
        return wakes_ranks

    def end_vote(self) -> None:
        """Record that the votes of all ranks are combined."""
        self.number += 1
        self._silent_since_s = None

    def next_action(self, time_s: float, *, needs_round: bool, has_pending: bool) -> ThreadAction:
        """Return the next action of the background thread. `has_pending` means that it must check the other ranks."""
        left_s = self._requested_s + GRACE_S - time_s
        runs_round = self.is_started or (needs_round and left_s <= 0)
        is_awake = needs_round or self._is_active or self._silent_since_s is not None
        is_late = self._silent_since_s is not None and time_s - self._silent_since_s >= _LATE_S
        wakes_ranks = is_late or (self._silent_since_s is not None and self.is_started)
        if is_late:
            self._num_early = _NUM_EARLY
        if wakes_ranks:
            self._silent_since_s = None
        timeout_s = left_s if needs_round else _TICK_S if self._is_active else _LATE_S
        self._is_active, self.is_asleep = False, not (runs_round or is_awake)
        if self.is_asleep:
            timeout_s = _CHECK_S if has_pending else _IDLE_S
        return ThreadAction(wakes_ranks, runs_round, timeout_s)

    def woken(self, started: int) -> bool:
        """Record the end of a wait, and return whether a check of the other ranks is due.

        `started` is the number of the round that another rank has started, or NO_ROUND.
        """
        is_due = self.is_asleep and started == NO_ROUND
        self.is_asleep = False
        self._started = max(self._started, self.number if is_due else started)
        return is_due
