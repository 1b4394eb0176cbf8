"""Minibatches kept in memory equal the minibatches of the file. They stay within a limit of memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from paceline.data import Batch, ClickLogSpec, Dataset, open_dataset, write_click_log
from paceline.errors import DataError
from paceline.models.base import KeyScratch, SparseModel
from paceline.models.registry import make_model
from paceline.protocol.jobs import Lease
from paceline.training.weighting import Weighting
from paceline.training.worker.jobs import WorkerTask
from paceline.training.worker.prepared import PreparedShards

EPOCHS = 3
SHARD_BYTES = 1 << 16


@dataclasses.dataclass
class Log:
    """A log of several shards, and the number of shards read from the disk."""

    path: Path
    dataset: Dataset
    num_read: int = 0


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    write_click_log(tmp_path / "log", ClickLogSpec(rows=1500))
    with open_dataset(tmp_path / "log", shard_bytes=SHARD_BYTES) as dataset:
        log = Log(tmp_path / "log", dataset)
        read = dataset.read

        def counted(file: int, shard: int, batch_size: int) -> Iterator[Batch]:
            log.num_read += 1
            return read(file, shard, batch_size)

        monkeypatch.setattr(dataset, "read", counted)
        yield log


def read_pass(shards: PreparedShards, log: Log, epoch: int, job: WorkerTask, model: SparseModel) -> list[bytes]:
    """Return the minibatches of a pass with their gradients."""
    found, scratch = [], KeyScratch()
    shards.begin(job, model)
    for shard in range(log.dataset.num_shards(0) or 0):
        lease = Lease(lease=shard, epoch=epoch, file=0, shard=shard, num_shards=log.dataset.num_shards(0) or 0)
        for minibatch, num_read in shards.read(job, model, log.dataset, lease, scratch):
            weights = [np.linspace(-1, 1, len(keys), dtype=np.float32)[:, np.newaxis] for keys in minibatch.keys]
            [gradient], loss = minibatch.gradients(weights)
            found.append(minibatch.keys[0].tobytes() + gradient.tobytes() + repr((num_read, loss)).encode())
    return found


def make_job(log: Log, **changes: object) -> WorkerTask:
    job = WorkerTask(
        task="train",
        model={},
        dataset=log.dataset.spec(),
        batch_size=64,
        update={},
        consistency="bounded:4",
        epochs=EPOCHS,
    )
    return msgspec.structs.replace(job, **changes)


def test_later_passes_have_the_same_minibatches_without_reads(log: Log) -> None:
    shards, job, model = PreparedShards(), make_job(log), make_model("lr")
    first = read_pass(shards, log, 0, job, model)
    num_shards = log.dataset.num_shards(0)
    assert num_shards is not None
    assert num_shards > 3
    assert len(first) > num_shards
    assert log.num_read == num_shards
    assert read_pass(shards, log, 1, job, model) == first
    assert read_pass(shards, log, 2, job, model) == first
    assert log.num_read == num_shards


def test_the_first_shards_are_kept_up_to_the_limit(log: Log) -> None:
    shards, job, model = PreparedShards(500_000), make_job(log), make_model("lr")
    first = read_pass(shards, log, 0, job, model)
    num_first = log.num_read
    taken = shards.num_bytes
    assert 0 < taken <= 500_000
    assert read_pass(shards, log, 1, job, model) == first
    assert 0 < log.num_read - num_first < num_first
    assert shards.num_bytes == taken


@pytest.mark.parametrize("changes", [{"epochs": 1}, {"weighting": Weighting(keep_negatives=0.5)}])
def test_minibatches_that_change_in_later_passes_are_not_kept(log: Log, changes: dict[str, object]) -> None:
    shards = PreparedShards()
    read_pass(shards, log, 0, make_job(log, **changes), make_model("lr"))
    assert shards.num_bytes == 0


@pytest.mark.parametrize("changes", [{"batch_size": 32}, {"weighting": Weighting(classes={"1": 3.0})}])
def test_minibatches_with_other_settings_are_read_again(log: Log, changes: dict[str, object]) -> None:
    shards, model, job = PreparedShards(), make_model("lr"), make_job(log, **changes)
    before = read_pass(shards, log, 0, make_job(log), model)
    num_first = log.num_read
    after = read_pass(shards, log, 1, job, model)
    assert log.num_read == 2 * num_first
    assert after == read_pass(PreparedShards(), log, 1, job, model) != before


def test_a_changing_file_is_an_error(log: Log) -> None:
    shards, job, model = PreparedShards(), make_job(log), make_model("lr")
    read_pass(shards, log, 0, job, model)
    log.path.write_bytes(log.path.read_bytes() + b"\n")
    with pytest.raises(DataError, match="has changed"):
        read_pass(shards, log, 1, job, model)


def test_a_shuffled_training_reads_the_same_rows_in_another_order(log: Log) -> None:
    """The last pass has the order of the file. The other passes share one shuffled order."""
    shards, model, num_shards = PreparedShards(), make_model("lr"), log.dataset.num_shards(0) or 0
    in_order = read_pass(PreparedShards(), log, 0, make_job(log), model)
    num_before, job = log.num_read, make_job(log, is_shuffled=True)
    passes = [read_pass(shards, log, epoch, job, model) for epoch in range(EPOCHS)]
    assert log.num_read == num_before + 2 * num_shards
    assert passes[0] == passes[1]
    assert len(passes[0]) == len(in_order)
    assert not set(passes[0]) & set(in_order)
    assert passes[2] == in_order


@pytest.mark.parametrize("keep", [1.0, 0.3])
def test_shuffled_minibatches_count_all_rows(log: Log, keep: float) -> None:
    job, model = make_job(log, is_shuffled=True, weighting=Weighting(keep_negatives=keep)), make_model("lr")
    shards, counts = PreparedShards(), []
    shards.begin(job, model)
    for epoch in range(2):
        leases = [
            Lease(lease=shard, epoch=epoch, file=0, shard=shard, num_shards=log.dataset.num_shards(0) or 0)
            for shard in range(log.dataset.num_shards(0) or 0)
        ]
        found = [
            num_read for lease in leases for _, num_read in shards.read(job, model, log.dataset, lease, KeyScratch())
        ]
        counts.append(sum(found))
    assert counts == [1500, 1500]


@pytest.mark.parametrize("reordered", [(1,), (2,)])
def test_a_started_pass_keeps_the_order(log: Log, reordered: tuple[int, ...]) -> None:
    """If a resumed pass has the other order, it does not use the minibatches in memory."""
    model = make_model("lr")
    in_order = read_pass(PreparedShards(), log, 0, make_job(log), model)
    shuffled = read_pass(PreparedShards(), log, 0, make_job(log, is_shuffled=True), model)
    shards, job = PreparedShards(), make_job(log, is_shuffled=True, reordered=reordered)
    passes = [read_pass(shards, log, epoch, job, model) for epoch in range(EPOCHS)]
    expected = [shuffled, in_order, in_order] if reordered == (1,) else [shuffled] * 3
    assert passes == expected
