"""Find the rank that caused a failure, its last output, and the tracebacks to show. Pure: the caller passes the time.

The failure of one rank makes the other ranks fail: they lose its connection, or a collective ends. The tracebacks of
the other ranks add no information. They may come first, and would hide the traceback of the cause.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.launch.supervisor import describe_status

_HEADER = b"Traceback (most recent call last):"
_CHAINED = (
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)
_CONSEQUENCE = re.compile(
    rb"^([\w.]*\.)?(Backend)?(RankLost|GroupClosed|ConnectionLost|Address|Collective|Deadline|ConnectionReset|BrokenPipe"
    rb"|Dist(Network|Store))Error\b|Broken pipe|Connection (was likely )?(closed|reset)|Did the remote server shutdown"
    rb"|^KeyboardInterrupt\b|Horovod has been shut down"
)
_OF_RANK = re.compile(rb"^paceline\.[\w.]+Error: .*?\branks? (\d+)")
"""Matches the first line of an error that names the rank that caused it. The pattern's group is that rank's number."""
_ASIDES = (b"Exception ignored", b"Error in atexit", b"Exception in thread")
RECENT_LINES, RECENT_LINE_BYTES = 300, 4096
_MAX_SHOWN_LINES, _NUM_PLAIN_LINES = 60, 10
_QUIET_S = 1.0
_HOLD_S = 10.0
"""The longest wait for the end of a rank to which other ranks lost the connection. It may still be writing a file."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """A rank that has ended with a status other than 0."""

    rank: int
    status: int
    """The exit status, negative for a signal as in ``subprocess``."""
    last_lines: tuple[bytes, ...]
    """Its last lines on standard error, without line ends."""


def is_consequence(failure: RankFailure) -> bool:
    """Return whether another rank caused the failure, according to the rank's last traceback.

    The failure is a consequence if the first of the chained exceptions is a lost connection or names another rank,
    because later exceptions then follow from it. A program that fails and then cannot close its group is itself the
    cause. So is a rank that was killed by a signal, unless the program aborted itself.
    """
    if failure.status < 0 and failure.status != -signal.SIGABRT:
        return False
    root = _root(failure)
    return bool(_CONSEQUENCE.search(root)) or (_OF_RANK.match(root) is not None and named_rank(failure) != failure.rank)


def named_rank(failure: RankFailure) -> int | None:
    """Return the first rank that the first exception of the last traceback names; None if it names no rank."""
    named = re.search(rb"\branks? (\d+)", _root(failure))
    return None if named is None else int(named[1])


def _root(failure: RankFailure) -> bytes:
    words = _last_traceback(failure.last_lines)
    return next((line for line in words[1:] if line[:1].strip()), b"")


def choose_culprit(failures: Sequence[RankFailure]) -> RankFailure | None:
    """Return the first failure, in order of time, that is not a consequence; None if all failures are consequences."""
    return next((failure for failure in failures if not is_consequence(failure)), None)


def follow_names(failures: Sequence[RankFailure]) -> tuple[RankFailure, int | None]:
    """From the first failure, go to the failure of the rank that it names, and so on.

    Return the last failure of this chain, and the rank that it names.
    """
    by_rank = {failure.rank: failure for failure in failures}
    failure = failures[0]
    while (named := named_rank(failure)) in by_rank and named is not None:
        failure = by_rank.pop(named)
    return failure, named


def waiting_time(failures: Sequence[RankFailure], living: Sequence[int]) -> float:
    """Return how many seconds to wait for a later failure of another rank, which may be the cause of `failures`."""
    named = follow_names(failures)[1]
    return _HOLD_S if named is not None and named in living else _QUIET_S


def last_words(last_lines: Sequence[bytes]) -> list[bytes]:
    """Return a rank's last traceback, with its chained tracebacks and all later lines; without one, the last lines."""
    words = _last_traceback(last_lines)
    if not words:
        return list(last_lines[-_NUM_PLAIN_LINES:])
    if len(words) > _MAX_SHOWN_LINES:
        half = _MAX_SHOWN_LINES // 2
        return [*words[:half], b"  [%d lines]" % (len(words) - 2 * half), *words[-half:]]
    return list(words)


def exit_status(status: int) -> int:
    return 128 - status if status < 0 else status


def describe_failure(
    failure: RankFailure, *, world_size: int, seconds: float, num_held: int, log_dir: str | None
) -> bytes:
    cause = describe_status(failure.status)
    cause = cause.replace("ended with status", "failed with exit status")
    rank = f"rank {failure.rank} of {world_size}" if world_size > 1 else "the script"
    text = f"paceline run: {rank} {cause} after {format_seconds(seconds)}"
    if failure.status == -9:
        text += " (as the system does when memory runs out)"
    if world_size > 1:
        text += "; the other ranks were ended"
    if num_held:
        location = f"are in {log_dir}" if log_dir else "are not shown here (--log-dir DIR keeps them)"
        text += f"; {num_held} lines of tracebacks that followed on other ranks {location}"
    words = last_words(failure.last_lines)
    if not words:
        return f"{text}, without output on standard error.\n".encode()
    return b"\n".join([f"{text}. Its last output:".encode(), *words, b""])


