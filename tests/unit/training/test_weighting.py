"""Weights of classes, and sampling of negative examples."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.data import Batch
from paceline.errors import UsageError
from paceline.protocol.jobs import Lease
from paceline.training.weighting import Weighting, balance, parse_class_weights

N = 10_000


def make_batch(seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, N)
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    keys = np.repeat(np.arange(N), lengths).astype(np.uint64)
    return Batch((rng.random(N) < 0.1).astype(np.float32), indptr, keys, keys.astype(np.float32))


def apply(weighting: Weighting, batch: Batch, lease: Lease | None = None, size: int = 256) -> list[tuple[Batch, int]]:
    pieces = [batch.slice(start, min(start + 1000, N)) for start in range(0, N, 1000)]
    return list(weighting.apply(pieces, lease or Lease(lease=1), size))


def test_class_weights_multiply_row_weights() -> None:
    batch = make_batch()
    batch.weights = np.full(N, 2, np.float32)
    found = apply(Weighting(classes={"1": 5.0, "7": 3.0}), batch)
    assert [count for _, count in found] == [256] * 39 + [16]
    whole = Batch.concatenate([part for part, _ in found])
    assert whole.weights is not None
    assert np.array_equal(whole.labels, batch.labels)
    assert np.array_equal(whole.weights, np.where(batch.labels == 1, 10, 2))
    assert (batch.weights == 2).all()


def test_remaining_negatives_have_larger_weights() -> None:
    batch = make_batch()
    found = apply(Weighting(keep_negatives=0.2), batch)
    assert sum(count for _, count in found) == N
    assert {part.num_examples for part, _ in found[:-1]} == {256}
    ends = np.cumsum([count for _, count in found])[:-1] - 1  # a count ends with the last remaining example
    lasts = [part.keys[-1] for part, _ in found[:-1] if part.indptr[-2] < part.indptr[-1]]
    assert {int(key) for key in lasts} <= set(ends.tolist())
    assert len(lasts) > len(found) / 2
    whole = Batch.concatenate([part for part, _ in found])
    assert whole.labels.sum() == batch.labels.sum()
    assert whole.weights is not None
    assert set(whole.weights[whole.labels == 0].tolist()) == {5.0}
    assert set(whole.weights[whole.labels == 1].tolist()) == {1.0}
    assert whole.weights.sum() == pytest.approx(N, rel=0.06)
    assert whole.values is not None
    assert np.array_equal(whole.keys.astype(np.float32), whole.values)
    for row in range(whole.num_examples):  # the rows are complete
        keys = whole.keys[whole.indptr[row] : whole.indptr[row + 1]]
        if len(keys):
            original = int(keys[0])
            assert set(keys.tolist()) == {original}
            assert len(keys) == batch.indptr[original + 1] - batch.indptr[original]


def test_kept_negatives_depend_on_shard_and_pass() -> None:
    batch, weighting = make_batch(), Weighting(keep_negatives=0.5)

    def kept(**lease: int) -> bytes:
        return Batch.concatenate([part for part, _ in apply(weighting, batch, Lease(lease=9, **lease))]).keys.tobytes()

    assert kept() == kept()
    assert len({kept(), kept(epoch=1), kept(shard=1), kept(file=1)}) == 4


def test_batches_may_become_empty() -> None:
    """All examples are dropped, but the number of read examples is reported."""
    batch = make_batch()
    batch = Batch(np.zeros(N, np.float32), batch.indptr, batch.keys)
    found = apply(Weighting(keep_negatives=1e-9), batch)
    assert [(part.num_examples, count) for part, count in found] == [(0, N)]


def test_balanced_weights_of_classes() -> None:
    assert balance({0.0: 900, 1.0: 100}) == {"0": 1000 / 1800, "1": 5.0}
    assert balance({-1.0: 1, 16777215.0: 1}) == {"-1": 1.0, "16777215": 1.0}


def test_options_for_weights_are_parsed() -> None:
    assert parse_class_weights("balanced") == "balanced"
    assert parse_class_weights("0:1,1:5.5") == {"0": 1.0, "1": 5.5}
    assert parse_class_weights("-3:1,16777215:2") == {"-3": 1.0, "16777215": 2.0}
    for text in ("1", "1:", "a:1", "1:2,1:3", ""):
        with pytest.raises(UsageError, match="expected balanced, or the weight of each label as in 0:1,1:5"):
            parse_class_weights(text)
    with pytest.raises(UsageError, match="all labels have the weight 0"):
        Weighting(classes={"0": 0.0, "1": 0.0})
    with pytest.raises(UsageError, match=r"--class-weight 1:-1: expected a finite weight"):
        Weighting(classes={"1": -1.0})
    for share in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(UsageError, match="--keep-negatives"):
            Weighting(keep_negatives=share)
    assert Weighting().is_plain
    assert not Weighting(keep_negatives=0.5).is_plain
