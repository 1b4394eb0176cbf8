"""Format tables of results, and numbers with three digits and decimal units."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

_PREFIXES = ("", "k", "M", "G", "T", "P")
_NONE = "-"
_HEADERS = {"log loss": "log\nloss", "best AUC": "best\nAUC", "staleness": "staleness\nmean/max"}


def format_rate(per_s: float, unit: str = "") -> str:
    """Return a rate in three digits: ``312k/s``, ``4.07/s``; `unit` precedes the slash."""
    number, prefix = _three_digits(per_s, is_count=False)
    return f"{number}{prefix}{unit}/s"


def format_bytes(num_bytes: float) -> str:
    """Return a size in three digits and decimal units, as for networks and disks: ``512 B``, ``1.50 MB``."""
    number, prefix = _three_digits(num_bytes, is_count=True)
    return f"{number} {prefix}B"


def format_count(count: int) -> str:
    """Return a count in three digits: ``999``, ``1.05M``."""
    return "".join(_three_digits(count, is_count=True))


def format_duration(seconds: float) -> str:
    """Return whole seconds as a clock: ``0:07``, ``12:34``, ``1:02:03``."""
    minutes, remainder = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder:02}" if hours else f"{minutes}:{remainder:02}"


def _three_digits(value: float, is_count: bool) -> tuple[str, str]:
    """Return the number and its prefix; a count without a prefix has no fraction."""
    if not math.isfinite(value):
        return (_NONE if math.isnan(value) else f"{value}"), ""
    size = abs(value)
    for prefix in _PREFIXES:
        if size < 999.5 or prefix == _PREFIXES[-1]:
            break
        size /= 1000
    if (is_count and not prefix) or size == 0:
        digits = 0
    else:
        digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{'-' if value < 0 else ''}{size:.{digits}f}", prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """A training run in a comparison; None for unmeasured or meaningless values."""

    consistency: str
    seconds: float | None = None
    examples_per_s: float | None = None
    log_loss: float | None = None
    auc: float | None = None
    best_auc: float | None = None
    """AUC of the true model that generated the labels, if known."""
    staleness_mean: float | None = None
    staleness_max: int | None = None


def results_table(rows: Iterable[ResultRow], title: str | None = None) -> Table:
    """Return a table for a rich console, one line per run, without empty columns."""
    runs = list(rows)
    cells = {
        "consistency": [run.consistency for run in runs],
        "seconds": [_fixed(run.seconds, 1) for run in runs],
        "examples/s": [
            _NONE if run.examples_per_s is None else format_rate(run.examples_per_s).removesuffix("/s") for run in runs
        ],
        "log loss": [_fixed(run.log_loss, 4) for run in runs],
        "AUC": [_fixed(run.auc, 4) for run in runs],
        "best AUC": [_fixed(run.best_auc, 4) for run in runs],
        "staleness": [_staleness(run) for run in runs],
    }
    return _make_table(cells, title)


def strategies_table(results: Mapping[str, Mapping[str, float]], title: str | None = None) -> Table:
    """Return a table for a rich console, one line per strategy.

    `results` maps a strategy's name to the output of a script with ``--json``: ``seconds`` of training,
    ``examples_per_s`` and ``accuracy`` from 0 to 1; missing columns are omitted.
    """
    runs = [(name, results[name].get) for name in results]
    rates = [(name, get("examples_per_s")) for name, get in runs]
    cells = {
        "strategy": [name for name, _ in runs],
        "seconds": [_fixed(get("seconds"), 1) for _, get in runs],
        "examples/s": [_NONE if rate is None else format_rate(rate).removesuffix("/s") for _, rate in rates],
        "test accuracy": [_NONE if (found := get("accuracy")) is None else f"{found:.1%}" for _, get in runs],
    }
    return _make_table(cells, title)


def _make_table(cells: dict[str, list[str]], title: str | None) -> Table:
    """Return a table with names in the first column and numbers in the other columns, without empty columns."""
    shown = {name: column for name, column in cells.items() if any(cell != _NONE for cell in column)}
    table = Table(title=title, box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    first = next(iter(cells))
    for name in shown or cells:
        # On a narrow terminal names are folded; numbers keep all digits.
        if name == first:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(_HEADERS.get(name, name), justify="right", no_wrap=True)
    for line in zip(*shown.values(), strict=True):
        table.add_row(*(escape(cell) for cell in line))
    return table


def _fixed(value: float | None, digits: int) -> str:
    return _NONE if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _staleness(run: ResultRow) -> str:
    if run.staleness_mean is None and run.staleness_max is None:
        return _NONE
    return f"{_fixed(run.staleness_mean, 2)} / {_NONE if run.staleness_max is None else run.staleness_max}"
