"""Numeric columns on one scale."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.data import Columns, Scale, check_numeric_scale, fit_scale, open_dataset, open_spec
from paceline.errors import UsageError
from paceline.kernels.scaling import MOST_DEVIATIONS, scale_columns, scale_numbers

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'paceline[parquet]'")
pq = pytest.importorskip("pyarrow.parquet")

RANDOM = random.Random(3)
PLAIN, LOGGED = Scale(0.0, 2.0, 4.0), Scale(1.0, 1.0, 0.5)
OF_THOUSANDTHS = Scale(0.001, 7.0, 2.0)


@pytest.mark.parametrize("scale", [PLAIN, LOGGED, OF_THOUSANDTHS])
def test_scaling(scale: Scale) -> None:
    values = np.array([0, 2, -6.5, 1e-30, 3e38, -3e38], np.float32)
    expected = []
    for x in map(float, values):
        y = math.copysign(math.log1p(abs(x) / scale.unit), x) if scale.unit else x
        expected.append(max(-MOST_DEVIATIONS, min((y - scale.mean) / scale.deviation, MOST_DEVIATIONS)))
    scale_numbers(values, scale.as_array())
    np.testing.assert_allclose(values, np.array(expected, np.float32), rtol=1e-6)
    assert np.isfinite(values).all()


def test_the_scale_of_a_sample() -> None:
    cells = ["1", " 2", "3e0", "NA", "", "x", "1e999"]
    scale = fit_scale(cells)
    assert (scale.unit, scale.mean) == (0, 2.0)
    assert scale.deviation == pytest.approx(math.sqrt(2 / 3))
    assert fit_scale(cells, "log").unit == 1
    assert fit_scale(reversed(cells)) == scale
    assert fit_scale(["5"] * 9) == Scale(0.0, 5.0, 1.0)
    assert fit_scale(["0.1"] * 9).deviation == 1.0
    assert fit_scale([]) == Scale(0.0, 0.0, 1.0)
    assert math.isfinite(fit_scale(["1e308", "-1e308", "1e308"]).deviation)


@pytest.mark.parametrize("how", ["auto", "log"])
def test_the_unit_of_logarithms_follows_that_of_the_column(how: str) -> None:
    """A column in thousandths says what it says in whole units, labels known or not."""
    sizes = np.exp(np.random.default_rng(1).normal(0, 2.5, 4000))
    labels = (np.random.default_rng(2).random(4000) < 1 / (1 + np.exp(-np.log(sizes)))).astype(float)
    for known in (labels, None):
        standardised = []
        for factor in (1e-3, 1.0, 1e4):
            values = (sizes * factor).astype(np.float32)
            scale = fit_scale(map(str, values.tolist()), how, known)
            assert scale.unit == pytest.approx(factor * (0.003 if known is not None else 1), rel=0.3)
            scale_numbers(values, scale.as_array())
            standardised.append(values)
        np.testing.assert_allclose(standardised[0], standardised[1], atol=0.02)
        np.testing.assert_allclose(standardised[0], standardised[2], atol=0.02)
    assert fit_scale(["0", "7", "1200", "3.0"], "log").unit == 1


def test_logarithms_where_values_spread_widely() -> None:
    draws = {
        "heavy": [str(RANDOM.lognormvariate(3, 2)) for _ in range(5000)],
        "normal": [str(RANDOM.gauss(50, 20)) for _ in range(5000)],
        "even": [str(RANDOM.random()) for _ in range(5000)],
        "negative": [str(-RANDOM.paretovariate(1)) for _ in range(5000)],
    }
    assert {name: fit_scale(cells).unit > 0 for name, cells in draws.items()} == {
        "heavy": True,
        "normal": False,
        "even": False,
        "negative": True,
    }
    assert fit_scale(draws["heavy"], "standard").unit == 0


def test_an_unknown_scale() -> None:
    with pytest.raises(UsageError, match="'ln': expected one of auto, standard, log, none"):
        check_numeric_scale("ln")


def test_readers_scale_and_specs_cache_and_models_carry_it(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("y,a,b\n1,2,0\n0,,6\n0,10,NA\n")
    pq.write_table(pa.table({"y": [1, 0, 0], "a": [2, None, 10], "b": [0.0, 6.0, None]}), tmp_path / "x.parquet")
    plain = Columns("y", (), ("a", "b"))
    columns = replace(plain, scales=(PLAIN, LOGGED))
    assert Columns.from_fields(columns.to_fields()) == columns
    assert Columns.from_fields({"label": "y", "categorical": [], "numeric": ["a", "b"]}) == plain
    assert "scales" not in plain.to_fields()
    log7 = (math.log(7) - 1) / 0.5
    for name in ("x.csv", "x.parquet"):
        with open_dataset(tmp_path / name, columns=columns, cache_dir=tmp_path / "cache") as dataset:
            spec = dataset.spec()
            for _ in range(2):
                (batch,) = dataset.read(0, 0, 10)
                assert batch.values is not None
                np.testing.assert_allclose(batch.values, [0, -2, log7, 2], rtol=1e-6)
        with open_spec(spec) as again:
            assert again.columns == columns
            np.testing.assert_array_equal(next(again.read(0, 0, 10)).values, batch.values)
        with open_dataset(tmp_path / name, columns=plain, cache_dir=tmp_path / "cache") as dataset:
            (batch,) = dataset.read(0, 0, 10)
            assert batch.values is not None
            np.testing.assert_allclose(batch.values, [2, 0, 6, 10])


def test_numeric_columns_of_rows_are_scaled_where_they_stand() -> None:
    """Rows whose numbers come last, of which some are missing."""
    seeds = np.array([7, 5, 9], np.uint64)
    scales = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 2.0], [2.0, 1.0, 4.0]])
    rows = [[(100, 1.0), (7, 3.0), (5, -3.0), (9, 10.0)], [(5, 0.0)], [], [(7, 1.0), (9, 1e30)], [(100, 1.0)]]
    indptr = np.cumsum([0, *map(len, rows)])
    keys = np.array([key for row in rows for key, _ in row], np.uint64)
    values = np.array([value for row in rows for _, value in row], np.float32)
    scale_columns(indptr, keys, values, seeds, scales)
    expected = [1.0, 1.0, -np.log1p(3.0), 2.0, 0.0, 0.0, MOST_DEVIATIONS, 1.0]
    np.testing.assert_allclose(values, expected, rtol=1e-6)
