"""The effect of one column on the label: by a line or by a table of bins, and the choice of one."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.data import TextTable, fit_scale, guess_columns
from paceline.data.scales.one_column import line_loss, table_loss

RNG = np.random.default_rng(0)


def clicks(margins: np.ndarray) -> np.ndarray:
    labels: np.ndarray = (RNG.random(len(margins)) < 1 / (1 + np.exp(-margins))).astype(np.float64)
    return labels


def entropy(labels: np.ndarray) -> float:
    rate = labels.mean()
    return float(-rate * np.log(rate) - (1 - rate) * np.log(1 - rate))


def test_the_loss_of_a_line_is_minimal() -> None:
    x = RNG.normal(5, 3, 2000)
    labels = clicks(0.7 * (x - 5) - 1)
    cost = 1 / 2000
    z = (x - x.mean()) / x.std()
    grid = (
        np.logaddexp(0, a + b * z) - labels * (a + b * z) for a in np.linspace(-2, 0, 41) for b in np.linspace(1, 3, 41)
    )
    least = min(float(losses.mean()) for losses in grid)
    assert line_loss(x, labels) - cost == pytest.approx(least, abs=2e-4)
    assert line_loss(x, labels) - cost <= least
    assert line_loss(x * 1e6 - 3, labels * 2 - 1) == pytest.approx(line_loss(x, labels))


@pytest.mark.parametrize("labels", [np.zeros(30), np.ones(30), np.r_[np.zeros(15), np.ones(15)], np.empty(0)])
def test_the_loss_is_finite_for_equal_and_for_separable_labels(labels: np.ndarray) -> None:
    x = np.arange(len(labels), dtype=np.float64)
    assert np.isfinite(line_loss(x, labels))
    assert len(labels) == 0 or line_loss(np.zeros(len(labels)), labels) <= np.log(2) + 0.05
    assert np.isfinite(table_loss(np.zeros(len(labels), np.int64), labels))
    assert np.isfinite(line_loss(x**200, labels))


def test_noise_does_not_lower_the_loss_of_a_table() -> None:
    codes, labels = RNG.integers(0, 50, 5000), clicks(np.full(5000, -1.0))
    assert table_loss(codes, labels) > entropy(labels)
    rates = RNG.normal(0, 2, 50)
    assert table_loss(codes, clicks(rates[codes])) < line_loss(codes.astype(np.float64), clicks(rates[codes]))


def test_quantities_are_explained_too() -> None:
    x = RNG.lognormal(0, 1, 3000)
    y = 3 * np.log1p(x) + RNG.normal(0, 0.3, 3000)
    assert line_loss(np.log1p(x), y) < line_loss(x, y) - 0.3


def test_auto_chooses_the_scale_by_the_label() -> None:
    amounts = RNG.lognormal(0, 1.5, 4000)
    cells = [f"{amount:.6g}" for amount in amounts]
    assert not fit_scale(cells, "auto", clicks(amounts - 2)).unit
    assert fit_scale(cells, "auto", clicks(2 * np.log(amounts))).unit
    assert fit_scale(cells, "auto", clicks(np.zeros(4000))).unit == fit_scale(cells).unit  # labels without information
    assert fit_scale(cells, "auto", np.full(4000, np.nan)).unit == fit_scale(cells).unit
    assert not fit_scale(cells, "standard", clicks(2 * np.log(amounts))).unit


def test_counts_with_a_linear_effect_are_numbers() -> None:
    counts, odd = RNG.poisson(4, 5000), RNG.normal(0, 1.5, 40)
    for labels, kind in ((clicks(counts - 4.0), "numeric"), (clicks(odd[counts]), "categorical")):
        rows = [[f"{label:g}", str(count)] for label, count in zip(labels, counts, strict=True)]
        guesses = guess_columns("x.csv", TextTable(("label", "visits"), ("", ""), rows))
        assert guesses.guesses[1].kind == kind
