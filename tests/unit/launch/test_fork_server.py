"""Processes forked from a process that has loaded the modules they need."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.waiting import wait_until

from paceline.launch import local
from paceline.launch.fork_server import Forked, ForkError, ForkServer

if sys.platform in ("darwin", "win32"):
    pytest.skip("processes are not forked here", allow_module_level=True)

MODULE = "echoing"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    """A fork server that can import this folder."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    with ForkServer.start(MODULE) as server:
        yield server


@pytest.fixture
def fork(server: ForkServer) -> Iterator[Callable[[str], Forked]]:
    """Fork a process that executes its argument; it ends with the test."""
    forked = []

    def fork(mode: str, **environment: str) -> Forked:
        process = server.fork([mode], environment={**os.environ, **environment}, captured=True)
        forked.append(process)
        return process

    yield fork
    for process in forked:
        assert process.stdin is not None
        assert process.stdout is not None
        process.send_signal(signal.SIGKILL)
        process.wait(20.0)
        process.stdin.close()
        process.stdout.close()


def line(process: Forked) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def test_a_forked_process_starts_like_a_new_interpreter(
    fork: Callable[..., Forked], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    other_forks = [fork("wait"), fork("wait")]
    found = [fork("describe", GIVEN=given, TMPDIR=str(tmp_path)) for given in ("one", "two")]
    first, second = (json.loads(line(process)) for process in found)
    assert [process.wait(20.0) for process in found] == [7, 7]
    for process, expected in zip(found, (first, second), strict=True):
        assert process.pid == expected["pid"] == expected["group"] == expected["session"]
    assert (first["given"], second["given"]) == ("one", "two")
    assert first["folder"] == first["temporary"] == str(tmp_path)
    assert first["random"] != second["random"]
    assert first["child handler"]
    assert first["descriptors"] in (
        [0, 1, 2],
        [],
    )  # no copy of another process's pipe
    assert capfd.readouterr().err == "to standard error\n" * 2
    assert [other.poll() for other in other_forks] == [None, None]


def test_exit_statuses_of_forks_are_reported(fork: Callable[..., Forked], capfd: pytest.CaptureFixture[str]) -> None:
    failed, killed, waiting = fork("raise"), fork("sleep"), fork("wait")
    assert failed.wait(20.0) == 1
    assert "ValueError: an error of the child" in capfd.readouterr().err
    assert line(killed) == b"sleeps\n"
    with pytest.raises(subprocess.TimeoutExpired):
        killed.wait(0.05)
    killed.send_signal(signal.SIGTERM)
    assert killed.wait(20.0) == -signal.SIGTERM
    killed.send_signal(signal.SIGTERM)  # the process has ended, so nothing happens
    assert waiting.stdin is not None
    waiting.stdin.close()  # the death of this process would close the pipe too
    assert waiting.wait(20.0) == 7
    assert not psutil.pid_exists(waiting.pid)  # the fork server has reaped the process


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux can a process change its command line")
def test_the_system_shows_the_command_of_each_fork(fork: Callable[..., Forked]) -> None:
    process = fork("sleep")
    assert line(process) == b"sleeps\n"
    words = [word.strip() for word in psutil.Process(process.pid).cmdline()]
    assert words == [sys.executable, "-m", MODULE, "sleep"]


def test_forks_outlive_the_fork_server(server: ForkServer, fork: Callable[..., Forked]) -> None:
    process = fork("sleep")
    assert line(process) == b"sleeps\n"
    psutil.Process(process.pid).parent().kill()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    assert process.poll() is None
    with pytest.raises(ForkError):
        server.fork(["sleep"], environment=os.environ, captured=False)
    process.send_signal(signal.SIGKILL)
    assert process.wait(20.0) == 255  # the exit status is unknown


def test_no_call_waits_for_a_stopped_fork_server(server: ForkServer, fork: Callable[..., Forked]) -> None:
    process = fork("sleep")
    assert line(process) == b"sleeps\n"
    stopped = psutil.Process(process.pid).parent()
    assert stopped is not None
    stopped.suspend()
    try:
        process.send_signal(signal.SIGKILL)
        assert process.wait(20.0) == 255  # the stopped fork server cannot report the exit status
    finally:
        stopped.resume()


def test_exit_statuses_are_reported_if_sigchld_is_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    try:
        with ForkServer.start(MODULE) as server:
            process = server.fork(["sleep"], environment=os.environ, captured=True)
            assert line(process) == b"sleeps\n"
            process.send_signal(signal.SIGKILL)
            assert process.wait(20.0) == -signal.SIGKILL
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])


def test_no_process_with_threads_is_forked(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOING_THREAD", "1")
    with ForkServer.start(MODULE) as unsafe, pytest.raises(ForkError, match="threads run in the fork server"):
        unsafe.fork(["describe"], environment=os.environ, captured=False)


def test_clusters_spawn_processes_if_forks_are_not_safe(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(os, "fork")
    caplog.set_level(logging.DEBUG, local.__name__)
    with local.local_cluster() as cluster:
        processes = [psutil.Process(pid) for role in ("scheduler", "server") for pid in cluster.pids(role)]
        assert [process.ppid() for process in processes] == [os.getpid()] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "cannot fork, processes are spawned: this system does not fork processes safely"
    ]
    assert not any(process.is_running() for process in processes)


@pytest.mark.parametrize("forks", [True, pytest.param(False, marks=pytest.mark.thorough)], ids=["forked", "spawned"])
def test_files_of_the_current_folder_are_not_imported(
    forks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("select", "tempfile", "numpy", "paceline"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user is imported')")
    monkeypatch.chdir(tmp_path)
    if not forks:
        monkeypatch.delattr(os, "fork")
    with local.LocalCluster.start() as cluster:
        parents = {psutil.Process(pid).ppid() for pid in cluster.pids("s")}
    assert (parents == {os.getpid()}) == (not forks)


def test_a_process_with_a_reused_pid_gets_no_signal(fork: Callable[..., Forked]) -> None:
    """The system may reuse a pid shortly before the launcher receives the end of its former process."""
    ended, other = fork("sleep"), fork("sleep")
    assert [line(ended), line(other)] == [b"sleeps\n"] * 2
    fork_server = psutil.Process(ended.pid).parent()
    assert fork_server is not None
    fork_server.suspend()
    try:
        process = psutil.Process(ended.pid)
        process.kill()
        wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE)
        ended.pid = other.pid
        ended.send_signal(signal.SIGKILL)
    finally:
        fork_server.resume()
    assert ended.wait(20.0) == -signal.SIGKILL
    other.send_signal(signal.SIGTERM)
    assert other.wait(20.0) == -signal.SIGTERM


def test_clusters_can_share_a_fork_server() -> None:
    with ForkServer.start() as server:
        parents = set()
        for _ in range(2):
            with local.LocalCluster.start(fork_server=server) as cluster:
                parents |= {psutil.Process(pid).ppid() for pid in cluster.pids("s")}
        assert len(parents) == 1
        assert parents != {os.getpid()}


def test_a_killed_launcher_leaves_no_processes_or_files(tmp_path: Path) -> None:
    program = (
        "import time, paceline\n"
        "with paceline.local_cluster(servers=2) as cluster:\n"
        "    print(cluster.scratch, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        scratch = Path(launcher.stdout.readline().decode().strip())
        left = psutil.Process(launcher.pid).children(recursive=True)
        assert len(left) == 4  # the fork server, the scheduler, two servers
        launcher.kill()
    _, alive = psutil.wait_procs(left, timeout=20.0)
    assert alive == []
    wait_until(lambda: not scratch.exists())
