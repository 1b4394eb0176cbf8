from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from paceline.meeting.watching import Watch, is_stopped
from paceline.testing import nothing_left


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    with nothing_left():
        process = subprocess.Popen(["sleep", "60"])
        yield process
        process.kill()
        process.wait()


@pytest.fixture(params=[True, False], ids=["pidfd", "polled"])
def _pidfd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.delattr(os, "pidfd_open", raising=False)


@pytest.mark.usefixtures("_pidfd")
def test_a_dead_process_is_found_before_it_is_reaped(other: subprocess.Popen[bytes]) -> None:
    watch = Watch({0: os.getpid(), 3: other.pid})
    assert watch.dead() == ()
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # wait until the process is a zombie
    assert watch.dead() == (3,)
    other.wait()
    assert watch.dead() == (3,)
    watch.close()
    watch.close()


@pytest.mark.usefixtures("_pidfd")
def test_a_rank_dead_from_the_start_is_reported(other: subprocess.Popen[bytes]) -> None:
    other.kill()
    other.wait()
    watch = Watch({1: other.pid})
    assert watch.dead() == (1,)
    watch.close()


def test_a_stopped_process_is_found(other: subprocess.Popen[bytes]) -> None:
    assert not is_stopped(other.pid)
    other.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, other.pid, os.WSTOPPED | os.WNOWAIT)
    assert psutil.Process(other.pid).status() == psutil.STATUS_STOPPED
    assert is_stopped(other.pid)
    other.kill()
    other.wait()
    assert not is_stopped(other.pid)
