"""The times of snapshots, and the data with which a training may be resumed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from paceline.data import open_dataset
from paceline.errors import DataError, UsageError
from paceline.models.registry import make_model
from paceline.protocol.jobs import DoneShards, JobAccount
from paceline.storage.format import SnapshotManifest
from paceline.storage.snapshot_directory import Snapshot
from paceline.training.options import PassOptions, TrainOptions
from paceline.training.plan import TrainingPlan
from paceline.training.planning import plan_training
from paceline.training.snapshots import Resumption, describe_training, parse_every


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("30s", (30.0, None)),
        ("250ms", (0.25, None)),
        ("5m", (300.0, None)),
        ("1.5h", (5400.0, None)),
        ("100000", (None, 100_000)),
        (" 1_000_000 ", (None, 1_000_000)),
    ],
)
def test_intervals_of_snapshots_are_parsed(text: str, meant: tuple[float | None, int | None]) -> None:
    assert parse_every(text) == meant


@pytest.mark.parametrize("text", ["", "s", "0", "0s", "-5s", "5 days", "1e5", "30S", "nan", "inf"])
def test_invalid_intervals_are_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="a time such as 30s, 5m or 1h, or a number of examples"):
        parse_every(text)


def test_the_data_must_be_the_same(tmp_path: Path) -> None:
    files = [tmp_path / "a.libsvm", tmp_path / "b.libsvm"]
    for file in files:
        file.write_text("1 3:1 5:1\n0 4:1\n")
    plan = plan_training(TrainOptions(data=files, epochs=2))
    with open_dataset(files, shard_bytes=10) as dataset:
        manifest = SnapshotManifest(
            number=7,
            full=True,
            iteration=12,
            tables=(),
            account=JobAccount(
                files=(2, 2), done=(DoneShards(epoch=0, file=1, shards=b"\x03"),), progress={"examples": 4.0}
            ),
            training=describe_training(dataset, plan, "sequential"),
        )
        resumption = Resumption(Snapshot(tmp_path, manifest))
        resumption.check_data(dataset)
        resumption.check_model(plan.model)
        assert resumption.num_passes == 0
        whole = (DoneShards(epoch=0, file=0, shards=b"\x03"), DoneShards(epoch=0, file=1, shards=b"\x03"))
        further = msgspec.structs.replace(manifest, account=JobAccount(files=(2, 2), done=whole))
        assert Resumption(Snapshot(tmp_path, further)).num_passes == 1
        for other in (make_model("fm", dim=4), make_model("regression")):
            with pytest.raises(UsageError, match=rf"has the model lr\(.*, not {other.name}\(.*the same model"):
                resumption.check_model(other)
        assert resumption.shard_bytes == 10
        assert resumption.describe().endswith("snapshot-000007: 2 of 8 shards done, 4 examples, iteration 12")
    with (
        open_dataset(files[::-1], shard_bytes=10) as dataset,
        pytest.raises(DataError, match=r"file 1 of its training was a.libsvm"),
    ):
        resumption.check_data(dataset)
    with open_dataset(files[:1], shard_bytes=10) as dataset, pytest.raises(DataError, match="on 2 files, not 1"):
        resumption.check_data(dataset)
    with open_dataset(files, shard_bytes=11) as dataset, pytest.raises(DataError, match="shard_bytes 10, not 11"):
        resumption.check_data(dataset)
    files[1].write_text("1 3:1\n")
    changed = r"file 2 of its training was b\.libsvm with 16 bytes, not b\.libsvm with 6 bytes"
    with open_dataset(files, shard_bytes=10) as dataset, pytest.raises(DataError, match=changed):
        resumption.check_data(dataset)
    with pytest.raises(UsageError, match="not written by"):
        Resumption(Snapshot(tmp_path, SnapshotManifest(
            number=7, full=True, iteration=None, tables=(),
        )))  # fmt: skip


@pytest.fixture
def started_training(tmp_path: Path) -> tuple[TrainOptions, SnapshotManifest]:
    """The options and the snapshot of a training that is resumed in the second of its 2 passes."""
    file = tmp_path / "a.libsvm"
    file.write_text("1 3:1 5:1\n0 4:1\n" * 50)
    options = TrainOptions(data=[file], epochs=2)
    with open_dataset([file], shard_bytes=100) as dataset:
        manifest = SnapshotManifest(
            number=1, full=True, iteration=None, tables=(),
            account=JobAccount(files=(8,), done=tuple(
                DoneShards(epoch=epoch, file=0, shards=shards) for epoch, shards in enumerate((b"\xff", b"\x03"))
            )),
            training=describe_training(dataset, plan_training(options), "sequential"),
        )  # fmt: skip
    return dataclasses.replace(options, epochs=None, resume=tmp_path), manifest


def resume(
    options: TrainOptions,
    manifest: SnapshotManifest,
    monkeypatch: pytest.MonkeyPatch,
    order: Literal["shuffle", "file"] | None = None,
    epochs: int | None = None,
) -> TrainingPlan:
    """Return the plan of a resumed training."""
    snapshot = Snapshot(Path(str(options.resume)), manifest)
    monkeypatch.setattr(Resumption, "find", lambda directory, warn: Resumption(snapshot))
    return plan_training(dataclasses.replace(options, passes=PassOptions(order=order), epochs=epochs))


def reordered(plan: TrainingPlan) -> tuple[int, ...]:
    assert plan.resumed is not None
    return Resumption(plan.resumed).reordered(plan)


def test_a_started_pass_keeps_its_order_if_passes_are_added(
    started_training: tuple[TrainOptions, SnapshotManifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second pass was the last pass, so it keeps the order of the file, also after a second resumption."""
    options, manifest = started_training
    assert reordered(resume(options, manifest, monkeypatch)) == ()
    longer = resume(options, manifest, monkeypatch, epochs=4)
    assert (longer.order, longer.epochs, reordered(longer)) == ("shuffle", 4, (1,))
    assert reordered(resume(options, manifest, monkeypatch, "file")) == (0,)
    again = msgspec.structs.replace(manifest, training={**manifest.training, "epochs": 4, "reordered": [1]})
    assert reordered(resume(options, again, monkeypatch)) == (1,)
    assert reordered(resume(options, again, monkeypatch, epochs=2)) == ()


def test_a_resumed_training_keeps_the_order(
    started_training: tuple[TrainOptions, SnapshotManifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    options, manifest = started_training
    in_order = msgspec.structs.replace(manifest, training={**manifest.training, "order": "file"})
    plan = resume(options, in_order, monkeypatch, epochs=3)
    assert (plan.order, reordered(plan)) == ("file", ())
    assert reordered(resume(options, in_order, monkeypatch, "shuffle")) == (0,)
    mixed = msgspec.structs.replace(manifest, training={**manifest.training, "shards_at_once": 8})
    with pytest.raises(UsageError, match=r"--order file: .* mixes shards"):
        resume(options, mixed, monkeypatch, "file")
