"""Scales and bins are chosen for all numeric columns together. They are the same in every format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.data import Batch, Columns, Scale, open_dataset
from paceline.data.example_sampling import sample_batch, sample_examples
from paceline.data.key_scaling import KeyScaling, with_scales
from paceline.data.scales.numeric_features import (
    NumericFeature,
    candidate_scales,
    explain_features,
    find_numeric_features,
)
from paceline.data.scales.scaling import ColumnScaling
from paceline.kernels.hashing import name_seed
from paceline.models.fm import FactorModel
from paceline.models.registry import make_model
from paceline.training.files.data_files import resolve_files, sample_data
from paceline.training.files.describing import describe_data
from paceline.training.files.numeric_scales import choose_key_scaling, scale_columns
from paceline.training.options import TrainOptions
from paceline.training.tuning import scale_trial
from paceline.training.tuning.scale_trial import best_scaling, is_worse_for_factors
from paceline.training.tuning.trial import Split, held_out_splits

RANDOM = np.random.default_rng(7)


def examples(x: Any, labels: Any) -> Batch:
    """Return rows of numbered features without the zeros."""
    row, column = np.nonzero(x)
    indptr = np.cumsum([0, *np.bincount(row, minlength=len(x))])
    return Batch(labels.astype(np.float32), indptr, column.astype(np.uint64), x[row, column].astype(np.float32))


def curved_data(n: int = 1500) -> tuple[Any, Any]:
    """Return rows of two numbers and a mark with two values, and labels. The first number has a nonlinear effect."""
    x = np.column_stack([RANDOM.normal(size=(n, 2)), RANDOM.integers(1, 3, n)])
    return x, RANDOM.random(n) < 1 / (1 + np.exp(3 - 3 * x[:, 0] ** 2 - x[:, 1]))


def test_numeric_features() -> None:
    """A numeric feature has three or more values and occurs in at least a tenth of the rows."""
    x, labels = curved_data(400)
    x = np.column_stack([x, np.where(np.arange(400) % 4, 0, x[:, 0]), np.where(np.arange(400) % 40, 0, x[:, 0])])
    batch = examples(x, labels)
    found = find_numeric_features(batch, absent_is_zero=True)
    assert [entry.key for entry in found] == [0, 1, 3]
    assert found[2].numbers == pytest.approx(x[:, 3])
    present = find_numeric_features(batch, absent_is_zero=False)
    assert [(entry.key, len(entry.numbers)) for entry in present] == [(0, 400), (1, 400), (3, 100)]
    assert present[2].labels.tolist() == labels[::4].tolist()
    assert find_numeric_features(Batch(batch.labels, batch.indptr, batch.keys), absent_is_zero=True) == []
    words = RANDOM.permuted(np.tile(np.arange(900) < 8, (400, 1)), axis=1)  # words that nearly all rows lack
    found = find_numeric_features(examples(np.column_stack([x, words]), labels), absent_is_zero=True)
    assert [entry.key for entry in found] == [0, 1]


def test_the_first_candidate_has_the_usual_scales_and_candidates_are_distinct() -> None:
    x, labels = curved_data()
    features = [NumericFeature(key, None, x[:, key], labels.astype(np.float64)) for key in (0, 1)]
    found = candidate_scales(explain_features(features))
    assert [bool(scale.edges) for scale in found[0]] == [True, False]
    assert len(set(found)) == len(found)
    assert (8, 8) in [tuple(len(scale.edges) + 1 for scale in scales) for scales in found]
    assert not any(scale.edges for scale in found[-1])
    unlabelled = [NumericFeature(0, None, x[:, 0], np.arange(1500.0) % 3)]  # labels of classes or counts
    assert not candidate_scales(explain_features(unlabelled))[0][0].edges


def test_scales_of_other_features_are_unchanged() -> None:
    before = KeyScaling(np.array([0, 1], np.uint64), np.array([3.0, 0.0]), np.array([2.0, 4.0]), 8.0)
    features = [NumericFeature(key, None, RANDOM.normal(size=50), np.zeros(50)) for key in (0, 1, 5)]
    scales = [Scale(0, 7, 7), Scale(0, 0, 0, 1.0, (-1.0, 1.0)), Scale(2.0, 0.5, 1.5)]
    assert with_scales(before, features, scales[:1] * 3, absent_is_zero=True) is before
    found = with_scales(before, features, scales, absent_is_zero=True)
    assert found is not None
    assert found.other_scale == 8.0
    assert (found.means.tolist(), found.scales.tolist()) == ([3.0, 0.0, 0.5], [2.0, 1.0, 1.5])
    assert found.edges == {1: (0.0, 2.0)}  # the centre is subtracted from the edges
    assert found.filled is not None
    assert found.filled.tolist() == [True, True, True]


def test_column_scaling_returns_scaled_rows_and_does_not_change_the_argument() -> None:
    key = np.array([name_seed("a")], np.uint64)
    batch = Batch(np.zeros(1, np.float32), np.array([0, 1]), key, np.array([3.0], np.float32))  # 5 - centre
    scaling = ColumnScaling(["a"], [2.0], [Scale(0.0, 1.0, 8.0, 2.0)])
    values = scaling.apply(batch).values
    assert values is not None
    assert values.tolist() == [0.5]
    assert batch.values is not None
    assert batch.values.tolist() == [3.0]


def test_the_trial_prefers_the_usual_scale_unless_another_is_clearly_better() -> None:
    x, labels = curved_data()
    sample = sample_batch(examples(x, labels))
    edges = np.quantile(x[:, 0], np.arange(1, 16) / 16).astype(np.float32).tolist()
    bins = KeyScaling(np.array([0], np.uint64), np.zeros(1), np.ones(1), 1.0, edges={0: tuple(edges)})
    assert best_scaling(sample, [None, bins]) == 1
    assert best_scaling(sample, [bins, None]) == 0
    noise = sample_batch(examples(x, RANDOM.random(len(x)) < 0.5))
    assert best_scaling(noise, [None, bins]) == 0


def test_options_for_the_scale_of_numbered_features() -> None:
    x, labels = curved_data()
    sample = sample_batch(examples(x, labels))
    chosen = choose_key_scaling(sample, "auto", absent_is_zero=True)
    assert chosen is not None
    assert [*chosen.edges] == [0]
    for how, num_bins in (("standard", 0), ("log", 0), ("quantile:4", 2)):
        found = choose_key_scaling(sample, how, absent_is_zero=True)
        assert found is not None
        assert (len(found.edges), found.is_linear) == (num_bins, how == "standard")


def write(path: Path, lines: Sequence[str]) -> str:
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_equal_numbers_get_equal_bins_in_every_format(tmp_path: Path) -> None:
    """The description uses the names of the features."""
    x, labels = curved_data()
    rows = [[f"{value:.6g}" for value in row] for row in x[:, :2].tolist()]
    y = labels.astype(int).tolist()
    csv = write(tmp_path / "x.csv", ["label,a,b", *(f"{label},{a},{b}" for label, (a, b) in zip(y, rows, strict=True))])
    vw = write(tmp_path / "x.vw", [f"{label or -1} |n a:{a} b:{b}" for label, (a, b) in zip(y, rows, strict=True)])
    objects = [{"label": label, "n": {"a": float(a), "b": float(b)}} for label, (a, b) in zip(y, rows, strict=True)]
    jsonl = write(tmp_path / "x.jsonl", list(map(json.dumps, objects)))
    columns = sample_data([csv]).columns
    assert columns is not None
    assert [len(scale.edges) > 6 for scale in columns.scales] == [True, False]
    for path, name in ((vw, "n^a"), (jsonl, "n.a")):
        (found,) = describe_data([path])["bent_features"]
        assert (found["name"], found["scale"]) == (name, columns.scales[0].describe())
        assert describe_data([path], numeric_scale="none")["bent_features"] == []


@pytest.mark.thorough
def test_a_factorization_machine_uses_numbers_if_pairs_explain_more_than_bins() -> None:
    x, labels = curved_data()
    edges = dict.fromkeys((0, 1), tuple(np.linspace(-2, 2, 30).astype(np.float32).tolist()))
    bins = KeyScaling(np.arange(2, dtype=np.uint64), np.zeros(2), np.ones(2), 1.0, edges=edges)
    model = make_model("fm")
    assert isinstance(model, FactorModel)
    products = RANDOM.random(1500) < 1 / (1 + np.exp(-3 * x[:, 0] * x[:, 1]))
    assert is_worse_for_factors(model, sample_batch(examples(x, products)), bins, None)
    sample = sample_batch(examples(x, labels))
    assert not is_worse_for_factors(model, sample, bins, None)
    found = choose_key_scaling(sample, "auto", absent_is_zero=True, model=model)
    assert found is not None
    assert found.edges


def test_scales_are_tried_on_examples_from_all_parts_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial of scales holds out mixed examples, even of sorted data."""
    x, labels = curved_data()
    held_out: list[bool] = []

    def split(batch: Batch, *, is_mixed: bool) -> Iterator[Split]:
        held_out.append(is_mixed)
        return held_out_splits(batch, is_mixed=is_mixed)

    monkeypatch.setattr(scale_trial, "held_out_splits", split)
    best_scaling(sample_batch(examples(x, labels)), [None, None])
    best_scaling(sample_batch(examples(np.sort(x, axis=0), np.sort(labels))), [None, None])
    assert held_out == [True, True]


