"""The scheduler's detection of ended processes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest

from paceline.protocol.membership import Member, ProcessIdentity, Role
from paceline.ps.scheduler.processes import ProcessWatch, own_host, own_process
from paceline.ps.scheduler.processes import begin_of as started
from paceline.transport import Address, Endpoint

LONG_S = 20.0


class Watched:
    """A process watch, and its reports."""

    def __init__(self) -> None:
        self.ended: list[int] = []
        self.suspected: list[int] = []
        self.failures: list[BaseException] = []
        self.watch = ProcessWatch(self.ended.append, self.suspected.append, self.failures.append)

    async def wait_for(self, condition: Callable[[], object]) -> None:
        until_s = time.monotonic() + LONG_S
        while not condition():
            assert time.monotonic() < until_s, f"no report within {LONG_S:g} s"
            await asyncio.sleep(0.01)


def run(scenario: Callable[[Watched], Awaitable[None]]) -> None:
    async def main() -> None:
        watched = Watched()
        try:
            await scenario(watched)
        finally:
            watched.watch.close()
        assert watched.failures == []

    asyncio.run(main())


def begin_child() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


def end_child(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = begin_child()
    yield process
    end_child(process)


@pytest.fixture
def other_child() -> Iterator[subprocess.Popen[bytes]]:
    process = begin_child()
    yield process
    end_child(process)


def process_of(child: subprocess.Popen[bytes]) -> ProcessIdentity:
    start_ticks = started(child.pid)
    assert start_ticks is not None
    return ProcessIdentity(own_host(), child.pid, start_ticks)


def member(incarnation: int, process: ProcessIdentity, address: Endpoint | None = None) -> Member:
    return Member("member", Role.WORKER, 0, incarnation, address, process)


def test_the_kernel_identifies_the_process() -> None:
    process = own_process()
    assert (process.pid, process.started) == (os.getpid(), started(os.getpid()))
    assert process == own_process()


def test_an_unreaped_process_has_ended(child: subprocess.Popen[bytes]) -> None:
    assert started(child.pid) is not None
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # the process stays a zombie
    assert started(child.pid) is None


def test_an_ended_process_is_reported_after_a_broken_connection(child: subprocess.Popen[bytes]) -> None:
    async def scenario(watched: Watched) -> None:
        watched.watch.watch(member(3, process_of(child)), connected=True)
        watched.watch.disconnected(3)
        await asyncio.sleep(0.2)
        assert watched.ended == []
        child.kill()
        await watched.wait_for(lambda: watched.ended)
        assert (watched.ended, watched.suspected) == ([3], [])

    run(scenario)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no os.pidfd_open")
def test_an_ended_process_is_reported_without_a_broken_connection(child: subprocess.Popen[bytes]) -> None:
    async def scenario(watched: Watched) -> None:
        watched.watch.watch(member(3, process_of(child)), connected=True)
        child.kill()
        await watched.wait_for(lambda: watched.ended)
        assert watched.ended == [3]

    run(scenario)


def test_another_process_with_the_same_pid_is_different() -> None:
    async def scenario(watched: Watched) -> None:
        process = own_process()
        watched.watch.watch(member(3, ProcessIdentity(process.host, process.pid, process.started + 1)), connected=False)
        assert watched.ended == [3]

    run(scenario)


def test_an_unwatched_process_is_not_reported(child: subprocess.Popen[bytes]) -> None:
    async def scenario(watched: Watched) -> None:
        watched.watch.watch(member(3, process_of(child)), connected=False)
        watched.watch.forget(3)
        child.kill()
        child.wait()
        await asyncio.sleep(0.2)
        assert watched.ended == []

    run(scenario)


def test_a_reused_incarnation_refers_to_the_new_process(
    child: subprocess.Popen[bytes], other_child: subprocess.Popen[bytes]
) -> None:
    """The next cluster assigns the same incarnations to other processes."""

    async def scenario(watched: Watched) -> None:
        watched.watch.watch(member(3, process_of(child)), connected=False)
        watched.watch.watch(member(3, process_of(other_child)), connected=True)
        watched.watch.disconnected(3)
        other_child.kill()
        await watched.wait_for(lambda: watched.ended)
        assert watched.ended == [3]

    run(scenario)


def test_only_watched_processes_are_reported(child: subprocess.Popen[bytes]) -> None:
    async def scenario(watched: Watched) -> None:
        for incarnation in (3, 4):
            watched.watch.watch(member(incarnation, process_of(child)), connected=False)
        watched.watch.keep([4])
        child.kill()
        await watched.wait_for(lambda: watched.ended)
        assert watched.ended == [4]

    run(scenario)


def endpoint(port: int) -> Endpoint:
    return Endpoint(Address.parse(f"tcp://127.0.0.1:{port}"))


def test_a_missing_listener_on_the_same_host_means_an_ended_process() -> None:
    """The process reports another host, for example because it runs in a container on this host."""

    async def scenario(watched: Watched) -> None:
        server = socket.create_server(("127.0.0.1", 0))
        port = server.getsockname()[1]
        watched.watch.watch(member(3, ProcessIdentity("elsewhere", 1, 1), endpoint(port)), connected=False)
        await asyncio.sleep(0.2)
        assert (watched.ended, watched.suspected) == ([], [])
        server.close()
        await watched.wait_for(lambda: watched.ended)
        assert (watched.ended, watched.suspected) == ([3], [])

    run(scenario)


def test_a_missing_listener_on_another_host_means_a_doubted_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(watched: Watched) -> None:
        server = socket.create_server(("127.0.0.1", 0))
        port = server.getsockname()[1]
        server.close()
        watched.watch.watch(member(3, ProcessIdentity("elsewhere", 1, 1), endpoint(port)), connected=False)
        await watched.wait_for(lambda: watched.suspected)
        assert (watched.ended, watched.suspected) == ([], [3])

    monkeypatch.setattr("paceline.ps.scheduler.processes._is_own_address", lambda host: False)
    run(scenario)


def test_a_reconnected_process_is_not_probed() -> None:
    async def scenario(watched: Watched) -> None:
        server = socket.create_server(("127.0.0.1", 0))
        port = server.getsockname()[1]
        watched.watch.watch(member(3, ProcessIdentity("elsewhere", 1, 1), endpoint(port)), connected=False)
        await asyncio.sleep(0.1)
        watched.watch.watch(member(3, ProcessIdentity("elsewhere", 1, 1), endpoint(port)), connected=True)
        await asyncio.sleep(0.3)
        server.close()
        await asyncio.sleep(0.5)
        assert (watched.ended, watched.suspected) == ([], [])

    run(scenario)
