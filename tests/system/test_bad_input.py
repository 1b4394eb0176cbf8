"""Bad input that processes detect while reading: the message is one sentence, the status is 1, no data is lost."""

from __future__ import annotations

import contextlib
import gzip
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .running import Commands


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def test_a_truncated_gzip_file(paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path) -> None:
    packed = gzip.compress(click_log[0].read_bytes())
    (tmp_path / "cut.tsv.gz").write_bytes(packed[: len(packed) // 2])
    finished = paceline.run("train", "cut.tsv.gz", "-q", "--workers", "2", "--save", "model")
    assert finished.status == 1
    (sentence,) = finished.err.splitlines()  # the sample of the data shows the fault before the training
    assert not (tmp_path / "model").exists()
    assert "cut.tsv.gz is truncated: its gzip stream ends" in sentence


def test_malformed_lines(paceline: Commands, click_log: tuple[Path, Path], tmp_path: Path) -> None:
    """Each malformed row is counted once, with any number of workers and passes.

    The first ones are named; with --strict the first one ends the training.
    """
    lines = lines_of(click_log[0])
    for at in (10, 2000, 2001, 5000, 7000, 11_999):
        lines[at] = b"7" + lines[at][1:]
    lines.append(b"cut\toff")
    (tmp_path / "bad.tsv").write_bytes(b"".join(lines))
    finished = paceline.succeed("train", "bad.tsv", "-q", "--workers", "2", "--epochs", "2", "--json", "--save", "m")
    assert finished.json["bad_lines"] == 7
    assert finished.json["examples"] == 2 * (12_000 - 6)
    warning, *named = finished.err.splitlines()
    assert "7 malformed lines were skipped" in warning
    assert len(named) == 5
    assert "bad.tsv, line 11: its label is neither 0 nor 1" in named[0]
    assert "bad.tsv, line 2,001:" in named[1]
    strict = paceline.run("train", "bad.tsv", "-q", "--strict", "--workers", "1", "--epochs", "1")
    assert strict.status == 1
    assert "is malformed: its label is neither 0 nor 1" in strict.err
    assert len(strict.err.splitlines()) == 1

    predicted = paceline.succeed("predict", "m", "bad.tsv", "-o", "out")
    assert "7 malformed lines were skipped" in predicted.err
    assert "bad.tsv, line 11: " in predicted.err
    assert "11,994 predictions in" in predicted.err
    quiet = paceline.succeed("predict", "m", "bad.tsv", "-o", "out", "-q")
    assert quiet.err.startswith("paceline: malformed lines have no prediction: ")
    failed = paceline.run("predict", "m", "bad.tsv", "-o", "strict-out", "--strict")
    assert (failed.status, len(failed.err.splitlines())) == (1, 1)
    assert not (tmp_path / "strict-out").exists()


def test_another_format_than_declared(paceline: Commands, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"\x00\xff\xfe garbage \x80" * 5000)
    finished = paceline.run("train", "data", "--format", "criteo", "-q", "--save", "model")
    assert finished.status == 1
    assert "data does not look like criteo" in finished.err.splitlines()[-1]
    assert "Traceback" not in finished.err
    assert not (tmp_path / "model").exists()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("a file system can be mounted only by root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_no_space_for_the_model(
    paceline: Commands, click_log: tuple[Path, Path], tiny_disk: Path, tmp_path: Path
) -> None:
    """The existing model remains, and the training continues without a cache."""
    (tmp_path / "few.tsv").write_bytes(b"".join(lines_of(click_log[0])[:500]))
    paceline.succeed("train", "few.tsv", "-q", "--save", tiny_disk / "model", "--epochs", "1")
    before = {path.name: path.read_bytes() for path in (tiny_disk / "model").iterdir()}
    finished = paceline.run(
        "train", click_log[0], "-q", "--save", tiny_disk / "model", "--epochs", "1", "--cache", tiny_disk / "cache"
    )
    assert finished.status == 1
    assert "no space left to save the model" in finished.err.splitlines()[-1]
    assert "parsed shards are not stored" in finished.err
    assert "Traceback" not in finished.err
    assert {path.name: path.read_bytes() for path in (tiny_disk / "model").iterdir()} == before
    with contextlib.suppress(OSError), open(tiny_disk / "full", "wb", buffering=0) as full:
        while full.write(bytes(4096)):
            pass
    predicted = paceline.run("predict", tiny_disk / "model", click_log[0], "-o", tiny_disk / "out")
    assert "cannot write the predictions" in predicted.err
    assert predicted.status == 1
    assert sorted(os.listdir(tiny_disk)) == ["cache", "full", "model"]
