"""A sketch counts features: never too few, rarely too many. Only features with a sufficient count are learned."""

from __future__ import annotations

from math import comb

import numpy as np
import numpy.typing as npt
import pytest

from paceline.data import Batch
from paceline.errors import UsageError
from paceline.kernels.features.sketch import BLOCK, DEPTH, MASKS, count_occurrences
from paceline.models.base import BIAS_KEY, KeyScratch
from paceline.models.features.counting import FeatureCounts, FrequentFeatures
from paceline.models.registry import make_model, read_model_settings
from paceline.tables.types import Floats, Keys

Sketch = dict[int, Floats]
ENOUGH = 1 << 20


def rows_of(sketch: Sketch, blocks: Keys) -> Floats:
    return np.array([sketch.get(block, np.zeros(BLOCK)) for block in blocks.tolist()], np.float32).reshape(-1, BLOCK)


def push(sketch: Sketch, features: Keys, num_cells: int, times: npt.NDArray[np.int64], enough: int = ENOUGH) -> None:
    """Add the occurrences of features to the sketch, as a server's table does."""
    counted = FeatureCounts(features, num_cells, FrequentFeatures())
    blocks, added = counted.added(rows_of(sketch, counted.blocks), times, enough)
    for block, more in zip(blocks.tolist(), added, strict=True):
        sketch[block] = sketch.get(block, np.zeros(BLOCK)) + more


def estimates(sketch: Sketch, features: Keys, num_cells: int) -> npt.NDArray[np.int64]:
    """Return the counts of features that the sketch gives."""
    counted = FeatureCounts(features, num_cells, FrequentFeatures())
    none, found = np.zeros(len(features), np.int64), np.zeros(len(features), np.int64)
    for times in range(1, 100):
        found[counted.have_occurred(rows_of(sketch, counted.blocks), none, times)] = times
        counted = FeatureCounts(features, num_cells, FrequentFeatures())
    return found


def test_counts_are_never_too_small_and_seldom_too_large() -> None:
    random, num_cells, sketch = np.random.default_rng(0), 1 << 14, Sketch()
    features = random.integers(0, 2**64, 2000, np.uint64)
    times = random.geometric(0.2, len(features))
    for part in np.array_split(np.arange(len(features)), 50):
        push(sketch, features[part], num_cells, times[part])
    found = estimates(sketch, features, num_cells)
    assert (found >= times).all()
    # A count is too large if all its cells are shared with other features of the block.
    collisions = len(features) * BLOCK / num_cells
    assert np.mean(found > times) < 1.5 * (1 - (1 - DEPTH / BLOCK) ** collisions) ** DEPTH
    assert max(sketch) < num_cells // BLOCK
    assert len(FeatureCounts(features[:0], num_cells, FrequentFeatures()).blocks) == 0
    assert len({*MASKS.tolist()}) == len(MASKS) == comb(BLOCK, DEPTH)
    assert {int(mask).bit_count() for mask in MASKS} == {DEPTH}


def test_counts_stop_at_the_limit() -> None:
    """A cell at the limit is not increased. A block without cells below the limit is not pushed."""
    sketch, feature = Sketch(), np.array([7], np.uint64)
    for _ in range(5):
        push(sketch, feature, 1 << 16, np.array([2]), enough=5)
    assert sorted(next(iter(sketch.values())).tolist()) == [0] * (BLOCK - DEPTH) + [6] * DEPTH
    counted = FeatureCounts(feature, 1 << 16, FrequentFeatures())
    assert len(counted.added(rows_of(sketch, counted.blocks), np.array([2]), 5)[0]) == 0
    assert len(counted.added(rows_of(sketch, counted.blocks), np.array([2]), 7)[0]) == 1


def test_several_features_of_one_block() -> None:
    """A cell that several features share counts all of these features, and each block is pushed once."""
    features = np.arange(50, dtype=np.uint64)
    counted = FeatureCounts(features, 16, FrequentFeatures())
    assert sorted(counted.blocks.tolist()) == [0, 1]
    sketch = Sketch()
    push(sketch, features, 16, np.ones(50, np.int64))
    assert sum(float(row.sum()) for row in sketch.values()) == 50 * DEPTH


