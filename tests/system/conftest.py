"""Fixtures for tests with real processes, and a check for processes and files that remain."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
from tests.waiting import wait_until

from paceline.data import ClickLogSpec, write_click_log
from paceline.temporary import remove_abandoned

from .running import MARK, Commands, our_processes


@dataclass(frozen=True)
class _Session:
    mark: str
    temporary: Path


@pytest.fixture(scope="session")
def session() -> Iterator[_Session]:
    """Check that no process, temporary file or thread of the tests is left at the end of the session."""
    # The path is short, because the path of a Unix socket may have only about 100 bytes.
    session = _Session(secrets.token_hex(8), Path(tempfile.mkdtemp(prefix="pt-", dir="/tmp")))
    threads = set(threading.enumerate())
    yield session
    wait_until(lambda: not our_processes(session.mark), "processes are left")
    assert os.listdir(session.temporary) == []
    # Progress bars of other libraries, such as transformers, leave a thread.
    left = {thread for thread in threading.enumerate() if thread.name != "tqdm_monitor"}
    assert left <= threads
    shutil.rmtree(session.temporary)


@pytest.fixture
def paceline(session: _Session, tmp_path: Path) -> Iterator[Commands]:
    """Run commands. Check after the test that all their processes have ended and the temporary folder is empty."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    environment |= {MARK: session.mark, "TMPDIR": str(session.temporary), "COLUMNS": "200"}
    environment["OPENBLAS_NUM_THREADS"] = "1"  # the tests do not need the threads that each process would start
    commands = Commands(environment, tmp_path, [])
    yield commands
    try:
        if any(running.process.poll() is None for running in commands.started):
            for process in our_processes(session.mark):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)  # a stopped process would keep the output of its command open
        for running in commands.started:
            running.kill()
        wait_until(lambda: not our_processes(session.mark), "processes are left")
        if any(running.process.poll() == -signal.SIGKILL for running in commands.started):
            remove_abandoned(session.temporary)  # as the next process of Paceline would do
        wait_until(lambda: not os.listdir(session.temporary), f"left behind: {os.listdir(session.temporary)}")
    finally:  # otherwise the next test would fail too
        for process in our_processes(session.mark):
            process.kill()
        for left in session.temporary.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()


@pytest.fixture
def paceline_spawned(paceline: Commands) -> Commands:
    """Run each command in a new interpreter, like a user. The fixture `paceline` forks a loaded interpreter."""
    return replace(paceline, afresh=True)


@pytest.fixture(scope="session")
def click_log(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A log of 12,000 rows for training, and a log of 4,000 rows for evaluation."""
    folder = tmp_path_factory.mktemp("clicks")
    train, evaluation = folder / "train.tsv", folder / "eval.tsv"
    write_click_log(train, ClickLogSpec(rows=12_000, eval_rows=4_000), eval_path=evaluation)
    return train, evaluation


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data."""
    folder = Path(os.environ.get("PACELINE_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"real data is not here: {folder} (set PACELINE_TEST_DATA)")
    return folder
