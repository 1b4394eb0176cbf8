"""Ranks that fail early are replaced after growing pauses. After six such failures in a row, no rank is replaced."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.free_ports import free_port

from paceline.launch.run.blame import Tracebacks
from paceline.launch.run.elastic import ElasticRun, RankGrowth
from paceline.launch.run.loop import RunLoop, Signals
from paceline.launch.run.plan import Layout, RankPlan, lay_out_node
from paceline.launch.run.processes import Rank, RankProcesses
from paceline.launch.screen import Screen
from paceline.launch.supervisor import Child, ChildProcess
from paceline.protocol.quorum import Coordinator
from paceline.strategies import ElasticOptions
from paceline.transport import Address, make_token

TOKEN = make_token()


class Run:
    """The part of a node with three ranks in a run without processes."""

    def __init__(self, port: int = 0, *, node: int = 0, num_ranks: int = 3, growth: RankGrowth | None = None) -> None:
        self.started: list[Rank] = []
        self.pid = os.getpid()
        """The process of the next ranks."""
        self.processes = RankProcesses()
        self.elastic = ElasticRun(
            ElasticOptions(min_ranks=1, num_ranks=num_ranks),
            [RankPlan(rank=3 * node + rank, environment={}, log_prefix="") for rank in range(3)],
            self._start,
            growth=growth,
            node=node,
            max_ranks=num_ranks,
            address=Address("tcp", "127.0.0.1", port),
            token=TOKEN,
            tls=None,
            timeout_s=30.0,
        )

    def _start(self, plan: RankPlan) -> Rank:
        process = SimpleNamespace(pid=self.pid, send_signal=lambda number: None)
        self.started.append(Rank(plan, Child("rank", cast(ChildProcess, process), is_foreign=True), ()))
        return self.started[-1]

    def end_last(self, status: int) -> tuple[str | None, float | None]:
        """End the last rank; return the message, and the pause before the start of its replacement."""
        rank, rank.status = self.started[-1], status
        message = self.elastic.ended(rank)
        due_s = self.elastic.next_start_s()
        if due_s is None:
            return message, None
        pause_s = due_s - time.monotonic()
        assert self.elastic.replace(self.processes, due_s - 0.01) == []
        assert self.elastic.replace(self.processes, due_s) == [self.started[-1]]
        return message, pause_s


@pytest.fixture
def run() -> Iterator[Run]:
    found = Run()
    found.elastic.start_all()
    with found.elastic, contextlib.closing(found.processes):
        yield found


@pytest.mark.parametrize("takes_part", [False, True])
def test_ranks_that_fail_early_are_replaced_five_times(
    run: Run, monkeypatch: pytest.MonkeyPatch, *, takes_part: bool
) -> None:
    monkeypatch.setattr(Coordinator, "has_joined", lambda self, member: takes_part)
    ends = [run.end_last(1) for _ in range(6)]
    assert [pause_s for _, pause_s in ends[:-1]] == pytest.approx([1.0, 2.0, 4.0, 8.0, 16.0], abs=0.5)
    assert ends[-1][1] is None
    assert ["It is not replaced, because 6 ranks in a row" in str(message) for message, _ in ends] == [False] * 5 + [
        True
    ]
    assert run.elastic.failure() is None


def test_ranks_that_are_killed_after_they_took_part_are_always_replaced(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Coordinator, "has_joined", lambda self, member: True)
    pauses = [run.end_last(-signal.SIGKILL)[1] for _ in range(10)]
    assert pauses == pytest.approx([0.0] * 10, abs=0.5)


def test_ranks_that_are_stopped_for_too_long_are_killed_and_always_replaced(run: Run) -> None:
    """The ranks do not even take part."""
    process = subprocess.Popen(["sleep", "60"])
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    try:
        run.pid = process.pid
        run.end_last(-signal.SIGKILL)
        pauses = []
        for _ in range(8):
            assert run.elastic.kill_stopped(0.0) == []
            assert ["was stopped for 30 s" in note for note in run.elastic.kill_stopped(60.0)] == [True]
            pauses.append(run.end_last(-signal.SIGKILL)[1])
    finally:
        process.kill()
        process.wait()
    assert pauses == pytest.approx([0.0] * 8, abs=0.5)


def test_the_number_of_ranks_follows_the_wanted_number() -> None:
    wanted = 3
    layout = lay_out_node(nproc_per_node=3, nnodes=1, node_rank=0, master_addr=None, master_port=None)

    def plan(layout: Layout) -> list[RankPlan]:
        return [RankPlan(rank=rank, environment={}, log_prefix="") for rank in layout.ranks]

    growth = RankGrowth(lambda: wanted, layout, plan)
    run = Run(growth=growth)
    killed: list[int] = []
    with run.elastic, contextlib.closing(run.processes):
        run.elastic.start_all()
        assert run.elastic.replace(run.processes, time.monotonic()) == []
        wanted = 5
        started = run.elastic.replace(run.processes, time.monotonic())
        assert [rank.rank for rank in started] == [3, 4]
        wanted = 0  # at least --min-ranks remain
        for rank in run.started:
            cast(Any, rank.child.process).send_signal = lambda _, number=rank.rank: killed.append(number)
        assert run.elastic.replace(run.processes, time.monotonic()) == []
        assert sorted(killed) == [1, 2, 3, 4]
        message, pause_s = run.end_last(-signal.SIGKILL)
        assert (message, pause_s) == ("paceline run: rank 4 was ended, because the number of ranks is now 1", None)


def test_a_node_has_given_up_when_none_of_its_ranks_is_replaced(run: Run) -> None:
    for _ in range(5):
        run.end_last(1)
        assert not run.elastic.has_given_up
    run.end_last(1)
    assert run.elastic.has_given_up


def test_no_rank_starts_after_the_end_of_node_0() -> None:
    port = free_port()
    first = Run(port, num_ranks=6)
    second = Run(port, node=1, num_ranks=6)
    first.elastic.close()
    second.elastic.start_all()
    assert second.started == []
    assert "node 0" in str(second.elastic.failure())
    second.elastic.close()


def test_nodes_with_different_numbers_of_ranks_do_not_wait_for_each_other() -> None:
    port = free_port()
    with Run(port, num_ranks=6).elastic, Run(port, node=1, num_ranks=9).elastic as second:
        second.start_all()
        assert "9 ranks, and node 0 for 6" in str(second.failure())


def test_a_failure_at_the_end_of_the_last_rank_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    processes = RankProcesses()
    loop = RunLoop(
        processes, Screen(None), Tracebacks(), world_size=1, log_dir=None, find_lost_server=lambda: "no rank is left"
    )
    with contextlib.closing(processes), Signals(processes) as signals:
        assert loop.run(signals) == 1
    assert "no rank is left" in capfd.readouterr().err


def test_a_killed_rank_does_not_cause_the_later_failure_of_its_run(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    tracebacks, ended = Tracebacks(), run.started[-1:]

    def reap(rank: Rank) -> None:
        rank.status = -signal.SIGKILL
        for line in (b"Traceback (most recent call last):\n", b"paceline.errors.RankLostError: it was declared lost\n"):
            tracebacks.feed(rank.rank, line, time.monotonic())  # of the new process with this number

    processes = SimpleNamespace(
        ranks=[], living=lambda: ended[:], find_ended=lambda: [ended.pop() for _ in ended[:]], reap=reap,
        signal=lambda number, *, groups: None,
    )  # fmt: skip
    loop = RunLoop(
        cast(RankProcesses, processes), Screen(None), tracebacks, world_size=3, log_dir=None,
        find_lost_server=lambda: "no rank is left", elastic=run.elastic,
    )  # fmt: skip
    with Signals(run.processes) as signals:
        assert loop.run(signals) == 1
    shown = capfd.readouterr().err
    assert "no rank is left" in shown
    assert "RankLostError" not in shown
