"""Numbers in the form in which users read them."""

from __future__ import annotations

import math

import pytest

from paceline.observe.table import draw_bars, format_bytes, format_count, format_duration, format_rate


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


def test_a_rate_can_include_the_unit() -> None:
    assert format_rate(1200, " examples") == "1.20k examples/s"


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (7.4, "7 B"), (512, "512 B"), (1500, "1.50 kB"), (1.5e6, "1.50 MB")]
)
def test_sizes_have_decimal_prefixes(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_counts_and_durations() -> None:
    assert [format_count(n) for n in (7, 999, 1_050_000)] == ["7", "999", "1.05M"]
    assert [format_duration(s) for s in (7.9, 754, 3723)] == ["0:07", "12:34", "1:02:03"]


@pytest.mark.parametrize("values", [(-1.7e308, 0.0, 1.7e308), (0.0, 2e-320, 4e-320), (3.0, 4.0, 5.0)])
def test_bars_of_extreme_values(values: tuple[float, float, float]) -> None:
    assert draw_bars(values, values[0], values[2]) in ("▁▄█", "▁▅█")
    assert draw_bars(values, values[1], values[1]) == "▁▁▁"
