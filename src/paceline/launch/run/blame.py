"""Which rank is to blame when several fail, what it said last, and which tracebacks to show. Pure: told the time.

One rank's failure makes the others fail: they lose its connection, or a collective ends. Their tracebacks say nothing
new, may come first, and bury the one that matters.
"""

from __future__ import annotations

import re
import signal
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.launch.supervisor import describe_status

_HEADER = b"Traceback (most recent call last):"
_CHAINED = (
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)
_CONSEQUENCE = re.compile(
    rb"^([\w.]*\.)?(Backend)?(RankLost|GroupClosed|ConnectionLost|Collective|Deadline|ConnectionReset|BrokenPipe|Dist"
    rb"(Network|Store))Error\b|Broken pipe|Connection (was likely )?(closed|reset)|Did the remote server shutdown"
)
_OF_RANK = re.compile(rb"^paceline\.[\w.]+Error: .*?\branks? (\d+)")
"""An error that every rank raises begins with the rank that caused it."""
_ASIDES = (b"Exception ignored", b"Error in atexit", b"Exception in thread")
_MAX_KEPT_LINES, _MAX_LINE_BYTES = 300, 4096
_MAX_SHOWN_LINES, _NUM_PLAIN_LINES = 60, 10
_SETTLE_S = 1.0
_CONSEQUENCE_HOLD_S = 5.0
_NAMED_HOLD_S = 10.0
"""How long a rank that others lost may take to end: it may write a file, or wait for its threads."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """A rank that has ended with another status than 0."""

    rank: int
    status: int
    """As of ``subprocess``: negative for a signal."""
    said: tuple[bytes, ...]
    """Its last lines on standard error, without their ends."""


class Recent:
    """The last lines that a rank wrote on standard error."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=_MAX_KEPT_LINES)

    def add(self, line: bytes) -> None:
        """Take a line."""
        self._lines.append(line.rstrip(b"\r\n")[:_MAX_LINE_BYTES])

    def lines(self) -> tuple[bytes, ...]:
        """Return them, oldest first."""
        return tuple(self._lines)


def is_consequence(failure: RankFailure) -> bool:
    """Whether a rank's last traceback begins with a lost connection, or with an error that another rank caused.

    The first of chained exceptions counts: whatever a program raises after a lost rank is a consequence, and a program
    that fails, and then cannot close its group, has failed by itself. A signal is no consequence, unless the program
    aborted itself.
    """
    if failure.status < 0 and failure.status != -signal.SIGABRT:
        return False
    root = _root(failure)
    return bool(_CONSEQUENCE.search(root)) or (_OF_RANK.match(root) is not None and named_rank(failure) != failure.rank)


def named_rank(failure: RankFailure) -> int | None:
    """Return the first rank that the last traceback's first exception names; None if it names no rank."""
    named = re.search(rb"\branks? (\d+)", _root(failure))
    return None if named is None else int(named[1])


def _root(failure: RankFailure) -> bytes:
    words = _last_traceback(failure.said)
    return next((line for line in words[1:] if line[:1].strip()), b"")


def choose_culprit(failures: Sequence[RankFailure]) -> RankFailure | None:
    """Return the first, in the order of their ends, that has failed by itself; None if all are consequences."""
    return next((failure for failure in failures if not is_consequence(failure)), None)


def follow_names(failures: Sequence[RankFailure]) -> tuple[RankFailure, int | None]:
    """Return the failure to which the names in consequences lead from the first one, and the rank that it names."""
    by_rank = {failure.rank: failure for failure in failures}
    failure = failures[0]
    while (named := named_rank(failure)) in by_rank and named is not None:
        failure = by_rank.pop(named)
    return failure, named


def settle_time(failures: Sequence[RankFailure], living: Sequence[int]) -> float:
    """Return for how many seconds a failure that explains `failures` may still come."""
    named = follow_names(failures)[1]
    return _NAMED_HOLD_S if named is not None and named in living else _SETTLE_S


def last_words(said: Sequence[bytes]) -> list[bytes]:
    """Return a rank's last traceback, with what it is chained to and all after it; else its last lines."""
    words = _last_traceback(said)
    if not words:
        return list(said[-_NUM_PLAIN_LINES:])
    if len(words) > _MAX_SHOWN_LINES:
        half = _MAX_SHOWN_LINES // 2
        return [*words[:half], b"  [%d lines]" % (len(words) - 2 * half), *words[-half:]]
    return list(words)


def exit_status(status: int) -> int:
    """Return a process's status as shells do: 128 and its signal if it was killed."""
    return 128 - status if status < 0 else status