@pytest.mark.parametrize(
    ("format", "model"),
    [
        ("csv", "lr"),
        pytest.param("csv", "poisson", marks=pytest.mark.thorough),
        pytest.param("parquet", "lr", marks=pytest.mark.thorough),
        ("parquet", "poisson"),
    ],
)
def test_the_sample_of_the_scales_is_the_training_sample(tmp_path: Path, format: str, model: str) -> None:
    """The samples are equal bit by bit: with bins, numbers far from 0, missing numbers, words and weights."""
    x, labels = curved_data()
    rows = zip(labels.astype(int).tolist(), x.tolist(), strict=True)
    lines = [
        f"{label},{a:.6g},{1.7e9 + 100 * b},{'' if i % 7 == 0 else mark},c{i % 5},red fox {i % 40} runs off,{i % 3 + 1}"
        for i, (label, (a, b, mark)) in enumerate(rows)
    ]
    path = Path(write(tmp_path / "x.csv", ["label,a,time,mark,kind,says,w", *lines]))
    if format == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow.csv"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.read_csv(path), path := tmp_path / "x.parquet")
    for numeric in (("a", "time", "mark"), ("a",)):
        columns = Columns("label", ("kind",), numeric, weight="w", text=("says",))
        options, sampled = resolve_files(TrainOptions(data=[path], columns=columns, model=make_model(model)))
        assert sampled.examples is not None
        assert options.columns is not None
        assert any(scale.edges for scale in options.columns.scales)
        kept = sampled.examples.batch.copy()
        labels_read_as = options.model.read_labels_as
        with open_dataset(options.data, options.format, options.columns, labels=labels_read_as) as dataset:
            read = sample_examples(dataset)
        found = scale_columns(sampled.examples, options.columns, labels_read_as)
        assert (found.num_examples, found.is_whole, found.num_read) == (read.num_examples, read.is_whole, read.num_read)
        for name in ("labels", "indptr", "keys", "values", "weights", "fields"):
            for one, other in ((found.batch, read.batch), (sampled.examples.batch, kept)):
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name), strict=True)
