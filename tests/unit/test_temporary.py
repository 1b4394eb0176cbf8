"""A temporary folder is removed at the latest when the process that made it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from paceline.temporary import TemporaryFolder, remove_abandoned

_HOLD = """
import pathlib, signal, sys, time
from paceline.temporary import TemporaryFolder
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
folder = TemporaryFolder.make("held", pathlib.Path(sys.argv[1]))
(folder.path / "file").touch()
print(folder.path, flush=True)
{then}
"""


def _hold(parent: Path, then: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _HOLD.format(then=then), str(parent)], stdout=subprocess.PIPE, text=True
    )


def printed_path(process: subprocess.Popen[str]) -> Path:
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


def test_a_folder_is_removed_at_close_and_with_the_last_reference(tmp_path: Path) -> None:
    with TemporaryFolder.make("one", tmp_path) as closed:
        assert (closed.path.is_dir(), closed.path.stat().st_mode & 0o777) == (True, 0o700)
        (closed.path / "file").touch()
    closed.close()
    forgotten = TemporaryFolder.make("two", tmp_path)
    assert forgotten.path.name.startswith("paceline-two-")
    del forgotten
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("then", ["", "raise SystemExit(3)", "1 / 0"])
def test_a_folder_is_removed_when_the_interpreter_ends(tmp_path: Path, then: str) -> None:
    with _hold(tmp_path, f"sys.stderr.close(); {then}") as process:
        assert printed_path(process).parent == tmp_path
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_the_next_folder_removes_the_folders_of_killed_processes(tmp_path: Path, number: int) -> None:
    with _hold(tmp_path, "time.sleep(60)") as killed, _hold(tmp_path, "time.sleep(60)") as living:
        left, used = printed_path(killed), printed_path(living)
        killed.send_signal(number)
        killed.wait(20)
        assert left.is_dir()
        with TemporaryFolder.make("new", tmp_path) as new:
            assert set(tmp_path.iterdir()) == {used, new.path}
            assert (used / "file").exists()
        living.kill()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no os.fork")
def test_a_forked_child_does_not_remove_the_folder_of_the_parent(tmp_path: Path) -> None:
    """The forked child ends as an interpreter does, but the folder still belongs to the parent."""
    then = "import os; pid = os.fork(); pid and (os.waitpid(pid, 0), print(folder.path.is_dir(), flush=True))"
    with _hold(tmp_path, then) as process:
        lines = process.communicate(timeout=20)[0].splitlines()
    assert lines[-1] == "True"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_under_removal_is_not_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process locks the new folder, to remove it, before its creator locks it."""
    make = tempfile.mkdtemp
    taken: list[tuple[Path, int]] = []

    def make_and_drop(**named: Any) -> str:
        path = str(make(**named))
        if not taken:
            taken.append((Path(path), os.open(path, os.O_RDONLY)))
            fcntl.flock(taken[0][1], fcntl.LOCK_EX)
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_drop)
    with TemporaryFolder.make("one", tmp_path) as folder:
        assert [path for path, _ in taken] != [folder.path]
        taken[0][0].rmdir()
        assert folder.path.is_dir()
    os.close(taken[0][1])


def test_a_folder_is_created_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with TemporaryFolder.make("one", tmp_path) as first, TemporaryFolder.make("two", tmp_path) as second:
        assert first.path.is_dir()
        assert second.path.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_folders_with_other_names_are_not_removed(tmp_path: Path) -> None:
    names = ["paceline-1000", "paceline-stdin-abcdefgh", "paceline-one-abcdefgh.tmp.txt", "other.tmp"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / "paceline-one-abcdefgh.tmp").symlink_to(tmp_path / "other.tmp")
    remove_abandoned(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([*names, "paceline-one-abcdefgh.tmp"])


def test_a_missing_parent_folder_is_an_error_only_for_new_folders(tmp_path: Path) -> None:
    remove_abandoned(tmp_path / "missing")
    with pytest.raises(FileNotFoundError):
        TemporaryFolder.make("one", tmp_path / "missing")
