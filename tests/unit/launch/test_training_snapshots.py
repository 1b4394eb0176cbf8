"""When snapshots are due, and which data a training may be resumed with."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from paceline.data import open_dataset
from paceline.errors import DataError, UsageError
from paceline.launch.train.options import TrainOptions
from paceline.launch.train.planning import plan_training
from paceline.launch.train.snapshots import Resumption, describe_training, parse_every
from paceline.models.registry import make_model
from paceline.protocol.jobs import DoneShards, JobAccount
from paceline.storage.format import SnapshotManifest
from paceline.storage.snapshot_directory import Snapshot


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
def test_every(text: str, meant: tuple[float | None, int | None]) -> None:
    assert parse_every(text) == meant


@pytest.mark.parametrize("text", ["", "s", "0", "0s", "-5s", "5 days", "1e5", "30S", "nan", "inf"])
def test_no_every(text: str) -> None:
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
        assert resumption.account.progress == {"examples": 4.0, "weight": 4.0}  # of a version that counted none
        whole = (DoneShards(epoch=0, file=0, shards=b"\x03"), DoneShards(epoch=0, file=1, shards=b"\x03"))
        further = msgspec.structs.replace(manifest, account=JobAccount(files=(2, 2), done=whole))
        assert Resumption(Snapshot(tmp_path, further)).num_passes == 1
        for other in (make_model("fm", dim=4), make_model("regression")):
            with pytest.raises(
                UsageError, match=rf"is of a training of lr\(.*, and it is {other.name}\(.*the same model"
            ):
                resumption.check_model(other)
        assert resumption.shard_bytes == 10
        assert resumption.describe().endswith("snapshot-000007: 2 of 8 shards done, 4 examples, iteration 12")
    with open_dataset(files[::-1], shard_bytes=10) as dataset, pytest.raises(DataError, match=r"file 1 was a.libsvm"):
        resumption.check_data(dataset)
    with open_dataset(files[:1], shard_bytes=10) as dataset, pytest.raises(DataError, match="on 2 files, and 1 are"):
        resumption.check_data(dataset)
    with open_dataset(files, shard_bytes=11) as dataset, pytest.raises(DataError, match="shard_bytes 10, and it is 11"):
        resumption.check_data(dataset)
    files[1].write_text("1 3:1\n")
    changed = r"file 2 was b\.libsvm of 16 bytes, and it is b\.libsvm of 6 bytes now"
    with open_dataset(files, shard_bytes=10) as dataset, pytest.raises(DataError, match=changed):
        resumption.check_data(dataset)
    with pytest.raises(UsageError, match="of no training"):
        Resumption(Snapshot(tmp_path, SnapshotManifest(
            number=7, full=True, iteration=None, tables=(),
        )))  # fmt: skip
