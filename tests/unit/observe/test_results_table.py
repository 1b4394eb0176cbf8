"""Numbers as people read them, and the table of a comparison."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from paceline.observe import ResultRow, format_bytes, format_rate, results_table, strategies_table
from paceline.observe.table import format_count, format_duration


@pytest.mark.parametrize(
    ("per_s", "text"),
    [
        (312345.0, "312k/s"),
        (0.0, "0/s"),
        (0.5, "0.50/s"),
        (9.994, "9.99/s"),
        (9.996, "10.0/s"),
        (99.96, "100/s"),
        (999.4, "999/s"),
        (999.6, "1.00k/s"),
        (999_600, "1.00M/s"),
        (4.07e9, "4.07G/s"),
        (5e18, "5000P/s"),
        (-1500.0, "-1.50k/s"),
        (math.nan, "-/s"),
        (math.inf, "inf/s"),
    ],
)
def test_rates_have_three_digits(per_s: float, text: str) -> None:
    assert format_rate(per_s) == text


def test_a_rate_can_name_its_unit() -> None:
    assert format_rate(1200, " examples") == "1.20k examples/s"


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (7.4, "7 B"), (512, "512 B"), (1500, "1.50 kB"), (1.5e6, "1.50 MB")]
)
def test_sizes_are_decimal(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_counts_and_durations() -> None:
    assert [format_count(n) for n in (7, 999, 1_050_000)] == ["7", "999", "1.05M"]
    assert [format_duration(s) for s in (7.9, 754, 3723)] == ["0:07", "12:34", "1:02:03"]


def rendered(*rows: ResultRow, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(results_table(rows, title="A comparison"))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


FULL = ResultRow(
    consistency="BoundedDelay(tau=4)",
    seconds=12.34,
    examples_per_s=312345.0,
    log_loss=0.47204,
    auc=0.77106,
    best_auc=0.78083,
    staleness_mean=1.5,
    staleness_max=4,
)


@pytest.mark.parametrize("width", [66, 80, 120])
def test_table_has_every_figure_on_narrow_terminals_too(width: int) -> None:
    text = rendered(FULL, ResultRow(consistency="Eventual[x]()", seconds=9.0, log_loss=math.nan), width=width)
    for cell in ("12.3", "312k", "0.4720", "0.7711", "0.7808", "1.50 / 4", "9.0"):
        assert cell in text
    assert all(len(line) <= width for line in text.splitlines())
    assert "None" not in text
    assert "nan" not in text
    assert "…" not in text
    if width >= 80:
        for cell in ("A comparison", "BoundedDelay(tau=4)", "Eventual[x]()", "examples/s", "mean/max"):
            assert cell in text


def test_columns_that_no_run_fills_are_left_out() -> None:
    text = rendered(ResultRow(consistency="Sequential()", auc=0.75))
    assert "AUC" in text
    for header in ("best", "staleness", "seconds", "log loss"):
        assert header not in text


def test_an_empty_table_still_has_its_headers() -> None:
    assert "consistency" in rendered()


def test_strategies() -> None:
    results = {
        "one-device": {"seconds": 1.25, "examples_per_s": 12_340.0, "accuracy": 0.9733},
        "parameter-server": {"seconds": 0.5, "examples_per_s": 30_000.0},
    }
    console = Console(file=io.StringIO(), width=60)
    console.print(strategies_table(results))
    assert isinstance(console.file, io.StringIO)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert lines[0] == ["strategy", "seconds", "examples/s", "test", "accuracy"]
    assert lines[2:4] == [
        ["one-device", "1.2", "12.3k", "97.3%"],
        ["parameter-server", "0.5", "30.0k", "-"],
    ]
