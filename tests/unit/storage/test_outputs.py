"""Output files: a regular file is replaced whole; a FIFO, a device and an open descriptor are written in place."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.unit.inference.test_merging import trained

from paceline.inference.export import export_model
from paceline.inference.inspection import inspect_model
from paceline.inference.reports import write_png
from paceline.models.logistic import SparseLogisticRegression
from paceline.output_files import replacing


def write(path: Path, text: str) -> None:
    with replacing(path) as aside:
        aside.write_text(text)


@contextmanager
def drained(fifo: Path, received: list[bytes]) -> Iterator[None]:
    """Create a FIFO; a thread reads it to its end."""
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: received.append(fifo.read_bytes()), daemon=True)
    reader.start()
    yield
    reader.join(5)


def test_a_fifo_receives_the_output(tmp_path: Path) -> None:
    fifo, received = tmp_path / "fifo", list[bytes]()
    with drained(fifo, received):
        write(fifo, "whole")
    assert received == [b"whole"]
    assert fifo.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["fifo"]


def test_a_device_is_written_in_place(tmp_path: Path) -> None:
    device = tmp_path / "null"
    try:
        os.mknod(device, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        device.write_text("")
    except OSError as error:
        pytest.skip(f"devices cannot be made here: {error}")
    write(device, "text")
    assert device.is_char_device()
    assert [path.name for path in tmp_path.iterdir()] == ["null"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_and_the_target_is_replaced(tmp_path: Path, exists: bool) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    if exists:
        target.write_text("old")
    link.symlink_to("folder/target")
    write(link, "new")
    assert link.is_symlink()
    assert not target.is_symlink()
    assert target.read_text() == "new"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "link", "target"]


def test_an_error_keeps_the_old_target_of_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    with pytest.raises(ZeroDivisionError), replacing(link) as aside:
        aside.write_text(str(1 // 0))
    assert target.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "target"]


def test_a_file_as_standard_output_is_written_in_place(tmp_path: Path) -> None:
    file = tmp_path / "out"
    with open(file, "w") as out:
        write(Path(f"/dev/fd/{out.fileno()}"), "in place")
        assert os.fstat(out.fileno()).st_ino == file.stat().st_ino
    assert file.read_text() == "in place"


@pytest.mark.parametrize("kind", ["txt", "npz", "png"])
def test_exports_and_drawings_are_written_to_a_fifo_through_a_link(tmp_path: Path, kind: str) -> None:
    model = trained(tmp_path / "model", 1, SparseLogisticRegression().describe())
    fifo, link, received = tmp_path / "fifo", tmp_path / f"link.{kind}", list[bytes]()
    link.symlink_to(fifo)
    if kind == "png":
        pytest.importorskip("matplotlib")
    with drained(fifo, received):
        if kind == "png":
            write_png(link, inspect_model(model), None)
        else:
            assert export_model(model, link) > 0
    assert received[0]
    assert link.is_symlink()
    assert fifo.is_fifo()
