"""Ranks are killed, stopped, interrupted, or make wrong calls. The other ranks raise an error in time and end."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.free_ports import free_port
from tests.waiting import join, wait_until
from tests.warm.processes import WarmProcess

from .running import MARK, PROMPT_S, our_processes

_PROGRAM = Path(__file__).with_name("collective_rank.py")
_WAIT_S = 60.0
_LATE_S = 6.0  # the permitted delay after the timeout on a busy machine
_SHARED_FIRST = pytest.mark.parametrize(
    "algorithm", ["", pytest.param("ring", marks=pytest.mark.thorough)], ids=["shared", "ring"]
)


class Rank:
    """One process and its output."""

    def __init__(self, scenario: str, environment: dict[str, str]) -> None:
        self.process = WarmProcess(
            ["-X", "faulthandler", "-W", "error", _PROGRAM, scenario],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.reports: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self._changed = threading.Condition()
        self._readers = [threading.Thread(target=self._read), threading.Thread(target=self._read_errors)]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.reports.append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors += list(self.process.stderr)

    def wait_for(self, *events: str) -> dict[str, Any]:
        """Return the first report of one of these kinds."""

        def find() -> dict[str, Any] | None:
            return next((word for word in self.reports if word["event"] in events), None)

        with self._changed:
            self._changed.wait_for(lambda: find() or not self._readers[0].is_alive(), _WAIT_S)
        found = find()
        assert found is not None, f"nothing of {events}: {self.reports} {''.join(self.errors)} {self.process.poll()}"
        return found

    def end(self) -> int:
        """Let the rank continue until it ends; return its status."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            status = self.process.wait(_WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"still running: {self.reports} {''.join(self.errors)}") from None
        for reader in self._readers:
            join(reader)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return status


