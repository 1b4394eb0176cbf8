"""Split the ranks' output into lines and label them. Pure: no file, no clock."""

from __future__ import annotations

_COLOURS = (36, 33, 32, 35, 34, 31)  # as the terminal's theme shows cyan, yellow, green, magenta, blue, red
_MAX_LINE_BYTES = 1 << 20
"""A longer line is shown in pieces."""


def label(rank: int, *, coloured: bool) -> bytes:
    text = f"[rank {rank}]"
    return (f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m " if coloured else f"{text} ").encode()


class LineSplitter:
    """Split chunks of arbitrary bytes into complete lines.

    A line that a program overwrites by carriage returns (a progress bar) becomes its final state on a terminal;
    :meth:`glimpse` returns the current one.
    """

    def __init__(self) -> None:
        self._pending = bytearray()
        self._glimpsed: bytes | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """Add a chunk; return the complete lines, with their ends."""
        start = len(self._pending)
        self._pending += data
        lines = []
        while (end := self._pending.find(b"\n", start)) >= 0:
            line = bytes(self._pending[:end])
            del self._pending[: end + 1]
            start = 0
            lines += self._finish(line)
        self._forget_overwritten()
        while len(self._pending) >= _MAX_LINE_BYTES:
            lines.append(bytes(self._pending[:_MAX_LINE_BYTES]) + b"\n")
            del self._pending[:_MAX_LINE_BYTES]
        return lines

    def flush(self) -> list[bytes]:
        """Return the last line if it has no end; call it after the last chunk."""
        line, self._pending = bytes(self._pending), bytearray()
        return self._finish(line) if line else []

    def glimpse(self) -> list[bytes]:
        """Return the current state of a line that is being overwritten, if it has changed since the last call."""
        shown = _shown(bytes(self._pending))
        if b"\r" not in self._pending or not shown.strip() or shown == self._glimpsed:
            return []
        self._glimpsed = shown
        return [shown + b"\n"]

    def _finish(self, line: bytes) -> list[bytes]:
        overwritten = b"\r" in line.rstrip(b"\r") or self._glimpsed is not None
        shown = _shown(line)
        known, self._glimpsed = self._glimpsed, None
        if overwritten and (not shown.strip() or shown == known):
            return []  # an erased bar, or one that was shown in this state
        return [shown + b"\n"]

    def _forget_overwritten(self) -> None:
        """Keep the last two states of a progress bar: the last one may be incomplete or empty."""
        last = self._pending.rfind(b"\r")
        before = self._pending.rfind(b"\r", 0, max(last, 0))
        if before > 0:
            del self._pending[:before]


def _shown(line: bytes) -> bytes:
    """Return the final state of a line on a terminal, if no state is shorter than the one before."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
