"""Processes that are started, replaced and ended by a supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.waiting import wait_until

from paceline.launch.supervisor import ChildProcess, Supervisor, spawn

PATIENCE_S = 20.0
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
PARENT = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(600)\n"
)
OBEDIENT = "import sys; print(1, flush=True); sys.stdin.read()"


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    """A supervisor that is closed after the test."""
    supervisor = Supervisor()
    yield supervisor
    supervisor.close(0.1)


def python(text: str) -> ChildProcess:
    return spawn([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def first_line(process: ChildProcess) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def test_processes_ending_with_the_input_are_not_killed(supervisor: Supervisor) -> None:
    child = supervisor.start("obedient", lambda: python(OBEDIENT))
    first_line(child.process)
    supervisor.close(PATIENCE_S)
    assert child.status() == 0
    assert supervisor.living() == []


def test_unending_processes_are_killed(supervisor: Supervisor) -> None:
    child = supervisor.start("stubborn", lambda: python(STUBBORN), is_foreign=True)
    first_line(child.process)
    supervisor.close(0.1, signal.SIGTERM)
    assert child.status() == -signal.SIGKILL


def test_children_of_a_foreign_program_end_with_it(supervisor: Supervisor) -> None:
    """The child has its own session, so a signal to the program's process group does not reach it."""
    child = supervisor.start("foreign", lambda: python(PARENT), is_foreign=True)
    started = psutil.Process(int(first_line(child.process)))
    supervisor.close(PATIENCE_S, signal.SIGTERM)
    psutil.wait_procs([started], timeout=PATIENCE_S)
    assert not started.is_running()


def test_a_process_that_starts_during_the_end_ends_too(supervisor: Supervisor, tmp_path: Path) -> None:
    """A launcher ignores SIGTERM while it waits for its servers, and then starts its ranks."""
    started = tmp_path / "pid"
    late = (
        "import os, signal, subprocess, sys, time\n"
        "def start(number, frame):\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        f"    open({str(started)!r}, 'w').write(str(child.pid))\n"
        "signal.signal(signal.SIGTERM, start)\n"
        "print(1, flush=True)\n"
        "while True:\n"
        "    time.sleep(600)\n"
    )
    child = supervisor.start("late", lambda: python(late), is_foreign=True)
    first_line(child.process)
    supervisor.close(2.0, signal.SIGTERM)
    assert child.status() == -signal.SIGKILL
    deadline = time.monotonic() + PATIENCE_S
    while psutil.pid_exists(int(started.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_dead_process_is_replaced_and_a_finished_one_is_not(supervisor: Supervisor) -> None:
    statuses: list[int] = []
    child = supervisor.start("kept", lambda: python(OBEDIENT))
    supervisor.keep(child, lambda: python(OBEDIENT), most=5, on_replaced=lambda _, status: statuses.append(status))
    first = child.process.pid
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: bool(statuses))
    assert statuses == [-signal.SIGKILL]
    assert child.process.pid != first
    assert supervisor.ended() == []
    assert child.process.stdin is not None
    child.process.stdin.close()
    assert child.keeper is not None
    child.keeper.join(PATIENCE_S)
    assert supervisor.ended() == [("kept", 0)]


def test_a_guard_ends_foreign_programs_of_a_killed_parent() -> None:
    program = (
        "import sys, time\n"
        "from paceline.launch.supervisor import Supervisor, spawn\n"
        "child = Supervisor().start('foreign', lambda: spawn([sys.executable, '-c', sys.argv[1]]), is_foreign=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, STUBBORN], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        left = psutil.Process(parent.pid).children()
        assert len(left) == 2  # the program and its guard process
        parent.kill()
        _, alive = psutil.wait_procs(left, timeout=PATIENCE_S)
    assert alive == []
