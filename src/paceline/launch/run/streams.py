"""Show the lines of the ranks' output, and write their complete output to files."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Literal

from paceline.errors import UsageError
from paceline.launch.run.blame import RECENT_LINE_BYTES, RECENT_LINES, Tracebacks
from paceline.launch.screen import LineSplitter, Screen

_TORCH_PREFIX = re.compile(rb"^\[rank\d+\]: ")
"""The prefix that torch.distributed adds to lines of tracebacks. It has the number 0 on every rank of an elastic run.

With the prefix, tracebacks would not be recognized.
"""


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
        """Close the pipe; with `drain`, first read the rest. Show the last line even if it has no line end."""
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
            line = _TORCH_PREFIX.sub(b"", line)
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


def open_logs(folder: Path, prefix: str, *, appends: bool = False) -> tuple[IO[bytes], IO[bytes]]:
    """Open the log files of a rank. `prefix` is the beginning of their names."""
    check_log_dir(Path(f"{folder}/{prefix}stdout").parent)
    mode: Literal["ab", "wb"] = "ab" if appends else "wb"
    out: IO[bytes] | None = None
    try:
        out = open(folder / f"{prefix}stdout", mode, buffering=0)  # noqa: SIM115
        return out, open(folder / f"{prefix}stderr", mode, buffering=0)
    except OSError as error:
        if out is not None:
            out.close()
        raise UsageError(f"--log-dir {folder}: cannot write {error.filename}: {error.strerror}") from None


def check_log_dir(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--log-dir {folder}: cannot create this folder: {error.strerror}") from None
