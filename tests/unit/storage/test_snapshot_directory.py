"""The files of snapshots: reading, damage, and removal of unused files."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from paceline.errors import ModelError, UsageError
from paceline.protocol.jobs import DoneShards, JobAccount, shards, shards_in
from paceline.protocol.jobs.records import done_shards
from paceline.protocol.jobs.shards import Shards
from paceline.storage.directory_lock import DirectoryLock
from paceline.storage.format import (
    PartUse,
    SnapshotManifest,
    StoredPart,
    StoredTable,
    write_manifest,
)
from paceline.storage.parts import PartBuffer, read_part, write_part
from paceline.storage.snapshot_directory import (
    SnapshotDirectory,
    folder_name,
    numbers_in,
    read_newest,
    read_snapshot,
)
from paceline.tables.spec import TableSpec


def part_of(directory: Path, number: int, *buckets: int, rows: int = 5) -> StoredPart:
    (directory / folder_name(number)).mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(number)
    gathered = PartBuffer(64)
    gathered.begin(3)
    for bucket in buckets:
        keys = random.integers(0, 2**63, rows).astype(np.uint64)
        gathered.add(keys, random.random((rows, 3)).astype(np.float32), bucket)
    return write_part(directory, f"{folder_name(number)}/s0-t1-{buckets[0]:05d}.safetensors", "t", gathered)


def manifest_of(number: int, *uses: PartUse, **fields: Any) -> SnapshotManifest:
    spec = TableSpec(name="t", kind="sparse", dim=3, update={"kind": "SGD", "lr": 0.1}, initializer={"kind": "Zeros"})
    table = StoredTable(spec=spec, rows=0, uses=uses)
    return SnapshotManifest(
        paceline="0", number=number, full=True, iteration=None, tables=(table,),
        **fields,
    )  # fmt: skip


def use(part: StoredPart, *buckets: int) -> PartUse:
    return PartUse(part=part, buckets=buckets or part.buckets)


@pytest.mark.parametrize("rows", [0, 1, 100])
def test_a_part_is_a_safetensors_file(tmp_path: Path, rows: int) -> None:
    part = part_of(tmp_path, 1, 7, 9, rows=rows)
    assert part.rows == (rows, rows)
    keys, records = read_part(tmp_path, part, "the snapshot")
    plain = load_file(tmp_path / part.file)
    np.testing.assert_array_equal(plain["keys"], keys)
    np.testing.assert_array_equal(plain["records"], records)
    assert records.shape == (2 * rows, 3)
    assert part.num_bytes == os.path.getsize(tmp_path / part.file)


@pytest.mark.parametrize(("num_bytes", "stays"), [(1000 * (8 + 4), True), (100, False)])
def test_a_part_of_the_expected_size_is_copied_once(num_bytes: int, stays: bool) -> None:
    gathered = PartBuffer(num_bytes)
    gathered.begin(1)
    keys, records = np.arange(1000, dtype=np.uint64), np.arange(1000, dtype=np.float32).reshape(1000, 1)
    for bucket in range(10):
        rows = slice(100 * bucket, 100 * bucket + 100)
        gathered.add(keys[rows], records[rows], bucket)
        if bucket == 0:
            first = gathered.records
    assert np.shares_memory(first, gathered.records) is stays
    np.testing.assert_array_equal(gathered.keys, keys)
    np.testing.assert_array_equal(gathered.records, records)
    assert (gathered.buckets, gathered.rows, gathered.num_bytes) == (list(range(10)), [100] * 10, 12_000)


def test_every_damaged_byte_is_detected(tmp_path: Path) -> None:
    part = part_of(tmp_path, 1, 7)
    path = tmp_path / part.file
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        with pytest.raises(
            ModelError, match=r"s0-t1-00007.safetensors is damaged: its SHA-256 is .*, its manifest records"
        ):
            read_part(tmp_path, part, "the snapshot")
    for size in (0, 1, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=rf"truncated .* {size} bytes, but its manifest records {len(whole)}"):
            read_part(tmp_path, part, "the snapshot")
    path.unlink()
    with pytest.raises(ModelError, match=r"cannot read .*: No such file"):
        read_part(tmp_path, part, "the snapshot")


def test_a_read_manifest_equals_the_written_manifest(tmp_path: Path) -> None:
    account = JobAccount(
        files=(3, None), done=(DoneShards(epoch=1, file=0, shards=b"\x05"),), progress={"examples": 12.0, "loss": 0.1}
    )
    training = {"files": [["a", 1]], "epochs": 3}
    manifest = manifest_of(4, use(part_of(tmp_path, 4, 1, 2), 2), account=account, training=training)
    write_manifest(tmp_path / folder_name(4), manifest)
    assert read_snapshot(tmp_path, 4) == manifest
    path = tmp_path / folder_name(4) / "manifest.json"
    text = path.read_text()
    for wrong, message in (
        (text.replace('"number": 4', '"number": 5'), "its SHA-256 is"),
        (text[:-20], "is damaged"),
        ("[]", "not a manifest of a snapshot"),
        (text.replace('"version": 2', '"version": 99'), "version 99, but this Paceline reads 2. Use Paceline 0"),
    ):
        path.write_text(wrong)
        with pytest.raises(ModelError, match=message):
            read_snapshot(tmp_path, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file": "../s0-t1-00001.safetensors"}, "file"),
        ({"file": "/etc/passwd"}, "file"),
        ({"file": "snapshot-000004/../../x"}, "file"),
        ({"file": "snapshot-000004/a/b"}, "file"),
        ({"file": "snapshot-000004/x\n"}, "file"),
        ({"rows": [1, -1]}, "rows"),
        ({"rows": [1]}, "has 2 buckets"),
        ({"buckets": [1, 512]}, "buckets"),
        ({"buckets": [1, 1]}, "has 2 buckets"),
        ({"buckets": [1, 3]}, "lacks buckets"),
        ({"words": 0}, "words"),
        ({"words": 4}, "has records of 4 float32"),
        ({"num_bytes": -1}, "num_bytes"),
        ({"num_bytes": 10}, "cannot hold"),
        ({"sha256": "x"}, "sha256"),
    ],
)
def test_a_forged_manifest(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_manifest(tmp_path / folder_name(4), manifest_of(4, use(part_of(tmp_path, 4, 1, 2, rows=5), 2)))
    path = tmp_path / folder_name(4) / "manifest.json"
    fields = json.loads(path.read_text())
    fields["tables"][0]["uses"][0]["part"].update(change)
    path.write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=f"manifest.json is damaged: .*{message}"):
        read_snapshot(tmp_path, 4)


def test_a_manifest_of_another_snapshot(tmp_path: Path) -> None:
    for number in (4, 5):
        write_manifest(tmp_path / folder_name(number), manifest_of(number, use(part_of(tmp_path, number, 1, 2), 2)))
    shutil.copy(tmp_path / folder_name(4) / "manifest.json", tmp_path / folder_name(5) / "manifest.json")
    with pytest.raises(ModelError, match=r"belongs to snapshot 4, .* another snapshot"):
        read_snapshot(tmp_path, 5)
    reports: list[str] = []
    assert read_newest(tmp_path, reports.append).manifest.number == 4
    assert "belongs to snapshot 4" in reports[0]


@pytest.mark.parametrize("name", ["part", "manifest"])
def test_only_regular_files_are_read(tmp_path: Path, name: str) -> None:
    part = part_of(tmp_path, 4, 1)
    write_manifest(tmp_path / folder_name(4), manifest_of(4, use(part)))
    path = tmp_path / (part.file if name == "part" else f"{folder_name(4)}/manifest.json")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ModelError, match="is not a regular file"):
        read_part(tmp_path, part, "the snapshot") if name == "part" else read_snapshot(tmp_path, 4)


def test_a_second_run_in_one_directory_is_rejected(tmp_path: Path) -> None:
    folder = SnapshotDirectory(tmp_path / "new" / "snapshots")
    number = folder.next_number()
    folder.make(number)
    folder.commit(manifest_of(number, use(part_of(folder.path, number, 1))))
    with pytest.raises(UsageError, match=rf"use by another run \(process {os.getpid()} on .*Use another directory"):
        SnapshotDirectory(folder.path)
    assert read_newest(folder.path).manifest.number == number  # reading needs no lock
    folder.close()
    folder.close()
    assert sorted(os.listdir(folder.path)) == [folder_name(number)]
    again = SnapshotDirectory(folder.path)
    assert again.next_number() == number + 1
    del again  # the lock of an unreferenced directory is released
    gc.collect()
    SnapshotDirectory(folder.path).close()


def test_the_lock_of_a_killed_process_is_released(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, sys\n"
        "from paceline.storage.directory_lock import DirectoryLock\n"
        "kept = DirectoryLock.take(pathlib.Path(sys.argv[1]))\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"locked\n"
        with pytest.raises(UsageError, match=f"another run \\(process {child.pid} on"):
            DirectoryLock.take(tmp_path)
        child.kill()
    assert (tmp_path / ".lock").exists()
    DirectoryLock.take(tmp_path).release()
    assert not list(tmp_path.iterdir())


def test_a_file_is_kept_while_a_snapshot_refers_to_it(tmp_path: Path) -> None:
    (tmp_path / "something else").write_text("")
    folder = SnapshotDirectory(tmp_path, keep=2)
    assert folder.next_number() == 1
    first, other = part_of(tmp_path, 1, 1, 2), part_of(tmp_path, 1, 3, 4)
    folder.commit(manifest_of(1, use(first), use(other)))
    previous = other
    for number in (2, 3, 4):
        assert folder.next_number() == number
        previous = part_of(tmp_path, number, 3, 4)
        folder.commit(manifest_of(number, use(first, 2), use(previous)))
    # The first snapshot has no manifest any longer, and only the files to which other snapshots refer.
    assert sorted(os.listdir(tmp_path / folder_name(1))) == [Path(first.file).name]
    assert numbers_in(tmp_path) == [1, 3, 4]
    part_of(tmp_path, 5, 1)  # a part of a snapshot whose server was killed
    folder.close()
    again = SnapshotDirectory(tmp_path, keep=2)
    assert again.next_number() == 6
    last = part_of(tmp_path, 6, 1, 2, 3, 4)
    again.commit(manifest_of(6, use(last)))
    assert numbers_in(tmp_path) == [1, 4, 6]
    assert read_newest(tmp_path).manifest.number == 6
    (tmp_path / last.file).unlink()
    reports: list[str] = []
    assert read_newest(tmp_path, reports.append).manifest.number == 4
    assert re.search("snapshot-000006 .*snapshot-000004 .*: cannot read", reports[0])
    with pytest.raises(UsageError, match="at least 1"):
        SnapshotDirectory(tmp_path, keep=0)


def test_done_shards_can_be_stored_and_restored() -> None:
    pool = Shards([20, None, 3], epochs=2)
    for _ in range(30):
        (granted,) = pool.request_shard(1)
        assert isinstance(granted, shards.Granted)
        if granted.lease % 3:
            pool.finish(1, granted.lease)
    pool.file_ended(1, 8)
    done = done_shards(pool.done())
    again = Shards.restore(pool.sizes, epochs=2, done=shards_in(done))
    assert pool.sizes == (20, 8, 3)
    assert again.progress() == pool.progress()
    assert done_shards(again.done()) == done
    every = {(epoch, file, shard) for epoch in range(2) for file in range(3) for shard in range(pool.sizes[file] or 0)}
    left = every - set(pool.done())
    leased = set()
    while isinstance(granted := again.request_shard(1)[0], shards.Granted):
        leased.add((granted.epoch, granted.file, granted.shard))
        again.finish(1, granted.lease)
    assert leased == left
