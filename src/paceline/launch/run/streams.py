"""Split the ranks' output into labelled lines, show them on this process's own output, and write all to files."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Literal

from paceline.errors import UsageError
from paceline.launch.run.blame import RECENT_LINE_BYTES, RECENT_LINES, Tracebacks

_COLOURS = (36, 33, 32, 35, 34, 31)  # cyan, yellow, green, magenta, blue, red in the terminal's theme
_MAX_LINE_BYTES = 1 << 20
"""Maximum length of a line; a longer line is shown in pieces."""


def label(rank: int, *, coloured: bool) -> bytes:
    text = f"[rank {rank}]"
    return (f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m " if coloured else f"{text} ").encode()


class LineSplitter:
    """Splits chunks of arbitrary bytes into complete lines.

    A program may overwrite a line with carriage returns (a progress bar). Such a line becomes its final state on a
    terminal; :meth:`glimpse` returns the current state.
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
    """Return the final state of a line on a terminal, if no state is shorter than the previous one."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Screen:
    """Standard output and error of this process, for complete lines."""

    def __init__(self, *, labelled: bool) -> None:
        self._outputs = (sys.stdout, sys.stderr)
        self._labelled = labelled
        self._coloured = tuple(_is_coloured(output) for output in self._outputs)

    def write(self, rank: int, lines: list[bytes], *, is_error: bool) -> None:
        """Write lines of a rank. Raises BrokenPipeError if the reader has closed the stream."""
        if lines:
            prefix = label(rank, coloured=self._coloured[is_error]) if self._labelled else b""
            self.write_bytes(b"".join(prefix + line for line in lines), is_error=is_error)

    def write_bytes(self, data: bytes, *, is_error: bool) -> None:
        output = self._outputs[is_error].buffer
        output.write(data)
        output.flush()


class Stream:
    """A rank's standard output or error, as a nonblocking pipe."""

    def __init__(
        self,
        rank: int,
        pipe: int,
        screen: Screen,
        *,
        is_error: bool,
        log: IO[bytes] | None,
        tracebacks: Tracebacks,
        clock: Callable[[], float],
    ) -> None:
        self.rank, self.pipe, self.is_error = rank, pipe, is_error
        self.recent: deque[bytes] = deque(maxlen=RECENT_LINES)
        self._screen, self._log, self._tracebacks, self._clock = screen, log, tracebacks, clock
        self._torch_prefix = b"[rank%d]: " % rank
        self._splitter = LineSplitter()
        os.set_blocking(pipe, False)

    def read(self) -> bool:
        try:
            data = os.read(self.pipe, 65536)
        except BlockingIOError:
            return False
        if data:
            self._keep(data)
            self._show(self._splitter.feed(data))
        return bool(data)

    def glimpse(self) -> None:
        """Show the current state of a line that the rank overwrites repeatedly, such as a progress bar."""
        self._show(self._splitter.glimpse())

    def close(self, *, drain: bool) -> None:
        """Close the pipe; with `drain`, read the rest before. A last line without a line end is shown too."""
        if self.pipe < 0:
            return
        try:
            while drain and self.read():
                pass
            if drain:
                self._show(self._splitter.flush())
        finally:
            os.close(self.pipe)
            self.pipe = -1
            if self._log is not None:
                self._log.close()

    def _show(self, lines: list[bytes]) -> None:
        if not self.is_error:
            self._screen.write(self.rank, lines, is_error=False)
            return
        time_s, shown = self._clock(), []
        for line in lines:
            # torch.distributed adds this prefix to traceback lines, which would hide them from the search.
            line = line.removeprefix(self._torch_prefix)
            self.recent.append(line.rstrip(b"\r\n")[:RECENT_LINE_BYTES])
            shown += self._tracebacks.feed(self.rank, line, time_s)
        self._screen.write(self.rank, shown, is_error=True)

    def _keep(self, data: bytes) -> None:
        if self._log is None:
            return
        try:
            self._log.write(data)
        except OSError as error:
            log, self._log = self._log, None
            text = f"paceline run: {log.name} ends here because of an error, but the run continues: {error.strerror}\n"
            self._screen.write_bytes(text.encode(), is_error=True)
            try:
                log.close()
            except OSError:
                pass


def open_logs(folder: Path, rank: int, *, appends: bool = False) -> tuple[IO[bytes], IO[bytes]]:
    check_log_dir(folder)
    mode: Literal["ab", "wb"] = "ab" if appends else "wb"
    out: IO[bytes] | None = None
    try:
        out = open(folder / f"rank{rank}.stdout", mode, buffering=0)  # noqa: SIM115
        return out, open(folder / f"rank{rank}.stderr", mode, buffering=0)
    except OSError as error:
        if out is not None:
            out.close()
        raise UsageError(f"--log-dir {folder}: cannot write {error.filename}: {error.strerror}") from None


def check_log_dir(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--log-dir {folder}: cannot create this folder: {error.strerror}") from None


def _is_coloured(output: IO[str]) -> bool:
    return output.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