def describe_failure(
    failure: RankFailure, *, world_size: int, seconds: float, num_held: int, log_dir: str | None
) -> bytes:
    """Return the last thing that is said of a run that failed, its rank's last words in the end."""
    told = describe_status(failure.status)
    told = told.replace("ended with status", "failed with exit status")
    who = f"rank {failure.rank} of {world_size}" if world_size > 1 else "the script"
    text = f"paceline run: {who} {told} after {format_seconds(seconds)}"
    if failure.status == -9:
        text += " (as the system does when memory runs out)"
    if world_size > 1:
        text += "; the others were ended"
    if num_held:
        where = f"are in {log_dir}" if log_dir else "are not shown here (--log-dir DIR keeps them)"
        text += f"; {num_held} lines of tracebacks that other ranks wrote because of it {where}"
    words = last_words(failure.said)
    if not words:
        return f"{text}; it said nothing on standard error.\n".encode()
    return b"\n".join([f"{text}. What it said last:".encode(), *words, b""])


def format_seconds(seconds: float) -> str:
    """Return seconds for people."""
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def _last_traceback(said: Sequence[bytes]) -> Sequence[bytes]:
    headers = [number for number, line in enumerate(said) if line.startswith(_HEADER)]
    headers = [number for number in headers if not said[number - 1].startswith(_ASIDES)] or headers
    if not headers:
        return ()
    start = headers.pop()
    while headers and _is_chained(said[headers[-1] : start]):
        start = headers.pop()
    return said[start:]


def _is_chained(lines: Iterable[bytes]) -> bool:
    return any(line in _CHAINED for line in lines)


class _HeldTraceback:
    """What one rank wrote from the beginning of a traceback on, and is not shown yet."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.complete = False
        self.until: float | None = None


class Tracebacks:
    """Decides when lines of ranks' standard error are shown: one traceback at a time, whole, consequences last.

    A traceback is held until its exception is there. It is held longer if it is a consequence, or another rank's has
    just been shown: then the next thing to happen is most likely that a rank ends, :meth:`blame` is called, and only
    that one's is shown. If nothing happens all is shown, in the order of each rank.
    """

    def __init__(self) -> None:
        self._held: dict[int, _HeldTraceback] = {}
        self._shown: tuple[int, float] | None = None
        """The rank whose traceback was shown last, and when."""
        self._culprit: int | None = None
        self._is_over = False
        self.num_dropped = 0
        """Lines that are not shown at all."""

    def feed(self, rank: int, line: bytes, now: float) -> list[bytes]:
        """Take a line; return what is to be shown now."""
        held = self._held.get(rank)
        if held is None:
            if rank == self._culprit or not line.startswith(_HEADER) or self._continues(rank, now):
                return [line]
            held = self._held[rank] = _HeldTraceback()
        held.lines.append(line)
        if not held.complete and len(held.lines) > 1 and line[:1].strip():
            held.complete = True
            if _CONSEQUENCE.search(line):
                held.until = now + _CONSEQUENCE_HOLD_S
            elif self._is_over or (self._shown is not None and now < self._shown[1] + _SETTLE_S):
                held.until = now + _SETTLE_S
            else:
                return self._show(rank, now)
        elif held.until is None and not held.complete:
            held.until = now + _SETTLE_S  # one that never gets to its exception
        return []

    def _continues(self, rank: int, now: float) -> bool:
        """Whether a traceback is most likely chained to the one of this rank that was just shown."""
        return self._shown is not None and self._shown[0] == rank and now < self._shown[1] + _SETTLE_S

    def _show(self, rank: int, now: float) -> list[bytes]:
        self._shown = (rank, now)
        return self._held.pop(rank).lines

    def due(self) -> float | None:
        """Return when :meth:`overdue` has something to show, if nothing happens before."""
        if self._is_over:
            return None
        return min((held.until for held in self._held.values() if held.until is not None), default=None)

    def overdue(self, now: float) -> list[tuple[int, list[bytes]]]:
        """Return what has been held long enough, by rank."""
        if self._is_over:
            return []
        late = [rank for rank, held in self._held.items() if held.until is not None and held.until <= now]
        return [(rank, self._show(rank, now)) for rank in late]

    def blame(self, rank: int | None) -> list[bytes]:
        """Show this rank's and no other's from now on (None: nobody's); return what was held of it."""
        self._culprit, self._is_over = rank, True
        return self._held.pop(rank).lines if rank in self._held else []

    def finish(self) -> list[tuple[int, list[bytes]]]:
        """Return, at the end, what is still held, by rank; nothing of it after :meth:`blame`, when it is counted."""
        left = [(rank, held.lines) for rank, held in self._held.items()]
        self._held = {}
        if not self._is_over:
            return left
        self.num_dropped += sum(len(lines) for _, lines in left)
        return []
