"""Split output of processes into lines, and show them with labels on this process's own output."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import IO

_COLOURS = (36, 33, 32, 35, 34, 31)  # cyan, yellow, green, magenta, blue, red in the terminal's theme
_MAX_LINE_BYTES = 1 << 20
"""Maximum length of a line; a longer line is shown in pieces."""


def label(text: str, number: int, *, coloured: bool) -> bytes:
    """Return the label of a line; `number` chooses its colour."""
    text = f"[{text}]"
    return (f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{text}\x1b[0m " if coloured else f"{text} ").encode()


class LineSplitter:
    """Splits chunks of arbitrary bytes into complete lines.

    A program may overwrite a line with carriage returns (a progress bar). The result then has only the line's final
    state, and :meth:`glimpse` returns the current state.
    """

    def __init__(self) -> None:
        self._pending = bytearray()
        self._glimpsed: bytes | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """Add a chunk; return the complete lines, including line ends."""
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
        """Return the last line if it has no line end. Call this method after the last chunk."""
        line, self._pending = bytes(self._pending), bytearray()
        return self._finish(line) if line else []

    def glimpse(self) -> list[bytes]:
        """Return the current state of an overwritten line, if it has changed since the last call."""
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
            return []  # the bar was erased, or this state was already shown
        return [shown + b"\n"]

    def _forget_overwritten(self) -> None:
        """Keep the last two states of a progress bar, because the last state may be incomplete or empty."""
        last = self._pending.rfind(b"\r")
        before = self._pending.rfind(b"\r", 0, max(last, 0))
        if before > 0:
            del self._pending[:before]


def _shown(line: bytes) -> bytes:
    """Return the final state of a line. It is exact if no state is shorter than the state that it overwrites."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Screen:
    """Writes complete lines to standard output and standard error of this process."""

    def __init__(self, name_of: Callable[[int], str] | None) -> None:
        """`name_of` returns the label of a process with a number. If it is None, lines have no labels."""
        self._outputs = (sys.stdout, sys.stderr)
        self._name_of = name_of
        self._coloured = tuple(_is_coloured(output) for output in self._outputs)

    def write(self, number: int, lines: list[bytes], *, is_error: bool) -> None:
        """Write lines of a process. Raises BrokenPipeError if the reader has closed the stream."""
        if lines:
            prefix = b""
            if self._name_of is not None:
                prefix = label(self._name_of(number), number, coloured=self._coloured[is_error])
            self.write_bytes(b"".join(prefix + line for line in lines), is_error=is_error)

    def write_bytes(self, data: bytes, *, is_error: bool) -> None:
        output = self._outputs[is_error].buffer
        output.write(data)
        output.flush()


def _is_coloured(output: IO[str]) -> bool:
    return output.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
