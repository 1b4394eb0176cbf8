"""Find the ranks that delay a collective call or a message, for the text of the timeout error.

The rank that this rank waits for is often not the cause, because it may itself wait for another rank. If a call is
late, the cause is the ranks that do not answer a status request, and the ranks that have not made the call and wait for
nothing. If no such rank exists, the cause is the ranks that are still in an earlier call. If a message is late, each
rank may wait for another rank, and the cause is the last rank of this chain.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from paceline.collectives.aborts import Abort
from paceline.collectives.calls import CollectiveCall
from paceline.errors import name_ranks

_MAX_THREADS: Final = 64
_SILENT: Final = "does not answer (its process is stopped or has died, or its host cannot be reached)"


class Status(msgspec.Struct, frozen=True, array_like=True):
    """A rank's answer to a status request: the call that it makes, and the ranks that it waits for."""

    sequence: int
    """The number of the rank's current or last call; -1 before the first call."""
    call: CollectiveCall | None
    waiting_for: tuple[int, ...]
    """The ranks that this rank waits for in its call, or in point-to-point messages between calls."""
    abort: Abort | None = None


RequestStatus: TypeAlias = Callable[[int], Status | None]
"""A function that requests and returns a rank's status. It returns None if the rank does not answer within a second."""


class Search:
    """Sends status requests to several ranks, in threads, while the main thread continues the collective call."""

    def __init__(self, request_status: RequestStatus, ranks: Sequence[int]) -> None:
        self._request_status = request_status
        self._lock = threading.Lock()
        self._pending = list(reversed(ranks))
        self._answers: dict[int, Status | None] = dict.fromkeys(ranks)
        for _ in range(min(len(ranks), _MAX_THREADS)):
            threading.Thread(target=self._work, name="paceline-ask", daemon=True).start()

    def answers(self) -> dict[int, Status | None]:
        with self._lock:
            return dict(self._answers)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._pending:
                    return
                rank = self._pending.pop()
            try:
                status = self._request_status(rank)
            except Exception:  # an error of any kind counts as a missing answer
                status = None
            with self._lock:
                self._answers[rank] = status


def first_abort(answers: Mapping[int, Status | None]) -> Abort | None:
    for status in answers.values():
        if status is not None and status.abort is not None:
            return status.abort
    return None


def find_silent(answers: Mapping[int, Status | None], own: int, waiting_for: Sequence[int]) -> dict[int, str]:
    """Return the ranks that delay a message, with the reasons for the text of the error.

    Start with the ranks ``waiting_for``. If a rank waits for other ranks, examine these ranks too. A rank that does not
    answer or waits for no rank delays the message. If there is no such rank, the ranks wait for each other in a cycle,
    and all of them are returned.
    """
    seen = {own}
    guilty: dict[int, str] = {}
    pending = list(waiting_for)
    while pending:
        rank = pending.pop()
        if rank in seen:
            continue
        seen.add(rank)
        status = answers.get(rank)
        if status is None:
            guilty[rank] = _SILENT
        elif not status.waiting_for:
            guilty[rank] = f"is in call {status.sequence}, {status.call}" if status.call else "is in no call"
        else:
            pending += status.waiting_for
    if guilty:
        return dict(sorted(guilty.items()))
    cycle = sorted(seen - {own})
    return {rank: f"waits for {name_ranks(answers[rank].waiting_for)}" for rank in cycle}  # type: ignore[union-attr]


def find_culprits(answers: Mapping[int, Status | None], sequence: int, waiting_for: Sequence[int]) -> dict[int, str]:
    silent = {rank: "does not answer" for rank, status in answers.items() if status is None}
    late = {rank: status for rank, status in answers.items() if status is not None and status.sequence < sequence}
    absent = {rank: status for rank, status in late.items() if status.call is None and not status.waiting_for}
    if silent or absent:
        return {rank: _describe(answers.get(rank), sequence) for rank in sorted({*silent, *absent})}
    # A rank in an earlier call is not the cause if it waits for another rank in an earlier call.
    first = {rank: status for rank, status in late.items() if not set(status.waiting_for) & set(late)}
    if first or late:
        return {rank: _describe(status, sequence) for rank, status in sorted((first or late).items())}
    return {rank: _describe(answers.get(rank), sequence) for rank in waiting_for}


def _describe(status: Status | None, sequence: int) -> str:
    if status is None:
        return _SILENT
    wait_text = f" and waits for {name_ranks(status.waiting_for)}" if status.waiting_for else ""
    if status.call is None and wait_text and status.sequence < sequence:
        return f"has not called it (it sends or receives a message{wait_text})"
    if status.call is not None and status.sequence < sequence:
        return f"has not called it (it is still in call {status.sequence}, {status.call}{wait_text})"
    if status.call is not None:
        return f"is in call {status.sequence}, {status.call}{wait_text}, but its data does not arrive in time"
    if status.sequence >= sequence:
        return f"has finished call {status.sequence}, but its data has not arrived"
    if status.sequence < 0:
        return "has not called it (it has made no call yet)"
    return f"has not called it (it finished call {status.sequence} and is not in a collective)"
