"""Numeric columns on one scale."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.data import Batch, Columns, Scale, check_numeric_scale, fit_scale, open_dataset, open_spec
from paceline.errors import UsageError
from paceline.kernels.features.scaling import MOST_DEVIATIONS, scale_columns, scale_numbers
from paceline.training.files.converting import convert_data, sample_sources
from paceline.training.files.data_files import sample_data

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'paceline[parquet]'")
pq = pytest.importorskip("pyarrow.parquet")

RANDOM = random.Random(3)
PLAIN, LOGGED = Scale(0.0, 2.0, 4.0), Scale(1.0, 1.0, 0.5)
OF_THOUSANDTHS = Scale(0.001, 7.0, 2.0)


@pytest.mark.parametrize("scale", [PLAIN, LOGGED, OF_THOUSANDTHS])
def test_scaling(scale: Scale) -> None:
    values = np.array([0, 2, -6.5, 1e-30, 3e38, -3e38])
    scaled = np.empty(len(values), np.float32)
    expected = []
    for x in map(float, values):
        y = math.copysign(math.log1p(abs(x) / scale.unit), x) if scale.unit else x
        expected.append(max(-MOST_DEVIATIONS, min((y - scale.mean) / scale.deviation, MOST_DEVIATIONS)))
    scale_numbers(values, scale.as_array(), scaled)
    np.testing.assert_allclose(scaled, np.array(expected, np.float32), rtol=1e-6)
    assert np.isfinite(scaled).all()


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
def test_the_unit_of_logarithms_follows_the_unit_of_the_column(how: str) -> None:
    """A column in thousandths is scaled to the same values as in whole units, with and without labels."""
    sizes = np.exp(np.random.default_rng(1).normal(0, 2.5, 4000))
    labels = (np.random.default_rng(2).random(4000) < 1 / (1 + np.exp(-np.log(sizes)))).astype(float)
    for known in (labels, None):
        standardised = []
        for factor in (1e-3, 1.0, 1e4):
            values = (sizes * factor).astype(np.float32)
            scaled = np.empty_like(values)
            scale = fit_scale(map(str, values.tolist()), how, known)
            assert scale.unit == pytest.approx(factor * (0.003 if known is not None else 1), rel=0.3)
            scale_numbers(values.astype(np.float64), scale.as_array(), scaled)
            standardised.append(scaled)
        np.testing.assert_allclose(standardised[0], standardised[1], atol=0.02)
        np.testing.assert_allclose(standardised[0], standardised[2], atol=0.02)
    assert fit_scale(["0", "7", "1200", "3.0"], "log").unit == 1


def test_logarithms_are_used_for_widely_spread_values() -> None:
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
    with pytest.raises(UsageError, match="'ln': expected one of auto, standard, log, log-bins, none, or quantile:N"):
        check_numeric_scale("ln")


def test_readers_specs_caches_and_models_keep_the_scale(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("y,a,b\n1,2,0\n0,,6\n0,10,NA\n")
    pq.write_table(pa.table({"y": [1, 0, 0], "a": [2, None, 10], "b": [0.0, 6.0, None]}), tmp_path / "x.parquet")
    plain = Columns("y", (), ("a", "b"))
    columns = replace(plain, scales=(PLAIN, LOGGED))
    assert Columns.from_fields(columns.to_fields()) == columns
    before = {"label": "y", "categorical": [], "numeric": ["a", "b"]}
    assert Columns.from_fields(before) == replace(plain, trims=False)
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


def test_numeric_columns_of_rows_are_scaled_in_place() -> None:
    """The numbers stand at the end of the rows, and some numbers are missing."""
    seeds = np.array([7, 5, 9], np.uint64)
    scales = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 2.0], [2.0, 1.0, 4.0], [0.0, 0.0, 0.0]])
    rows = [[(100, 1.0), (7, 3.0), (5, -3.0), (9, 10.0)], [(5, 0.0)], [], [(7, 1.0), (9, 1e30)], [(100, 1.0)]]
    indptr = np.cumsum([0, *map(len, rows)])
    keys = np.array([key for row in rows for key, _ in row], np.uint64)
    values = np.array([value for row in rows for _, value in row], np.float32)
    scale_columns(indptr, keys, values, seeds, np.zeros(3), scales)
    expected = [1.0, 1.0, -np.log1p(3.0), 2.0, 0.0, 0.0, MOST_DEVIATIONS, 1.0]
    np.testing.assert_allclose(values, expected, rtol=1e-6)


def test_close_numbers_far_from_0(tmp_path: Path) -> None:
    """Times in milliseconds within 100 s, which float32 would round to two values: text, Parquet, converted files."""
    rng = np.random.default_rng(1)
    times = 1_764_000_000_000 + rng.integers(0, 100_000, 2000)
    near = 5e6 + rng.normal(size=2000)
    y = (rng.random(2000) < 1 / (1 + np.exp(-(times - times.mean()) / times.std()))).astype(int)
    content = {"y": y, "time": times, "near": near, "x": rng.normal(size=2000)}
    rows = zip(*(column.tolist() for column in content.values()), strict=True)
    (tmp_path / "x.csv").write_text("y,time,near,x\n" + "".join(",".join(map(repr, row)) + "\n" for row in rows))
    pq.write_table(pa.table(content), tmp_path / "x.parquet")
    named = Columns("y", (), ("time", "near", "x"))
    for how in ("standard", "log", "auto", "none"):
        expected_columns = sample_data([tmp_path / "x.csv"], columns=named, numeric_scale=how).columns
        found = []
        for name in ("x.csv", "x.parquet", "a.paceline", "b.paceline"):
            path = tmp_path / name
            if how == "standard" and name.endswith("paceline"):
                source = [str(tmp_path / ("x.csv" if name[0] == "a" else "x.parquet"))]
                sample = sample_sources(source, path, format=None, columns=named)
                convert_data(source, path, sample)
            columns = sample_data(
                [path], columns=None if name.endswith("paceline") else named, numeric_scale=how
            ).columns
            with open_dataset(path, columns=columns) as dataset:
                found.append(Batch.concatenate(list(dataset.batches(500))).values)
            assert columns == expected_columns
        values = np.asarray(found[0]).reshape(-1, 3)
        for other in found[1:]:
            np.testing.assert_array_equal(found[0], other)
        if how == "none":
            np.testing.assert_array_equal(values, np.column_stack([times, near, content["x"]]).astype(np.float32))
        else:
            assert columns is not None
            assert [scale.centre != 0 for scale in columns.scales] == [True, True, False]
            assert Columns.from_fields(json.loads(json.dumps(columns.to_fields()))) == columns
            for at, numbers in enumerate((times, near)):
                expected = (numbers - numbers.mean()) / numbers.std()
                np.testing.assert_allclose(values[:, at], expected, rtol=0, atol=1e-2 if how == "log" else 1e-5)
