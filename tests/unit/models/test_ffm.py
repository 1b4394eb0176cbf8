"""The field-aware factorization machine: fields of features, and data that no linear model can learn."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.unit.models.training import train

from paceline.data import Batch, Columns
from paceline.errors import DataError, UsageError
from paceline.kernels.hashing import field_of, name_seed
from paceline.models.base import KeyScratch
from paceline.models.features.interactions import Interactions
from paceline.models.features.layout import RowLayout
from paceline.models.ffm import FieldAwareMachine
from paceline.models.metrics import auc
from paceline.models.registry import read_model_settings
from paceline.ps import FTRL

LAYOUT = RowLayout(categorical=("a", "b"), numeric=("x", "y", "z"))


def test_columns_of_the_pairs_of_a_row() -> None:
    """A missing number has no pair of key and value in the row."""
    x, y, z = (name_seed(name) for name in LAYOUT.numeric)
    keys = np.array([7, 8, x, y, z, 7, 9, z, 6, 8, x, z], np.uint64)
    batch = Batch(np.zeros(3, np.float32), np.array([0, 5, 8, 12]), keys, np.ones(12, np.float32))
    assert LAYOUT.fields_of(batch).tolist() == [0, 1, 2, 3, 4, 0, 1, 4, 0, 1, 2, 4]
    assert len(LAYOUT) == 5
    assert RowLayout.of_data("csv", Columns("l", ("a", "b"), ("x", "y", "z"))) == LAYOUT


@pytest.mark.parametrize("lengths", [(3, 2), (2, 1)])
def test_rows_with_lists_are_rejected(lengths: tuple[int, int]) -> None:
    """Some row has several values of a category, or none."""
    indptr = np.cumsum([0, *lengths])
    batch = Batch(np.zeros(2, np.float32), indptr, np.arange(indptr[-1], dtype=np.uint64))
    for layout in (LAYOUT, RowLayout(categorical=("a", "b"))):
        with pytest.raises(DataError, match="several values of a category, or none"):
            layout.fields_of(batch)


def test_rows_with_a_field_for_every_feature() -> None:
    batch = Batch(np.zeros(2, np.float32), np.array([0, 4, 5]), np.arange(5, dtype=np.uint64))
    batch.fields = np.array([field_of(name) for name in ("b", "a", "b", "new", "a")], np.uint32)
    for layout in (RowLayout(categorical=("a", "b"), is_open=True), RowLayout(categorical=("a",), numeric=("b",))):
        known = batch if layout.is_open else batch.slice(1, 2)
        assert layout.fields_of(known).tolist() == ([1, 0, 1, 2, 0] if layout.is_open else [0])
    with pytest.raises(DataError, match="of a column that the model lacks"):
        RowLayout(categorical=("a", "b")).fields_of(batch)
    with pytest.raises(DataError, match="Convert the data again"):
        RowLayout(categorical=("a", "b"), is_open=True).fields_of(Batch(batch.labels, batch.indptr, batch.keys))


@pytest.mark.parametrize("kind", ["ffm", "deepfm"])
def test_a_field_with_several_features(kind: str) -> None:
    """ffm uses all pairs of features, also pairs within a field. Deep models use the sum of a field's features."""
    layout = RowLayout(categorical=("a", "b"), is_open=True)
    batch = Batch(np.zeros(1, np.float32), np.array([0, 3]), np.array([5, 6, 7], np.uint64), np.array([1, 2, 3], "f4"))
    batch.fields = np.array([field_of(name) for name in "baa"], np.uint32)
    random = np.random.default_rng(0)
    fields, values = [1, 0, 0], [1.0, 2.0, 3.0]
    if kind == "deepfm":
        pytest.importorskip("torch")
        from paceline.models.deep.base import ColumnSums

        factors = random.normal(size=(3, 4)).astype(np.float32)
        sums = ColumnSums(layout, batch, np.arange(3, dtype=np.int32), batch.values).sums(factors)  # type: ignore[arg-type]
        np.testing.assert_allclose(sums[0], [2 * factors[1] + 3 * factors[2], factors[0], np.zeros(4)], rtol=1e-6)
        return
    model = FieldAwareMachine(layout=layout, dim=2, factor_min_count=0)
    weights = [random.normal(size=shape).astype(np.float32) for shape in ((4, 1), (3, 6), (3, 1))]
    weights[2][:] = 1
    minibatch = model.prepare(batch, KeyScratch())
    v = weights[1].reshape(3, 3, 2)
    expected = weights[0][3, 0] + sum(weights[0][k, 0] * values[k] for k in range(3))
    expected += sum(
        v[k, fields[m]] @ v[m, fields[k]] * values[k] * values[m] for k in range(3) for m in range(k + 1, 3)
    )
    assert minibatch.predict(weights)[0] == pytest.approx(1 / (1 + np.exp(-expected)), rel=1e-5)


def make_pairs(seed: int, n: int = 8000, num_values: int = 6) -> Batch:
    """Return examples of two categories. The label depends only on the pair of categories."""
    rng = np.random.default_rng(seed)
    categories = rng.integers(0, num_values, (n, 2))
    labels = rng.random(n) < np.where(categories.sum(axis=1) % 2 == 0, 0.8, 0.2)
    categories[:, 1] += num_values
    indptr = np.arange(0, 2 * n + 1, 2, dtype=np.int64)
    return Batch(labels.astype(np.float32), indptr, categories.reshape(-1).astype(np.uint64))


def test_effects_of_pairs_are_learned() -> None:
    model = FieldAwareMachine(
        layout=RowLayout(categorical=("a", "b")), factor_lr=0.1, factor_l2=0.0, factor_std=0.1, factor_min_count=0
    )
    unseen = make_pairs(1)
    found, stores = train(model, make_pairs(0), FTRL(alpha=0.1, l1=0.0), epochs=6, unseen=unseen)
    assert auc(unseen.labels, found) > 0.77  # the true probabilities reach 0.8
    assert [store.dim for store in stores] == [1, 2 * 4, 1]


def test_settings() -> None:
    model = FieldAwareMachine().of_columns("criteo", None)
    assert model.parameter_tables[1].dim == 39 * model.dim
    assert read_model_settings(json.loads(json.dumps(model.describe()))) == model.with_defaults()
    with pytest.raises(UsageError, match=r"libsvm has none.*--model fm"):
        FieldAwareMachine().of_columns("libsvm", None)
    layout = FieldAwareMachine().of_columns("vw", None, ("a", "b")).layout
    assert layout is not None
    assert len(layout) == 3  # and a field for unknown fields
    for fields in (("a", "b"), ()):
        with pytest.raises(UsageError, match=r"jsonl has none.*--model fm"):
            FieldAwareMachine().of_columns("jsonl", Columns("y", fields, is_open=True))
    with pytest.raises(UsageError, match="crosses all columns"):
        FieldAwareMachine(interactions=Interactions(text="a:b"))
    with pytest.raises(UsageError, match="for 200 columns: expected at most"):
        FieldAwareMachine(dim=1024, layout=RowLayout(categorical=tuple(map(str, range(200)))))