def test_counts_of_known_frequent_features_are_not_requested() -> None:
    sketch, known = Sketch(), FrequentFeatures()
    features = np.arange(200, dtype=np.uint64)  # includes 0, the value of empty slots
    times = np.where(features < 150, 3, 1)
    first = FeatureCounts(features, 1 << 20, known)
    assert first.have_occurred(rows_of(sketch, first.blocks), times, 2).tolist() == [True] * 150 + [False] * 50
    push(sketch, features, 1 << 20, times)
    second = FeatureCounts(features, 1 << 20, known)
    assert len(second.blocks) <= 60 < len(first.blocks)
    none = np.zeros(200, np.int64)
    found = second.have_occurred(rows_of(sketch, second.blocks), none, 2)
    assert found.tolist() == [True] * 150 + [False] * 50
    assert len(FeatureCounts(np.zeros(1, np.uint64), 8, FrequentFeatures()).blocks) == 1


def test_count_occurrences() -> None:
    out = np.full(4, 9, np.int64)
    count_occurrences(np.array([1, 1, 3, 1], np.int32), out)
    assert out.tolist() == [0, 3, 0, 1]


def test_only_frequent_features_are_learned() -> None:
    """Features 5 and 6 occur twice in the minibatch. Feature 7 occurs once in it and once before it."""
    model = make_model("lr", min_count=2, count_cells=1 << 16)
    keys = np.array([5, 6, 5, 7, 6, 8], np.uint64)
    batch = Batch(np.array([1, 0, 1], np.float32), np.array([0, 2, 4, 6]), keys)
    sketch = Sketch()
    push(sketch, np.array([7], np.uint64), 1 << 16, np.ones(1, np.int64))
    for is_first_pass, learned in ((True, {5, 6, 7}), (False, set())):
        minibatch = model.prepare_training(batch, KeyScratch(), is_first_pass=is_first_pass)
        assert len(minibatch.keys) == len(model.tables) == 2
        counts = rows_of(sketch, minibatch.keys[1])
        gradients, _ = minibatch.gradients([np.zeros((len(minibatch.keys[0]), 1), np.float32), counts])
        assert set(minibatch.gradient_keys[0].tolist()) == learned | {int(BIAS_KEY)}
        assert [len(gradient) for gradient in gradients] == [len(keys) for keys in minibatch.gradient_keys]
        # SGD, the rule of this table, subtracts gradients.
        assert -float(gradients[1].sum()) == (DEPTH * len(keys) if is_first_pass else 0)
    assert len(model.prepare(batch, KeyScratch()).keys) == 1  # predictions need no counts


def test_a_factorization_machine_learns_only_frequent_features() -> None:
    model = make_model("fm", min_count=2, factor_min_count=0)
    batch = Batch(np.ones(2, np.float32), np.array([0, 2, 4]), np.array([5, 6, 5, 7], np.uint64))
    minibatch = model.prepare_training(batch, KeyScratch(), is_first_pass=True)
    weights = [
        np.ones((len(keys), table.dim), np.float32)
        for keys, table in zip(minibatch.keys[:-1], model.tables, strict=False)
    ]
    gradients, _ = minibatch.gradients([*weights, np.zeros((len(minibatch.keys[-1]), BLOCK), np.float32)])
    assert [keys.tolist() for keys in minibatch.gradient_keys[:2]] == [[5, int(BIAS_KEY)], [5]]
    assert gradients[1].shape == (1, 8)


def test_settings_of_counts() -> None:
    model = make_model("lr", min_count=3)
    assert read_model_settings(model.describe()) == model
    assert "min_count" not in make_model("lr").describe()
    for wrong in ({"min_count": 0}, {"min_count": 1 << 30}, {"min_count": 2, "count_cells": 0}):
        with pytest.raises(UsageError, match=r"--min-count .*: expected 1 to|--count-cells 0: expected 1 to"):
            make_model("lr", **wrong)
