"""A manifest names only files on the disk, and a reported rename survives a crash."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.data.binary.cache import ShardCache
from paceline.output_files import process_mark, replacing
from paceline.storage.format import MANIFEST, PartUse, SnapshotManifest, StoredTable
from paceline.storage.model_directory import save_model
from paceline.storage.parts import PartBuffer, write_part
from paceline.storage.snapshot_directory import SnapshotDirectory, folder_name
from paceline.tables.spec import TableSpec

SPEC = TableSpec(name="t", kind="sparse", dim=1, update={"kind": "SGD", "lr": 0.1}, initializer={"kind": "Zeros"})
KEYS, RECORDS = np.arange(5, dtype=np.uint64), np.ones((5, 1), np.float32)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Record the operations on the disk in order: the file (by its inode) that is synced or renamed."""
    done: list[tuple[str, int]] = []
    fsync, rename = os.fsync, os.replace

    def synced(number: int) -> None:
        done.append(("sync", os.fstat(number).st_ino))
        fsync(number)

    def renamed(source: Any, target: Any) -> None:
        done.append(("rename", os.stat(source).st_ino))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    return done


def check(steps: list[tuple[str, int]], folder: Path, files: Iterable[Path], *, then: Iterable[Path]) -> None:
    """Raise AssertionError unless `files` were synced before the manifest was renamed, and `then` afterwards."""
    inode = (folder / MANIFEST).stat().st_ino
    renames = [at for at, (step, which) in enumerate(steps) if step == "rename"]
    assert [steps[at] for at in renames] == [("rename", inode)]
    before, after = steps[: renames[0]], steps[renames[0] :]
    for file in (*files, folder / MANIFEST):
        assert ("sync", file.stat().st_ino) in before, file
    for operation in then:
        assert ("sync", operation.stat().st_ino) in after, operation


def test_files_of_a_model_are_synced_before_the_manifest(tmp_path: Path, steps: list[tuple[str, int]]) -> None:
    folder = tmp_path / "model"
    manifest = save_model(folder, [(SPEC, [(KEYS, RECORDS)])], {}, {"optimizer": b"tensors"})
    assert len(manifest.files) == 2
    check(steps, folder, [folder / file for file in manifest.files], then=[folder])


def test_files_of_a_snapshot_are_synced_before_the_manifest(tmp_path: Path, steps: list[tuple[str, int]]) -> None:
    directory = SnapshotDirectory(tmp_path)
    folder = tmp_path / folder_name(1)
    directory.make(1)
    gathered = PartBuffer(64)
    gathered.begin(1)
    gathered.add(KEYS, RECORDS, 7)
    part = write_part(tmp_path, f"{folder.name}/s0.safetensors", "t", gathered)
    table = StoredTable(spec=SPEC, rows=5, uses=(PartUse(part=part, buckets=(7,)),))
    directory.commit(SnapshotManifest(paceline="0", number=1, full=True, iteration=None, tables=(table,)))
    check(steps, folder, [tmp_path / part.file], then=[folder, tmp_path])
    directory.close()


def test_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    own = process_mark()
    host = own[:8]
    present = {
        f".out.{host}{ended.pid:08x}": False,
        f".out.{host}{os.getppid():08x}": True,  # this process lives
        f".out.{'0' * 8}{ended.pid:08x}": True,  # a process of another host
        f".other.{host}{ended.pid:08x}": True,
        f"out.{host}{ended.pid:08x}": True,
    }
    for name in present:
        (tmp_path / name).touch()
    with replacing(tmp_path / "out") as aside:
        aside.touch()
    assert {path.name for path in tmp_path.iterdir()} == {"out", *(name for name, stays in present.items() if stays)}


def test_a_cache_removes_files_of_killed_processes(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    young, old = (tmp_path / f"{'0' * 24}-{at}.shard.{process_mark()[:8]}{ended.pid:08x}.0.tmp" for at in range(2))
    for path in (young, old):
        path.touch()
    os.utime(old, (0, 0))
    ShardCache(tmp_path, {})
    assert list(tmp_path.iterdir()) == [young]
