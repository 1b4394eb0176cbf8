"""Control the waits of one call: poll the other ranks during long waits, and detect the timeout."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from paceline.collectives.aborts import Abort
from paceline.collectives.network import verdicts
from paceline.collectives.network.culprits import RequestStatus, Search, find_culprits, first_abort
from paceline.collectives.network.mesh import Mesh
from paceline.collectives.network.rounds import Round
from paceline.collectives.network.verdicts import CurrentCall
from paceline.observe.stuck.report import print_stall_soon

LINGER_S: Final = 1.0
"""The maximum time that a failed rank keeps its links open to send the ABORT to the other ranks."""
_MIN_POLL_S: Final = 0.3
_MAX_POLL_S: Final = 1.5
_MAX_SLEEP_S: Final = 0.25
"""The maximum sleep of a waiting call. After each sleep, the call checks whether another thread interrupted it."""
_FIRST_CHECK_S: Final = 2.0
_ANSWER_S: Final = 1.2


class CallEnded(Exception):  # noqa: N818  (a signal to the executor, which raises the error)
    """Raised if the current call cannot finish. ``abort`` contains the reason."""

    def __init__(self, abort: Abort) -> None:
        super().__init__(abort.message)
        self.abort = abort


class Patience:
    """Limits the waits of one call.

    If ranks make different calls by mistake, they may wait for messages that no rank will send. So a rank that waits
    for a long time requests the current calls of all ranks: after two seconds, then at intervals that grow by a factor
    of 4, and shortly before the timeout.
    """

    def __init__(
        self,
        timeout_s: float,
        request_status: RequestStatus | None,
        links: Mesh,
        set_waiting_for: Callable[[tuple[int, ...]], None],
        current: CurrentCall,
        interruption: Callable[[], Abort | None] = lambda: None,
    ) -> None:
        """``set_waiting_for`` stores the ranks that this rank waits for, so that status requests return them.
        ``interruption`` returns the reason to end the call, or None if the call may continue.
        """
        self._timeout_s = timeout_s
        self.current = current
        self._check_interval_s = _FIRST_CHECK_S
        self._next_check_at = time.monotonic() + _FIRST_CHECK_S
        self._first_search: Search | None = None
        self.deadline = time.monotonic() + timeout_s
        self._fails_at = self.deadline - min(LINGER_S, 0.1 * timeout_s)
        self._final_poll_at = self._fails_at - min(max(_MIN_POLL_S, 0.2 * timeout_s), _MAX_POLL_S)
        self._request_status = request_status
        self._links = links
        self._set_waiting_for = set_waiting_for
        self._interruption = interruption
        self._search: Search | None = None

    def wake(self, round_: Round) -> float:
        peers = [*round_.sending, *(peer for peer in round_.receiving if peer.wants_bytes)]
        return min(self.wait_for(tuple(sorted({peer.rank for peer in peers}))), time.monotonic() + _MAX_SLEEP_S)

    def wait_for(self, ranks: tuple[int, ...]) -> float:
        """Check whether the call may continue to wait for ``ranks``. Return the time (``time.monotonic``) of the next
        check. Raises CallEnded after a failure or the timeout.
        """
        self._set_waiting_for(ranks)
        abort = self._interruption()
        if abort is not None:
            raise CallEnded(verdicts.received(self.current, abort))
        time_s = time.monotonic()
        if time_s >= self._fails_at:
            self._compare(self._search)
            raise CallEnded(verdicts.late(self.current, self._culprits(ranks), self._timeout_s))
        if self._request_status is None or self._search is not None:
            return self._fails_at
        if time_s < self._final_poll_at:
            return min(self._check_ranks(time_s), self._final_poll_at)
        self._search = self._poll_ranks()
        print_stall_soon(verdicts.waiting(self.current, ranks, self._timeout_s - (self.deadline - time_s)))
        return self._fails_at

    def _check_ranks(self, time_s: float) -> float:
        if time_s >= self._next_check_at:
            if self._first_search is None:
                self._first_search = self._poll_ranks()
                self._next_check_at = time_s + _ANSWER_S
            else:
                self._compare(self._first_search)
                self._first_search = None
                self._check_interval_s *= 4
                self._next_check_at = time_s + self._check_interval_s
        return self._next_check_at

    def _poll_ranks(self) -> Search:
        assert self._request_status is not None
        return Search(self._request_status, [rank for rank in range(self._links.size) if rank != self._links.rank])

    def _compare(self, search: Search | None) -> None:
        answers = {} if search is None else search.answers()
        abort = first_abort(answers)
        if abort is not None:
            raise CallEnded(verdicts.received(self.current, abort))
        calls = {
            rank: status.call
            for rank, status in answers.items()
            if status is not None and status.call is not None and status.sequence == self.current.sequence
        }
        if any(call != self.current.call for call in calls.values()):
            raise CallEnded(verdicts.disagreement(self.current, calls))

    def _culprits(self, waiting_for: Sequence[int]) -> dict[int, str]:
        if self._search is None:
            return dict.fromkeys(waiting_for, "did not send its data (ranks could not be polled)")
        return find_culprits(self._search.answers(), self.current.sequence, waiting_for)
