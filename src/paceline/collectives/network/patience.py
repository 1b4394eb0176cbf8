"""Control the waits of one call: when to poll the other ranks, and when to raise a timeout error."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from paceline.collectives.calls import CollectiveCall
from paceline.collectives.network.culprits import Ask, Search, find_culprits, given_up
from paceline.collectives.network.frames import Abort
from paceline.collectives.network.links import LinkSet
from paceline.collectives.network.rounds import Round

GIVE_UP_S: Final = 1.0
"""Longest time that a failed rank stays to notify the other ranks."""
_MIN_ASKING_S: Final = 0.3
_MAX_ASKING_S: Final = 1.5
_NUDGE_S: Final = 0.25
"""Interval at which a sleeping call checks for failed messages of its group."""
_FIRST_LOOK_S: Final = 2.0
_ANSWER_S: Final = 1.2
"""Slightly longer than the timeout of a status request."""


class TooLate(Exception):  # noqa: N818  (a signal to the executor, which raises the error)
    """The time for these awaited ranks is over."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__(ranks)
        self.ranks = ranks


class Disagreement(Exception):  # noqa: N818
    """Other ranks are in another call of the same number; ``calls`` are these calls, by rank."""

    def __init__(self, calls: dict[int, CollectiveCall]) -> None:
        super().__init__(calls)
        self.calls = calls


class GivenUp(Exception):  # noqa: N818
    """The group has ended, as reported by another rank or by another part of this one."""

    def __init__(self, abort: Abort) -> None:
        super().__init__(abort)
        self.abort = abort


class Patience:
    """The waits of one call.

    Ranks with different calls may wait for messages that will never be sent. Therefore a long wait polls all ranks for
    their current call: after two seconds, then at intervals that grow by a factor of 4, and before the timeout.
    """

    def __init__(
        self,
        timeout_s: float,
        ask: Ask | None,
        links: LinkSet,
        tell: Callable[[tuple[int, ...]], None],
        call: CollectiveCall,
        sequence: int,
        interrupted: Callable[[], Abort | None] = lambda: None,
    ) -> None:
        """``tell`` receives the awaited ranks before each wait; ``interrupted`` returns a reason to stop."""
        self.timeout_s = timeout_s
        self._call = call
        self._sequence = sequence
        self._look_after_s = _FIRST_LOOK_S
        self._looks_at = time.monotonic() + _FIRST_LOOK_S
        self._first_search: Search | None = None
        self.deadline = time.monotonic() + timeout_s
        self._gives_up_at = self.deadline - min(GIVE_UP_S, 0.1 * timeout_s)
        self._asks_at = self._gives_up_at - min(max(_MIN_ASKING_S, 0.2 * timeout_s), _MAX_ASKING_S)
        self._ask = ask
        self._links = links
        self._tell = tell
        self._interrupted = interrupted
        self._search: Search | None = None

    def wake(self, open_: Round) -> float:
        """See :meth:`RoundLoop.finish`."""
        peers = [*open_.sending, *(peer for peer in open_.receiving if peer.wants_bytes)]
        return min(self.wait_for(tuple(sorted({peer.rank for peer in peers}))), time.monotonic() + _NUDGE_S)

    def wait_for(self, ranks: tuple[int, ...]) -> float:
        """Return the time (of ``time.monotonic``) until which these ranks may be awaited; then raise TooLate.

        Raises GivenUp and Disagreement as soon as they are detected.
        """
        self._tell(ranks)
        abort = self._interrupted()
        if abort is not None:
            raise GivenUp(abort)
        now = time.monotonic()
        if now >= self._gives_up_at:
            self._compare(self._search)
            raise TooLate(ranks)
        if self._ask is None or self._search is not None:
            return self._gives_up_at
        if now < self._asks_at:
            return min(self._look(now), self._asks_at)
        self._search = self._ask_all()
        return self._gives_up_at

    def _look(self, now: float) -> float:
        """Poll the other ranks when it is time, and compare their answers later; return the time of the next call."""
        if now >= self._looks_at:
            if self._first_search is None:
                self._first_search = self._ask_all()
                self._looks_at = now + _ANSWER_S
            else:
                self._compare(self._first_search)
                self._first_search = None
                self._look_after_s *= 4
                self._looks_at = now + self._look_after_s
        return self._looks_at

    def _ask_all(self) -> Search:
        assert self._ask is not None
        return Search(self._ask, [rank for rank in range(self._links.size) if rank != self._links.rank])

    def _compare(self, search: Search | None) -> None:
        """Raise GivenUp if a rank has given up, Disagreement if one is in another call of this number."""
        answers = {} if search is None else search.answers()
        abort = given_up(answers)
        if abort is not None:
            raise GivenUp(abort)
        calls = {
            rank: status.call for rank, status in answers.items() if status is not None and status.call is not None
        }
        there = {rank: call for rank, call in calls.items() if answers[rank].sequence == self._sequence}  # type: ignore[union-attr]
        if any(call != self._call for call in there.values()):
            raise Disagreement(there)

    def culprits(self, sequence: int, waiting_for: Sequence[int]) -> dict[int, str]:
        """Return the ranks to blame, with reasons."""
        if self._search is None:
            return dict.fromkeys(waiting_for, "did not send its data (ranks could not be polled)")
        return find_culprits(self._search.answers(), sequence, waiting_for)
