"""Show the progress of a training: as a live line on a terminal, otherwise as plain lines at intervals."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text
from typing_extensions import Self, override

from paceline.closing import Closing
from paceline.observe.table import format_bytes, format_count, format_duration, format_rate

_BAR_CELLS = 20
_LEAST_BAR_CELLS = 6
_GAP = "  "
_SAMPLES_A_WINDOW = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSnapshot:
    """State of a training at one moment."""

    examples: int
    """The number of examples that all workers have processed in this phase."""
    examples_per_s: float
    done_fraction: float | None = None
    """From 0 to 1; None while it is unknown."""
    loss: float | None = None
    """Running mean over the latest examples. Each loss is measured before training on the example."""
    loss_name: str = "log loss"
    staleness_mean: float | None = None
    """Mean staleness in pushes, as counted by the servers."""
    staleness_max: int | None = None
    bytes_per_s: float = 0.0
    """Network traffic in both directions."""
    workers: int = 1
    epoch: str | None = None
    """Number of the pass, such as ``2/4``."""
    phase: str | None = None
    """Name of a phase other than training, such as ``evaluating``."""


class RateMeter:
    """Rate of an increasing count over the last few seconds, from about fifty samples. The caller passes the time."""

    def __init__(self, window: timedelta = timedelta(seconds=5)) -> None:
        self._window_s = window.total_seconds()
        self.samples: deque[tuple[float, float]] = deque()

    def add(self, time_s: float, count: float) -> None:
        """Add a sample. If the count is below the last one, as after a restart, the meter starts again."""
        samples = self.samples
        if samples and (count < samples[-1][1] or time_s < samples[-1][0]):
            samples.clear()
        if len(samples) > 1 and time_s - samples[-2][0] < self._window_s / _SAMPLES_A_WINDOW:
            samples.pop()
        samples.append((time_s, count))
        # Keep one sample that is older than the window, because a rate over less than the window would be unsteady.
        while len(samples) > 2 and samples[1][0] <= time_s - self._window_s:
            samples.popleft()

    @property
    def per_s(self) -> float:
        """Rate per second over the window; 0 until two samples have different times."""
        if len(self.samples) < 2:
            return 0.0
        (first_s, first), (last_s, last) = self.samples[0], self.samples[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0


class TrainingProgress(Closing):
    """Shows snapshots of training during its ``with`` block. Thread-safe.

    On a terminal one line is redrawn in place, truncated to the width. Otherwise (a file, a pipe, a dumb terminal) a
    plain line is printed at intervals of `plain_every`, so a short training prints no line. If `enabled` is False,
    nothing is printed. The cursor is always restored.
    """

    def __init__(
        self,
        console: Console | None = None,
        enabled: bool = True,
        *,
        plain_every: timedelta = timedelta(minutes=1),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a display on `console`; None means standard error."""
        self._console = Console(stderr=True) if console is None else console
        self._enabled = enabled
        self._plain_every_s = plain_every.total_seconds()
        self._clock = clock
        self._lock = threading.Lock()
        self._snapshot: ProgressSnapshot | None = None
        self._shown_s = self._start_s = 0.0
        self._live: Live | None = None

    @override
    def __enter__(self) -> Self:
        self._start_s = self._shown_s = self._clock()
        if self._enabled and self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                _Line(self),
                console=self._console,
                refresh_per_second=4,
                # Print terminal output above the line; leave redirected output in its file.
                redirect_stdout=sys.stdout.isatty(),
            )
            self._live.start(refresh=True)
        return self

    @override
    def close(self) -> None:
        with self._lock:
            self._enabled = False
        if self._live is not None:
            self._live.stop()

    def update(self, snapshot: ProgressSnapshot) -> None:
        """Show a snapshot. It may be called frequently, because it costs little time."""
        with self._lock:
            self._snapshot = snapshot
            if not self._enabled or self._live is not None:
                return
            if self._clock() - self._shown_s >= self._plain_every_s:
                self._shown_s = self._clock()
                self._console.out(_GAP.join(part for _, part in self._parts(snapshot)).strip(), highlight=False)

    def _parts(self, snapshot: ProgressSnapshot | None) -> list[tuple[int, str]]:
        """Return the parts of the line in order, each with a rank. A narrow line drops high ranks first."""
        elapsed = format_duration(self._clock() - self._start_s)
        if snapshot is None:
            return [(0, "waiting for the first examples"), (1, elapsed)]
        fraction = _fraction(snapshot)
        parts = [
            (
                0,
                f"{format_count(snapshot.examples)} examples" if fraction is None else f"{int(100 * fraction):3}%",
            )
        ]
        if snapshot.phase is not None:
            parts.append((1, snapshot.phase))
        if snapshot.epoch is not None:
            parts.append((5, f"epoch {snapshot.epoch}"))
        parts.append((2, format_rate(snapshot.examples_per_s, " examples")))
        if snapshot.loss is not None:
            parts.append((1, f"{snapshot.loss_name} {snapshot.loss:.4f}"))
        if snapshot.staleness_mean is not None:
            most = "" if snapshot.staleness_max is None else f" (max {snapshot.staleness_max})"
            parts.append((4, f"staleness {snapshot.staleness_mean:.1f}{most}"))
        parts.append((6, f"{format_bytes(snapshot.bytes_per_s)}/s"))
        parts.append((7, f"{snapshot.workers} worker{'' if snapshot.workers == 1 else 's'}"))
        parts.append((3, elapsed))
        return parts


def _fraction(snapshot: ProgressSnapshot) -> float | None:
    fraction = snapshot.done_fraction
    return None if fraction is None else min(max(fraction, 0.0), 1.0)


class _Line:
    """The live line, fitted to the terminal's current width at each refresh."""

    def __init__(self, progress: TrainingProgress) -> None:
        self._progress = progress

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        snapshot = self._progress._snapshot
        parts = self._progress._parts(snapshot)
        width = options.max_width
        while len(parts) > 1 and _num_cells(parts) > width:
            parts.remove(max(parts))
        line = Text(_GAP.join(part for _, part in parts), no_wrap=True, overflow="crop", end="")
        fraction = None if snapshot is None else _fraction(snapshot)
        room = min(width - _num_cells(parts) - len(_GAP), _BAR_CELLS)
        if fraction is not None and room >= _LEAST_BAR_CELLS:
            line = _bar(fraction, room, options.ascii_only) + Text(_GAP) + line
        line.truncate(width, overflow="crop")
        yield line


def _num_cells(parts: list[tuple[int, str]]) -> int:
    return sum(cell_len(part) + len(_GAP) for _, part in parts) - len(_GAP)


def _bar(fraction: float, num_cells: int, ascii_only: bool) -> Text:
    done = int(fraction * num_cells)
    full, empty = "#-" if ascii_only else "━─"
    return Text.assemble((full * done, "bar.complete"), (empty * (num_cells - done), "bar.back"))
