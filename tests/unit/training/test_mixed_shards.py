"""Minibatches mixed from several shards that are read at the same time."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from paceline.data import Dataset, open_dataset
from paceline.protocol.jobs import Lease
from paceline.training.weighting import Weighting
from paceline.training.worker.mixed_shards import MixedShards, leaping

ROWS = 4000


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7, 8, 64, 100, 1001])
def test_the_order_of_shards_has_every_shard_once(num_shards: int) -> None:
    for epoch in (0, 1, 5):
        assert sorted(leaping(i, num_shards, epoch) for i in range(num_shards)) == list(range(num_shards))


def test_successive_shards_are_far_apart() -> None:
    first = sorted(leaping(i, 100, 0) for i in range(8))
    assert max(np.diff([*first, first[0] + 100])) <= 25


def read_epoch(
    dataset: Dataset, epoch: int, num_shards: int, *, batch_size: int = 64
) -> tuple[list[np.ndarray], list[int]]:
    """Read an epoch like a worker; return the row numbers of each batch, and the leases in order of completion."""
    shards = MixedShards(dataset, Weighting(), batch_size, 8)
    leases = [Lease(lease=i, epoch=epoch, shard=i, num_shards=num_shards) for i in range(num_shards)]
    batches, ends = [], []
    while leases or shards:
        while leases and shards.has_room:
            shards.open(leases.pop(0))
        batch, num_read, ended = shards.next_batch()
        ends += [lease.lease for lease in ended]
        if batch is not None:
            assert num_read == batch.num_examples
            batches.append(batch.keys.copy())
    return batches, ends


def test_minibatches_have_examples_from_all_parts_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "x.svm"
    file.write_text("".join(f"{int(i >= ROWS / 2)} {i}:1\n" for i in range(ROWS)))
    with open_dataset(file, shard_bytes=1024) as dataset:
        num_shards = dataset.num_shards(0)
        assert num_shards is not None
        assert num_shards > 20
        batches, ends = read_epoch(dataset, 0, num_shards)
    assert sorted(np.concatenate(batches).tolist()) == list(range(ROWS))
    assert sorted(ends) == list(range(num_shards))
    whole = [batch for batch in batches if len(batch) >= 64]
    assert np.mean([0.2 < (batch >= ROWS / 2).mean() < 0.8 for batch in whole]) > 0.9


def test_shards_of_a_compressed_file_are_mixed_from_the_second_pass(tmp_path: Path) -> None:
    file = tmp_path / "x.svm.gz"
    file.write_bytes(gzip.compress("".join(f"{int(i >= ROWS / 2)} {i}:1\n" for i in range(ROWS)).encode()))
    with open_dataset(file, shard_bytes=1024, cache_dir=tmp_path / "cache") as dataset:
        assert dataset.is_cached
        num_shards = -(-len(gzip.decompress(file.read_bytes())) // 1024)
        first, _ = read_epoch(dataset, 0, num_shards)
        second, _ = read_epoch(dataset, 1, num_shards)
    assert np.concatenate(first).tolist() == list(range(ROWS))
    assert sorted(np.concatenate(second).tolist()) == list(range(ROWS))
    assert np.mean([0.2 < (batch >= ROWS / 2).mean() < 0.8 for batch in second if len(batch) >= 64]) > 0.9
