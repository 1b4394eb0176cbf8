"""The field-aware factorization machine: the columns of a row's features, and what no linear model can learn."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.unit.models.training import train

from paceline.data import Batch, Columns
from paceline.errors import DataError, UsageError
from paceline.kernels.text.reference import name_seed
from paceline.models.features.interactions import Interactions
from paceline.models.features.layout import RowLayout
from paceline.models.ffm import FieldAwareMachine
from paceline.models.metrics import auc
from paceline.models.registry import read_model_settings
from paceline.ps import FTRL

LAYOUT = RowLayout(categorical=("a", "b"), numeric=("x", "y", "z"))


def test_columns_of_pairs() -> None:
    """Numbers that are missing have no pair."""
    x, y, z = (name_seed(name) for name in LAYOUT.numeric)
    keys = np.array([7, 8, x, y, z, 7, 9, z, 6, 8, x, z], np.uint64)
    batch = Batch(np.zeros(3, np.float32), np.array([0, 5, 8, 12]), keys, np.ones(12, np.float32))
    assert LAYOUT.fields_of(batch).tolist() == [0, 1, 2, 3, 4, 0, 1, 4, 0, 1, 2, 4]
    assert len(LAYOUT) == 5
    assert RowLayout.of_data("csv", Columns("l", ("a", "b"), ("x", "y", "z"))) == LAYOUT


@pytest.mark.parametrize("lengths", [(3, 2), (2, 1)])
def test_rows_of_lists_are_refused(lengths: tuple[int, int]) -> None:
    """A row has more than one value of a category, or none."""
    indptr = np.cumsum([0, *lengths])
    batch = Batch(np.zeros(2, np.float32), indptr, np.arange(indptr[-1], dtype=np.uint64))
    for layout in (LAYOUT, RowLayout(categorical=("a", "b"))):
        with pytest.raises(DataError, match=r"as columns of lists do: .* take --model fm"):
            layout.fields_of(batch)


def make_pairs(seed: int, n: int = 8000, num_values: int = 6) -> Batch:
    """Examples of two categories, of which only the pair tells."""
    rng = np.random.default_rng(seed)
    categories = rng.integers(0, num_values, (n, 2))
    labels = rng.random(n) < np.where(categories.sum(axis=1) % 2 == 0, 0.8, 0.2)
    categories[:, 1] += num_values
    indptr = np.arange(0, 2 * n + 1, 2, dtype=np.int64)
    return Batch(labels.astype(np.float32), indptr, categories.reshape(-1).astype(np.uint64))


def test_pairs_are_learned() -> None:
    model = FieldAwareMachine(
        layout=RowLayout(categorical=("a", "b")), factor_lr=0.1, factor_l2=0.0, factor_std=0.1, factor_min_count=0
    )
    unseen = make_pairs(1)
    found, stores = train(model, make_pairs(0), FTRL(alpha=0.1, l1=0.0), epochs=6, unseen=unseen)
    assert auc(unseen.labels, found) > 0.77  # the truth's is 0.8
    assert [store.dim for store in stores] == [1, 2 * 4, 1]


def test_settings() -> None:
    model = FieldAwareMachine().of_columns("criteo", None)
    assert model.parameter_tables[1].dim == 39 * model.dim
    assert read_model_settings(json.loads(json.dumps(model.describe()))) == model
    with pytest.raises(UsageError, match="libsvm has none: take --model fm"):
        FieldAwareMachine().of_columns("libsvm", None)
    for fields in (("a", "b"), ()):  # of JSON lines, which stand in the order of each line
        with pytest.raises(UsageError, match="jsonl has none: take --model fm"):
            FieldAwareMachine().of_columns("jsonl", Columns("y", fields, is_open=True))
    with pytest.raises(UsageError, match="it crosses all columns"):
        FieldAwareMachine(interactions=Interactions(text="a:b"))
    with pytest.raises(UsageError, match="for 200 columns: expected at most"):
        FieldAwareMachine(dim=1024, layout=RowLayout(categorical=tuple(map(str, range(200)))))
