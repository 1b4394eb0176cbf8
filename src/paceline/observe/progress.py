"""Show the progress of a training, or of other long work, as one live line of a terminal.

Without a terminal, a training prints plain lines at intervals.
"""

from __future__ import annotations

import sys
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

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
_DELAY_S: Final = 0.5
"""Work that ends within this time shows nothing."""
_LEAST_FRACTION: Final = 0.02
"""The remaining time is unknown before this part of the work is done."""


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


class _ProgressLine(Closing):
    """The progress of some work, as one line. The terminal shows the line of the work that began last."""

    def __init__(self, console: Console | None, clock: Callable[[], float]) -> None:
        self._console = Console(stderr=True) if console is None else console
        self._clock = clock
        self._start_s = 0.0
        self._first: tuple[float, float] | None = None
        """Time and fraction at the first call of :meth:`remaining`."""

    @property
    @abstractmethod
    def fraction(self) -> float | None:
        """The finished part of the work, from 0 to 1; None if it is unknown."""

    @abstractmethod
    def parts(self) -> list[tuple[int, str]]:
        """Return the parts of the line in order, each after a number. A narrow line drops the largest numbers first."""

    def remaining(self) -> list[tuple[int, str]]:
        """Return the remaining time, if it can be computed, and otherwise the time since the start."""
        time_s, fraction = self._clock(), self.fraction
        if fraction is not None:
            if self._first is None:
                self._first = time_s, fraction
            first_s, first = self._first
            done = fraction - first
            if done >= _LEAST_FRACTION and fraction < 1:
                return [(3, f"{format_duration((time_s - first_s) * (1 - fraction) / done)} left")]
        return [(3, format_duration(time_s - self._start_s))]

    def _show(self, **options: Any) -> None:
        """Show this line instead of the earlier ones, until :meth:`_hide`."""
        global _live
        _open_lines.append(self)
        if _live is None:
            _live = Live(_LiveLine(), console=self._console, **options)
            _live.start(refresh=True)
        else:
            _live.refresh()

    def _hide(self) -> None:
        global _live
        if self in _open_lines:
            if len(_open_lines) == 1 and _live is not None:
                _live.stop()
                _live = None
            _open_lines.remove(self)

    @property
    def _is_terminal(self) -> bool:
        return self._console.is_terminal and not self._console.is_dumb_terminal


_open_lines: list[_ProgressLine] = []
_live: Live | None = None


class WorkProgress(_ProgressLine):
    """The progress of some work of a command. Nothing is printed if standard error is not a terminal.

    Work that ends soon shows nothing, and the line disappears at the end.
    """

    def __init__(
        self,
        title: str,
        total: float | None = None,
        unit: str = "",
        *,
        count: Callable[[], float] | None = None,
        in_background: bool = True,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the progress of `total` units, such as rows; None if the number is unknown.

        `count`, if given, returns the number of finished units. Without `in_background`, only calls redraw the line,
        because a thread would disturb a measurement.
        """
        super().__init__(console, clock)
        self._title, self._total, self._unit, self._count = title, total, unit, count
        self._in_background, self._is_shown = in_background, self._is_terminal
        self._done = 0.0
        self._fraction: float | None = None
        self._rate = RateMeter()

    @override
    def __enter__(self) -> Self:
        self._start_s = self._clock()
        if self._count is not None:
            self._draw()
        return self

    @override
    def close(self) -> None:
        self._is_shown = False
        self._hide()

    def update(self, done: float, *, fraction: float | None = None, title: str | None = None) -> None:
        """Set the number of finished units. A call takes little time. Without a total, pass the finished `fraction`."""
        self._done, self._fraction = done, fraction
        self._title = self._title if title is None else title
        if self._is_shown and self._clock() - self._start_s >= _DELAY_S:
            self._draw()

    def show(self, title: str) -> None:
        """Begin the next unit of work, with this title."""
        self._done += bool(self in _open_lines)
        self._title = title
        self._draw()

    def write_above(self, write: Callable[[], None]) -> None:
        """Call `write`, whose output appears above the line if both use the same terminal."""
        if _live is None:
            write()
            return
        _live.stop()
        write()
        _live.start(refresh=True)

    @property
    @override
    def fraction(self) -> float | None:
        if self._fraction is None and self._total:
            return min((self._done if self._count is None else self._count()) / self._total, 1.0)
        return self._fraction

    @override
    def parts(self) -> list[tuple[int, str]]:
        fraction, unit = self.fraction, self._unit and f" {self._unit}"
        parts = [(0, self._title)]
        if fraction is not None:
            parts.append((1, f"{int(100 * fraction):3}%"))
        if unit:
            self._rate.add(self._clock(), self._done)
            parts.append((4, f"{format_count(int(self._done))}{unit}"))
            if self._rate.per_s > 0:
                parts.append((2, format_rate(self._rate.per_s, unit)))
        return parts + self.remaining()

    def _draw(self) -> None:
        if not self._is_shown:
            return
        if self not in _open_lines:
            self._show(auto_refresh=self._in_background, transient=True, redirect_stdout=False, redirect_stderr=False)
        elif not self._in_background and _live is not None:
            _live.refresh()


class TrainingProgress(_ProgressLine):
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
        super().__init__(console, clock)
        self._enabled = enabled
        self._plain_every_s = plain_every.total_seconds()
        self._lock = threading.Lock()
        self._snapshot: ProgressSnapshot | None = None
        self._shown_s = 0.0
        self._is_live = False

    @override
    def __enter__(self) -> Self:
        self._start_s = self._shown_s = self._clock()
        if self._enabled and self._is_terminal:
            self._is_live = True
            # Print terminal output above the line; leave redirected output in its file.
            self._show(refresh_per_second=4, redirect_stdout=sys.stdout.isatty())
        return self

    @override
    def close(self) -> None:
        with self._lock:
            self._enabled = False
        self._hide()

    def update(self, snapshot: ProgressSnapshot) -> None:
        """Show a snapshot. Frequent calls are allowed, because a call takes little time."""
        with self._lock:
            self._snapshot = snapshot
            if not self._enabled or self._is_live:
                return
            if self._clock() - self._shown_s >= self._plain_every_s:
                self._shown_s = self._clock()
                self._console.out(_GAP.join(part for _, part in self.parts()).strip(), highlight=False)

    @property
    @override
    def fraction(self) -> float | None:
        fraction = None if self._snapshot is None else self._snapshot.done_fraction
        return None if fraction is None else min(max(fraction, 0.0), 1.0)

    @override
    def parts(self) -> list[tuple[int, str]]:
        snapshot, fraction = self._snapshot, self.fraction
        if snapshot is None:
            return [(0, "waiting for the first examples"), (1, format_duration(self._clock() - self._start_s))]
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
        return parts + self.remaining()


class _LiveLine:
    """The live line, fitted to the terminal's current width at each refresh."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts, fraction = _open_lines[-1].parts(), _open_lines[-1].fraction
        width = options.max_width
        while len(parts) > 1 and _num_cells(parts) > width:
            parts.remove(max(parts))
        line = Text(_GAP.join(part for _, part in parts), no_wrap=True, overflow="crop", end="")
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