def format_seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def _last_traceback(last_lines: Sequence[bytes]) -> Sequence[bytes]:
    headers = [number for number, line in enumerate(last_lines) if line.startswith(_HEADER)]
    headers = [number for number in headers if not last_lines[number - 1].startswith(_ASIDES)] or headers
    if not headers:
        return ()
    start = headers.pop()
    while headers and _is_chained(last_lines[headers[-1] : start]):
        start = headers.pop()
    return last_lines[start:]


def _is_chained(lines: Iterable[bytes]) -> bool:
    return any(line in _CHAINED for line in lines)


class _HeldTraceback:
    """A rank's lines since the start of a traceback, which are not shown yet."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.complete = False
        self.until: float | None = None


class Tracebacks:
    """Chooses when to show lines of the ranks' standard error, so that each traceback is shown as a whole.

    A traceback is held until its last line has arrived. It is held longer if another rank caused the failure, or if
    another rank's traceback was just shown, because a rank will probably end soon. The caller then calls :meth:`blame`
    with the rank that caused the failure, and only its tracebacks are shown. Without this call, all are shown, but a
    traceback that equals another rank's last one is replaced by a line.
    """

    def __init__(self) -> None:
        self._held: dict[int, _HeldTraceback] = {}
        self._shown: tuple[int, float] | None = None
        """The rank and the time of the last shown traceback."""
        self._last: tuple[int, list[bytes]] = (0, [])
        """The rank and the lines of the last traceback that was shown in full."""
        self._culprit: int | None = None
        self._is_over = False
        self.num_dropped = 0
        """Number of lines that were dropped without being shown."""

    def feed(self, rank: int, line: bytes, time_s: float) -> list[bytes]:
        """Add a line; return the lines to show now."""
        held = self._held.get(rank)
        if held is None:
            if rank == self._culprit or not line.startswith(_HEADER) or self._continues(rank, time_s):
                return [line]
            held = self._held[rank] = _HeldTraceback()
        held.lines.append(line)
        if not held.complete and len(held.lines) > 1 and line[:1].strip():
            held.complete = True
            if _CONSEQUENCE.search(line):
                held.until = time_s + _HOLD_S
            elif self._is_over or (self._shown is not None and time_s < self._shown[1] + _QUIET_S):
                held.until = time_s + _QUIET_S
            else:
                return self._show(rank, time_s)
        elif held.until is None and not held.complete:
            held.until = time_s + _QUIET_S  # the time limit if the exception never arrives
        return []

    def _continues(self, rank: int, time_s: float) -> bool:
        """Return whether this rank's new traceback probably belongs to its traceback that was just shown."""
        return self._shown is not None and self._shown[0] == rank and time_s < self._shown[1] + _QUIET_S

    def _show(self, rank: int, time_s: float) -> list[bytes]:
        self._shown = (rank, time_s)
        return self.release(rank)

    def due(self) -> float | None:
        """Return the time at which :meth:`overdue` will next return lines; None if no lines have a time limit."""
        if self._is_over:
            return None
        return min((held.until for held in self._held.values() if held.until is not None), default=None)

    def overdue(self, time_s: float) -> list[tuple[int, list[bytes]]]:
        """Return the held lines whose time limit has passed, by rank."""
        if self._is_over:
            return []
        late = [rank for rank, held in self._held.items() if held.until is not None and held.until <= time_s]
        return [(rank, self._show(rank, time_s)) for rank in late]

    def blame(self, rank: int | None) -> list[bytes]:
        """Show only this rank's lines from now on (None: show no lines). Return the rank's held lines."""
        self._culprit, self._is_over = rank, True
        return [] if rank is None else self.release(rank)

    def release(self, rank: int) -> list[bytes]:
        """Return the held lines of a rank, to show them now."""
        held = self._held.pop(rank, None)
        if held is None:
            return []
        other, lines = self._last
        if lines and held.lines[: len(lines)] == lines and other != rank and not self._is_over:
            return [b"the same traceback as rank %d\n" % other, *held.lines[len(lines) :]]
        self._last = rank, held.lines
        return held.lines

    def finish(self) -> list[tuple[int, list[bytes]]]:
        """End the output: return all held lines by rank or, after :meth:`blame`, drop and count them."""
        left = [(rank, held.lines) for rank, held in self._held.items()]
        self._held = {}
        if not self._is_over:
            return left
        self.num_dropped += sum(len(lines) for _, lines in left)
        return []