class Programs:
    """Starts ranks, each program with its own port and all with one temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = secrets.token_hex(8)
        self.ranks: list[Rank] = []

    def start(self, scenario: str, size: int = 3, *, port: int = 0, only: int | None = None, **more: str) -> list[Rank]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
        port = port or free_port()
        environment = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment = {**kept, **environment, "TMPDIR": str(self.folder), MARK: self.mark, **more}
        chosen = range(size) if only is None else [only]
        started = [Rank(scenario, {**environment, "RANK": str(rank)}) for rank in chosen]
        self.ranks += started
        return started

    def close(self) -> None:
        for rank in self.ranks:
            if rank.process.poll() is None:
                rank.process.kill()
            rank.end()


@pytest.fixture
def programs() -> Iterator[Programs]:
    """Start programs. Check after the test that no process, file or shared memory is left."""
    shared = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    started = Programs(Path(tempfile.mkdtemp(prefix="pc-", dir="/tmp")))
    try:
        yield started
    finally:
        started.close()
    wait_until(lambda: not our_processes(started.mark), "processes are left")
    left = os.listdir(started.folder)
    shutil.rmtree(started.folder)
    assert left == []
    if shared or os.path.isdir("/dev/shm"):
        assert {name for name in os.listdir("/dev/shm") if "paceline" in name} <= shared


def _check_lost(rank: Rank, culprit: int, since: float, within_s: float = PROMPT_S) -> dict[str, Any]:
    word = rank.wait_for("raised", "closed")
    assert word["event"] == "raised", rank.reports
    assert word["kind"] == "RankLostError", word
    assert word["ranks"] == [culprit], word
    assert f"rank {culprit}" in word["text"], word
    assert word["at"] - since < within_s, f"only after {word['at'] - since:.2f} s: {word}"
    rank.wait_for("refuses")
    return word


def _end_well(*ranks: Rank) -> None:
    for rank in ranks:
        assert rank.end() == 0, (rank.reports, "".join(rank.errors))
        assert rank.errors == []
        assert rank.wait_for("closed")["threads"] == []


@_SHARED_FIRST
def test_a_killed_rank_is_named_immediately(programs: Programs, algorithm: str) -> None:
    ranks = programs.start("loop", PACELINE_ALGORITHM=algorithm)
    for rank in ranks:
        rank.wait_for("loops")
    since = time.monotonic()
    ranks[1].process.kill()
    for rank in (ranks[0], ranks[2]):
        _check_lost(rank, 1, since)
    _end_well(ranks[0], ranks[2])


def test_the_first_rank_may_be_killed_too(programs: Programs) -> None:
    """Rank 0 serves the store, but no rank needs the store when rank 0 is killed."""
    ranks = programs.start("loop", 2, ITEMS="1000")
    for rank in ranks:
        rank.wait_for("loops")
    since = time.monotonic()
    ranks[0].process.kill()
    _check_lost(ranks[1], 0, since)
    _end_well(ranks[1])


@_SHARED_FIRST
def test_a_stopped_rank_is_named_within_the_timeout(programs: Programs, algorithm: str) -> None:
    ranks = programs.start("loop", PACELINE_ALGORITHM=algorithm, TIMEOUT="3", ITEMS="100000")
    for rank in ranks:
        rank.wait_for("loops")
    since = time.monotonic()
    ranks[1].process.send_signal(signal.SIGSTOP)
    for rank in (ranks[0], ranks[2]):
        word = _check_lost(rank, 1, since, 3.0 + _LATE_S)
        assert "stopped" in word["text"]
    ranks[1].process.send_signal(signal.SIGCONT)
    word = ranks[1].wait_for("raised")
    assert word["kind"] == "RankLostError"
    _end_well(*ranks)


@pytest.mark.parametrize(
    ("algorithm", "scenario"), [("", "leaves_early"), ("ring", "leaves_early"), ("", "exits_early")]
)
def test_a_leaving_rank_is_named(programs: Programs, algorithm: str, scenario: str) -> None:
    ranks = programs.start(scenario, PACELINE_ALGORITHM=algorithm)
    left = ranks[1].wait_for("closed" if scenario == "leaves_early" else "exits")
    for rank in (ranks[0], ranks[2]):
        _check_lost(rank, 1, left["at"])
    _end_well(ranks[0], ranks[2])
    assert ranks[1].end() == 0
    assert ranks[1].errors == []


def test_a_rank_without_calls_is_named(programs: Programs) -> None:
    ranks = programs.start("never_calls", TIMEOUT="2")
    since = max(rank.wait_for("joined")["at"] for rank in ranks)
    for rank in (ranks[0], ranks[2]):
        _check_lost(rank, 1, since, 2.0 + _LATE_S)
    _end_well(*ranks)


def test_another_call_is_reported_on_every_rank(programs: Programs) -> None:
    ranks = programs.start("calls_another", PACELINE_ALGORITHM="ring")
    for rank in ranks:
        word = rank.wait_for("raised")
        assert word["kind"] == "MismatchError"
        for texts in ("rank 1", "broadcast(int32[3, 4], root=2)", "all_reduce(float64[1000], sum)"):
            assert texts in word["text"]
        rank.wait_for("refuses")
    _end_well(*ranks)


@_SHARED_FIRST
def test_an_interrupted_rank_ends_immediately(programs: Programs, algorithm: str) -> None:
    ranks = programs.start("loop", PACELINE_ALGORITHM=algorithm, ITEMS="100000", STAY="1")
    for rank in ranks:
        rank.wait_for("loops")
    since = time.monotonic()
    ranks[1].process.send_signal(signal.SIGINT)
    for rank in ranks:
        word = rank.wait_for("raised")
        # A fault between two calls ends no call. Only the next call of the rank fails.
        expected = ("KeyboardInterrupt",) if rank is ranks[1] else ("CollectiveError", "MismatchError")
        assert word["kind"] in expected
        assert word["at"] - since < PROMPT_S
        assert rank is ranks[1] or "rank 1" in word["text"]
        rank.wait_for("refuses")
    _end_well(*ranks)


@_SHARED_FIRST
def test_more_ranks_than_cores(programs: Programs, algorithm: str) -> None:
    ranks = programs.start("works", 8, PACELINE_ALGORITHM=algorithm, TURNS="30")
    _end_well(*ranks)


class TestMeeting:
    """A rank that cannot join prints the reason as one sentence."""

    def _refused(self, rank: Rank, kind: str, *texts: str, warns: str = "") -> None:
        word = rank.wait_for("not joined", "joined")
        assert word.get("kind") == kind, word
        assert "\n" not in word["text"]
        assert all(message in word["text"] for message in texts), word
        assert rank.end() == 0
        assert all(warns and warns in line for line in rank.errors), rank.errors

    def test_two_programs_at_one_port(self, programs: Programs) -> None:
        port = free_port()
        first = programs.start("never_calls", 2, port=port)
        for rank in first:
            rank.wait_for("joined")
        second = programs.start("works", 2, port=port, TURNS="1")
        for rank in second:
            self._refused(rank, "UsageError", "two programs use the rendezvous", str(port))
        _end_well(*reversed(first))

    def test_a_wrong_token(self, programs: Programs) -> None:
        port = free_port()
        first, *_ = programs.start("works", 2, port=port, only=0, PACELINE_TOKEN="one secret of many", TIMEOUT="10")
        other, *_ = programs.start("works", 2, port=port, only=1, PACELINE_TOKEN="quite another one", TIMEOUT="10")
        self._refused(other, "AuthenticationError", "token")
        self._refused(first, "RankLostError", "rank 1 of 2 did not come", warns="does not hold this")

    def test_a_port_in_use(self, programs: Programs) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            first, *_ = programs.start("works", 2, port=port, only=0, TIMEOUT="6")
            self._refused(first, "AddressError", str(port), "in use by another program")

    def test_an_unknown_algorithm(self, programs: Programs) -> None:
        for rank in programs.start("works", 2, PACELINE_ALGORITHM="rign"):
            self._refused(rank, "UsageError", "'rign'", "ring")
