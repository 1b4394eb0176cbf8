"""Who is to blame when a call does not finish in time: seldom the rank that is waited for, which may itself be waiting.

All ranks are asked where they are. Guilty are those that do not answer; those that are in no collective and have not
called this one; and if there are none, those that are behind. Of a message: those at the end of the chain of ranks that
wait for one another's messages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from paceline.collectives.calls import CollectiveCall, name_ranks
from paceline.collectives.network.frames import Abort

_MAX_THREADS: Final = 64
_SILENT: Final = "does not answer (its process is stopped or has died, or its host cannot be reached)"


class Status(msgspec.Struct, frozen=True, array_like=True):
    """Where a rank is in the sequence of calls of its group."""

    sequence: int
    """The number of the call it is in, else of the last one it finished; -1 before the first."""
    call: CollectiveCall | None
    """The call it is in, if it is in one."""
    waiting_for: tuple[int, ...]
    """The ranks it slept for last in this call; empty while it has everything it needs. In no call: those whose
    messages it awaits, or that it sends to.
    """
    given_up: Abort | None = None
    """Why the group is over there, if it is."""


Ask: TypeAlias = Callable[[int], Status | None]
"""Returns what a rank answers, or None if it has not answered within about a second."""


class Search:
    """Asks all ranks at once, in threads, while the call may still come to its end."""

    def __init__(self, ask: Ask, ranks: Sequence[int]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._left = list(reversed(ranks))
        self._answers: dict[int, Status | None] = dict.fromkeys(ranks)
        for _ in range(min(len(ranks), _MAX_THREADS)):
            threading.Thread(target=self._work, name="paceline-ask", daemon=True).start()

    def answers(self) -> dict[int, Status | None]:
        """Return what has been answered so far; None for those that have not."""
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
            except Exception:  # whatever keeps a rank from answering, it has not answered
                status = None
            with self._lock:
                self._answers[rank] = status


def given_up(answers: Mapping[int, Status | None]) -> Abort | None:
    """Return why a rank has given up, if one of those that answer has."""
    for status in answers.values():
        if status is not None and status.given_up is not None:
            return status.given_up
    return None


def find_silent(answers: Mapping[int, Status | None], own: int, waiting_for: Sequence[int]) -> dict[int, str]:
    """Return who keeps rank ``own`` waiting for a message, and what is said of each: who waits for whom is followed."""
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
    circle = sorted(seen - {own})  # all wait for one another
    return {rank: f"waits for {name_ranks(answers[rank].waiting_for)}" for rank in circle}  # type: ignore[union-attr]


def find_culprits(answers: Mapping[int, Status | None], sequence: int, waiting_for: Sequence[int]) -> dict[int, str]:
    """Return the guilty ranks, each with what is said of it, for one that waits in call ``sequence``."""
    silent = {rank: "does not answer" for rank, status in answers.items() if status is None}
    behind = {rank: status for rank, status in answers.items() if status is not None and status.sequence < sequence}
    absent = {rank: status for rank, status in behind.items() if status.call is None and not status.waiting_for}
    if silent or absent:
        return {rank: _tell(answers.get(rank), sequence) for rank in sorted({*silent, *absent})}
    # Behind, but in a call that they cannot finish: those who wait for another that is behind are not guilty of it.
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
        return f"is in call {status.sequence}, {status.call}{waits}, but what it sends does not come in time"
    if status.sequence >= sequence:
        return f"has finished call {status.sequence}, but what it sent has not come"
    if status.sequence < 0:
        return "has not called it (it has made no call yet)"
    return f"has not called it (it finished call {status.sequence} and is not in a collective)"
