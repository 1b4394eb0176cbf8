"""Ranks that fail early are replaced after growing pauses. After six such failures in a row, no rank is replaced."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from typing import cast

import pytest

from paceline.launch.run.elastic import ElasticRun
from paceline.launch.run.plan import RankPlan
from paceline.launch.run.processes import Rank, RankProcesses
from paceline.launch.supervisor import Child
from paceline.protocol.quorum import Coordinator
from paceline.strategies import ElasticOptions
from paceline.transport import Address, make_token


class Run:
    """A run of three ranks without processes."""

    def __init__(self) -> None:
        self.started: list[Rank] = []
        self.processes = RankProcesses()
        plans = [RankPlan(rank=rank, environment={}) for rank in range(3)]
        self.elastic = ElasticRun(
            ElasticOptions(min_ranks=1, num_ranks=3),
            plans,
            self._start,
            node=0,
            address=Address("tcp", "127.0.0.1", 0),
            token=make_token(),
            tls=None,
            timeout_s=30.0,
        )
        self.elastic.start_all()

    def _start(self, plan: RankPlan) -> Rank:
        self.started.append(Rank(plan, cast(Child, None), ()))
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
