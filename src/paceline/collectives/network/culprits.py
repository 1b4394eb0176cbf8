"""Find the ranks to blame for a late call; often the awaited rank is waiting itself.

All ranks are polled. To blame are ranks that do not answer, and ranks outside a collective that have not made this
call; without such ranks, the ranks in an earlier call. For a message, the ends of the chain of waiting ranks are to
blame.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from paceline.collectives.calls import CollectiveCall
from paceline.collectives.network.frames import Abort
from paceline.errors import name_ranks

_MAX_THREADS: Final = 64
_SILENT: Final = "does not answer (its process is stopped or has died, or its host cannot be reached)"


class Status(msgspec.Struct, frozen=True, array_like=True):
    """Position of a rank in the sequence of its group's calls."""

    sequence: int
    """Number of the current call, else of the last finished one; -1 before the first."""
    call: CollectiveCall | None
    """The current call, if any."""
    waiting_for: tuple[int, ...]
    """Ranks that the last sleep in this call waited for; empty if nothing is missing. Between calls: ranks with
    pending messages, in either direction.
    """
    given_up: Abort | None = None
    """Reason for the end of the group, if it has ended at this rank."""


Ask: TypeAlias = Callable[[int], Status | None]
"""Return a rank's answer; None without an answer within about a second."""


class Search:
    """Poll all ranks concurrently in threads while the call continues."""

    def __init__(self, ask: Ask, ranks: Sequence[int]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._left = list(reversed(ranks))
        self._answers: dict[int, Status | None] = dict.fromkeys(ranks)
        for _ in range(min(len(ranks), _MAX_THREADS)):
            threading.Thread(target=self._work, name="paceline-ask", daemon=True).start()

    def answers(self) -> dict[int, Status | None]:
        """Return the answers received so far; None for missing ones."""
        with self._lock:
            return dict(self._answers)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._left:
                    return
                rank = self._left.pop()
            try:
                status = self._ask(rank)
            except Exception:  # any error means no answer
                status = None
            with self._lock:
                self._answers[rank] = status


def given_up(answers: Mapping[int, Status | None]) -> Abort | None:
    """Return the reason of the first answering rank that has given up, if any."""
    for status in answers.values():
        if status is not None and status.given_up is not None:
            return status.given_up
    return None


def find_silent(answers: Mapping[int, Status | None], own: int, waiting_for: Sequence[int]) -> dict[int, str]:
    """Return the ranks that delay a message for rank ``own``, with reasons, along the chain of waiting ranks."""
    seen = {own}
    guilty: dict[int, str] = {}
    left = list(waiting_for)
    while left:
        rank = left.pop()
        if rank in seen:
            continue
        seen.add(rank)
        status = answers.get(rank)
        if status is None:
            guilty[rank] = _SILENT
        elif not status.waiting_for:
            guilty[rank] = f"is in call {status.sequence}, {status.call}" if status.call else "is in no call"
        else:
            left += status.waiting_for
    if guilty:
        return dict(sorted(guilty.items()))
    circle = sorted(seen - {own})  # a cycle of waiting ranks
    return {rank: f"waits for {name_ranks(answers[rank].waiting_for)}" for rank in circle}  # type: ignore[union-attr]


def find_culprits(answers: Mapping[int, Status | None], sequence: int, waiting_for: Sequence[int]) -> dict[int, str]:
    """Return the ranks to blame, with reasons, for a rank that waits in call ``sequence``."""
    silent = {rank: "does not answer" for rank, status in answers.items() if status is None}
    behind = {rank: status for rank, status in answers.items() if status is not None and status.sequence < sequence}
    absent = {rank: status for rank, status in behind.items() if status.call is None and not status.waiting_for}
    if silent or absent:
        return {rank: _tell(answers.get(rank), sequence) for rank in sorted({*silent, *absent})}
    # Ranks in an earlier unfinished call are not to blame if they wait for another such rank.
    first = {rank: status for rank, status in behind.items() if not set(status.waiting_for) & set(behind)}
    if first or behind:
        return {rank: _tell(status, sequence) for rank, status in sorted((first or behind).items())}
    return {rank: _tell(answers.get(rank), sequence) for rank in waiting_for}


def _tell(status: Status | None, sequence: int) -> str:
    if status is None:
        return _SILENT
    waits = f" and waits for {name_ranks(status.waiting_for)}" if status.waiting_for else ""
    if status.call is None and waits and status.sequence < sequence:
        return f"has not called it (it sends or receives a message{waits})"
    if status.call is not None and status.sequence < sequence:
        return f"has not called it (it is still in call {status.sequence}, {status.call}{waits})"
    if status.call is not None:
        return f"is in call {status.sequence}, {status.call}{waits}, but its data does not arrive in time"
    if status.sequence >= sequence:
        return f"has finished call {status.sequence}, but its data has not arrived"
    if status.sequence < 0:
        return "has not called it (it has made no call yet)"
    return f"has not called it (it finished call {status.sequence} and is not in a collective)"
