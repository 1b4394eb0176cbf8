"""Numeric columns in bins: the edges, the choice of bins, and equal bins in all readers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.data import Batch, Columns, Scale, check_numeric_scale, fit_scale, open_dataset
from paceline.data.formats import FORMATS
from paceline.data.scales.bins import ColumnBins, Doubles, bin_key, bin_names, bins_of, log_edges, quantile_edges
from paceline.errors import UsageError
from paceline.inference.frames import ColumnReader
from paceline.kernels.hashing import field_of, name_seed
from paceline.kernels.text.criteo import integer_category
from paceline.models.features.interactions import Interactions
from paceline.training.files.converting import convert_data, sample_sources
from paceline.training.files.data_files import sample_data
from paceline.training.files.describing import describe_data

RANDOM = np.random.default_rng(3)
NUMBERS = RANDOM.normal(size=4000)


def labels_of(effect: Doubles) -> Doubles:
    return (np.random.default_rng(5).random(len(effect)) < 1 / (1 + np.exp(-effect))).astype(np.float64)


def test_quantiles() -> None:
    edges = quantile_edges(NUMBERS, 8)
    counts = np.bincount(bins_of(NUMBERS, edges))
    assert len(counts) == 8
    assert counts.max() - counts.min() <= 2
    assert quantile_edges(np.array([0.0] * 90 + [1.0] * 10), 4) == ()
    assert quantile_edges(np.array([0.0] * 50 + [1.0] * 30 + [2.0] * 20), 4) == (1.0,)
    assert quantile_edges(np.array([5.0]), 4) == quantile_edges(np.empty(0), 4) == ()


def test_bins_of_logarithms_equal_the_criteo_bins() -> None:
    whole = np.arange(0, 3000, dtype=np.float64)
    found = bins_of(whole, log_edges(whole, 1.0))
    expected = np.array([integer_category(int(x)) for x in whole])
    np.testing.assert_array_equal(np.unique(expected, return_inverse=True)[1], found)
    both = log_edges(np.array([-20.5, 0.0, 20.5]), 1.0)
    assert [-edge for edge in reversed(both)] == pytest.approx(both)


@pytest.mark.parametrize(
    "effect", [lambda x: 3 * np.abs(x) - 2, lambda x: 2 * np.cos(3 * x), lambda x: np.sign(x**2 - 1)]
)
def test_nonlinear_effects_get_bins_and_linear_effects_none(effect) -> None:  # type: ignore[no-untyped-def]
    cells = list(map(repr, NUMBERS.tolist()))
    assert len(fit_scale(cells, "auto", labels_of(effect(NUMBERS))).edges) in (7, 15, 31)
    for straight in (NUMBERS, 0 * NUMBERS, -2 * NUMBERS):
        assert fit_scale(cells, "auto", labels_of(straight)).edges == ()
    few = slice(60)  # too few rows to estimate a rate for each bin
    assert fit_scale(cells[few], "auto", labels_of(effect(NUMBERS))[few]).edges == ()
    assert fit_scale(cells, "auto").edges == ()
    quantity = effect(NUMBERS) + np.random.default_rng(1).normal(size=len(NUMBERS))
    assert fit_scale(cells, "auto", quantity).edges


def test_names_and_descriptions_of_scales() -> None:
    for how in ("quantile:2", "quantile:1024", "log-bins"):
        check_numeric_scale(how)
    for how in ("quantile:1", "quantile:1025"):
        with pytest.raises(UsageError, match=f"'{how}': expected 2 to 1,024 bins"):
            check_numeric_scale(how)
    with pytest.raises(UsageError, match=r"or quantile:N$"):
        check_numeric_scale("quantile")
    scale = Scale(0.0, 0.0, 0.0, 100.0, (1.0, 2.5))
    assert Scale.from_fields(scale.to_fields()) == scale
    assert scale.describe() == "3 bins, below 101 to 102.5 and above"
    assert list(bin_names("x", scale.edges, 100.0).values()) == ["x=..101", "x=101..102.5", "x=102.5.."]
    assert fit_scale(["7"] * 30, "quantile:4") == fit_scale(["7"] * 30, "standard")


def test_the_kernel_equals_a_loop_in_python() -> None:
    """Rows of two categories and three numeric columns, one without bins; some numbers are missing."""
    numeric, edges = ("x", "y", "z"), ((0.0, 1.0), (), (-1.0,))
    keys, values, indptr, expected = [], [], [0], []
    for _ in range(60):
        row = [(int(key), 1.0, 0) for key in RANDOM.integers(0, 2**62, 2)]
        row += [(name_seed(n), float(np.float32(RANDOM.normal())), 1) for n in numeric if RANDOM.random() < 0.7]
        for place, (key, value, is_number) in enumerate(row):
            name = ("a", "b")[place] if not is_number else next(n for n in numeric if name_seed(n) == key)
            own = edges[numeric.index(name)] if is_number else ()
            is_binned = bool(own)
            made = bin_key(name, sum(edge <= value for edge in own)) if is_binned else key
            expected.append((made, 1.0 if is_binned else value, field_of(name)))
        keys += [key for key, _, _ in row]
        values += [value for _, value, _ in row]
        indptr.append(len(keys))
    batch = Batch(np.zeros(60, np.float32), np.array(indptr), np.array(keys, np.uint64), np.array(values, np.float32))
    found = ColumnBins(("a", "b"), numeric, edges).apply(batch)
    assert found.values is not None
    assert found.fields is not None
    pairs = zip(found.keys.tolist(), found.values.tolist(), found.fields.tolist(), strict=True)
    assert list(pairs) == expected


def test_readers_and_frames_make_the_same_bins(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    n = 600
    sizes = NUMBERS[:n].round(3)
    times = 1_764_000_000_000 + np.arange(n) * 7 % n * 100
    table: dict[str, list[Any]] = {
        "click": labels_of(6 * np.abs(sizes) - 4).astype(np.int64).tolist(),
        "site": [f"s{i % 3}" for i in range(n)],
        "size": [None if i % 50 == 0 else float(x) for i, x in enumerate(sizes)],
        "time": times.tolist(),
    }
    rows = zip(*table.values(), strict=True)
    lines = [",".join("" if cell is None else str(cell) for cell in row) for row in rows]
    (tmp_path / "x.csv").write_text("\n".join([",".join(table), *lines]) + "\n")
    parquet.write_table(arrow.table(table), tmp_path / "x.parquet")
    tags = [["a", "b"][: i % 3] for i in range(n)]
    parquet.write_table(arrow.table(table | {"tags": tags}), tmp_path / "tags.parquet")
    named = Columns("click", ("site",), ("size", "time"))
    convert_data(
        [str(tmp_path / "x.csv")],
        tmp_path / "x.out",
        sample_sources([str(tmp_path / "x.csv")], tmp_path / "x.out", format=None, columns=named),
    )
    assert sample_data([tmp_path / "x.csv"], columns=named).columns == sample_data([tmp_path / "x.out"]).columns
    for how in ("auto", "log-bins", "quantile:10"):
        columns = sample_data([tmp_path / "x.csv"], columns=named, numeric_scale=how).columns
        assert columns is not None
        assert columns.scales[0].edges
        assert Columns.from_fields(columns.to_fields()) == columns
        found = []
        for name in ("x.csv", "x.parquet", "x.out"):
            with open_dataset(tmp_path / name, columns=columns, cache_dir=tmp_path / "cache") as dataset:
                found.append(Batch.concatenate(list(dataset.batches(1000))))
                names = FORMATS[dataset.format].find_names(dataset.files, columns, found[-1].keys)
            assert sum(text.startswith("size=") for text in names.values()) == len(columns.scales[0].edges) + 1
        frame = {name: table[name] for name in ("site", "size", "time")}
        found.append(Batch.concatenate(list(ColumnReader(columns, from_text=False, is_known=None).batches(frame))))
        for batch in found[1:]:
            np.testing.assert_array_equal(batch.keys, found[0].keys)
            np.testing.assert_array_equal(batch.fields, found[0].fields)
        with_lists = replace(columns, categorical=("site", "tags"))
        with open_dataset(tmp_path / "tags.parquet", columns=with_lists) as dataset:
            batch = Batch.concatenate(list(dataset.batches(1000)))
        assert batch.fields is not None
        of_lists = batch.fields == field_of("tags")
        assert of_lists.sum() == sum(map(len, tags))
        np.testing.assert_array_equal(batch.keys[~of_lists], found[0].keys)
        crossed = Interactions(text="site:size").of_columns("csv", columns).apply(found[0])
        assert len(crossed.keys) == len(found[0].keys) + n - n // 50
        fitted = sample_data([tmp_path / "x.out"], columns=named, numeric_scale=how).columns
        assert fitted is not None
        assert fitted.scales[0].edges == pytest.approx(columns.scales[0].edges)
    described = describe_data([str(tmp_path / "x.csv")], columns=named)
    assert "bins" in next(column["scale"] for column in described["columns"] if column["name"] == "size")
    assert any((feature["column"] or "").startswith("time") for feature in described["first_row"]["features"])
