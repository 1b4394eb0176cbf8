"""A full disk and a read-only disk: training continues, and existing files stay complete."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.storage.snapshot_directory import read_newest

from .running import Commands, Finished

_HOLD = 'mount -t tmpfs -o size=2m tmpfs "$0" && echo mounted && exec cat'  # runs until its standard input ends


@dataclass(frozen=True)
class Disk:
    """A file system of 2 MiB in a mount namespace."""

    folder: Path
    """The path of the disk in the namespace."""
    seen: Path
    """The path of the disk outside of the namespace."""
    within: Path
    """The namespace."""

    def files(self) -> list[str]:
        """The files on the disk."""
        return sorted(str(path.relative_to(self.seen)) for path in self.seen.rglob("*"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A disk that is removed after the test."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["unshare", "--mount", "sh", "-c", _HOLD, str(folder)]
    try:
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except FileNotFoundError:
        pytest.skip("there is no unshare here (util-linux)")
    with holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        if holder.stdout.readline() != b"mounted\n":
            pytest.skip("this user may not mount anything, in a namespace of its own either")
        namespace = f"/proc/{holder.pid}"
        yield Disk(folder, Path(f"{namespace}/root{folder}"), Path(f"{namespace}/ns/mnt"))
        holder.stdin.close()


@pytest.mark.thorough
def test_a_full_disk_and_a_read_only_disk(paceline: Commands, click_log: tuple[Path, Path], disk: Disk) -> None:
    """The disk has space for one snapshot, but not for a further model."""
    snapshots, model = disk.folder / "snapshots", disk.folder / "model"

    def train(*arguments: str | Path) -> tuple[Finished, list[str]]:
        common = ("train", click_log[0], "-q", "--workers", "1", "--batch-size", "32", "--json")
        every = ("--snapshot-every", "20000", "--snapshot-dir", snapshots)
        finished = paceline.start(*common, *every, *arguments, within=disk.within).wait()
        return finished, finished.err.splitlines()

    finished, (*pass_lines, last) = train("--epochs", "14", "--save", model)
    assert finished.status == 1
    assert last == f"paceline: no space left to save the model in {model}. An existing model in it is unchanged"
    assert pass_lines
    for number, line in enumerate(pass_lines, 2):
        why = f"server 0: no space left in {snapshots}"
        assert line == f"paceline: snapshot {number} was not taken: {why}; the training continues"
    files = disk.files()
    assert files[:3] == ["snapshots", "snapshots/snapshot-000001", "snapshots/snapshot-000001/manifest.json"]
    assert len(files) == 4
    assert read_newest(disk.seen / "snapshots").manifest.number == 1

    subprocess.run(["nsenter", f"--mount={disk.within}", "mount", "-o", "remount,ro", disk.folder], check=True)
    finished, (resumed, *pass_lines) = train("--epochs", "16", "--resume", snapshots)
    assert finished.json["examples"] == 192_000
    assert resumed.startswith(f"paceline: resuming from {snapshots}/snapshot-000001: ")
    assert pass_lines
    for number, line in enumerate(pass_lines, 2):
        why = f"cannot write in {snapshots}: Read-only file system"
        assert line == f"paceline: snapshot {number} was not taken: {why}; the training continues"
    assert disk.files() == files
    finished, lines = train("--epochs", "1", "--save", model)
    assert finished.status == 1
    assert lines == [f"paceline: cannot save a model in {model}: Read-only file system"]


def test_a_full_spill_disk_ends_the_training(paceline: Commands, tmp_path: Path, disk: Disk) -> None:
    """Otherwise pushes would be rejected one by one, and the training would end without an error and without rows."""
    data = tmp_path / "wide.svm"
    lines = [f"{row % 2} " + " ".join(f"{row * 40 + i}:1" for i in range(40)) + "\n" for row in range(6000)]
    data.write_text("".join(lines) + lines[0] * 6000)  # the second half pushes to existing rows
    finished = paceline.start(
        "train", data, "-q", "--workers", "1", "--batch-size", "64", "--epochs", "1", "--consistency", "eventual",
        "--memory-limit", "512K", "--spill-dir", disk.folder, within=disk.within,
    ).wait()  # fmt: skip
    assert finished.status == 1
    *_, last = finished.err.splitlines()
    assert last.startswith("paceline: server 0 has no room for this request: ")
    assert f" MB of rows in {disk.folder}: No space left on device. It was rejected without changes" in last
    assert disk.files() == []
