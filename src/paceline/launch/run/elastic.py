"""Run ranks that may die without ending the run: replace dead ranks, and serve the coordinator on node 0."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from typing_extensions import override

from paceline.closing import Closing
from paceline.launch.engines.engine import report
from paceline.launch.run.plan import Layout, RankPlan
from paceline.launch.run.processes import Rank, RankProcesses
from paceline.launch.run.setup import PATIENCE_S
from paceline.launch.supervisor import describe_status
from paceline.meeting.coordinator import CoordinatorAccess, CoordinatorServer
from paceline.meeting.coordinator_client import CoordinatorClient
from paceline.protocol.launchers import Launchers
from paceline.protocol.quorum import Coordinator
from paceline.strategies import ElasticOptions
from paceline.transport import TLS, Address
from paceline.transport.backoff import Backoff, reach

REPORT_TIMEOUT_S: Final = 300.0
"""Time limit for the ranks' reports after a failure. It is long: ranks may compute for minutes before they report."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_MOST_FAILED_STARTS: Final = 5
"""After this many early failures of ranks in a row, dead ranks are not replaced any more."""
_EARLY_S: Final = 60.0
"""A failure within this time of the rank's start is early."""
_KILLED: Final = (-signal.SIGKILL, -signal.SIGTERM)
"""Statuses of ranks that another process has killed. The failure is then not the script's."""


@dataclass(frozen=True, slots=True)
class RankGrowth:
    """A number of ranks that changes during a run on one node."""

    num_wanted: Callable[[], int]
    layout: Layout
    plan_ranks: Callable[[Layout], list[RankPlan]]


class ElasticRun(Closing):
    """Starts the ranks of this node, and a new process for each dead rank. Node 0 also serves the coordinator."""

    def __init__(
        self,
        options: ElasticOptions,
        plans: Sequence[RankPlan],
        start: Callable[[RankPlan], Rank],
        *,
        growth: RankGrowth | None = None,
        node: int,
        max_ranks: int,
        address: Address,
        token: str,
        tls: TLS | None,
        timeout_s: float,
    ) -> None:
        """`start` starts a rank's process. The launcher of node 0 serves the coordinator at `address`.

        More nodes than at the start may join, until there are `max_ranks` ranks. With `growth`, the number of this
        node's ranks changes. A launcher is lost if node 0 receives no message from it for `timeout_s` seconds. Raises
        AddressError on node 0 if the address is not free, and DeadlineError on another node if node 0 does not answer.
        """
        self._start = start
        self._plans = {plan.rank: plan for plan in plans}
        self._ranks: dict[int, Rank] = {}
        """The living ranks by the unique number (incarnation) of their process."""
        self._started_s: dict[int, float] = {}
        self._stopped_s: dict[int, float] = {}
        """The times since which processes are stopped, by incarnation."""
        self._timeout_s = timeout_s
        self._due: list[tuple[float, int]] = []
        """The replacements to start: the time of the start and the number of the rank."""
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._num_failed_starts = 0
        self._has_given_up = self._has_finished = False
        self._growth, self._min_ranks = growth, options.min_ranks
        self._expelled: set[int] = set()
        """Living processes that are killed because they were declared lost or were stopped, or are not needed."""
        self._is_over = False
        self._coordinator: CoordinatorAccess
        if node:
            self._coordinator = reach(
                lambda: CoordinatorClient(
                    address, token, tls, self._expel, node=node, num_ranks=options.num_ranks, timeout_s=timeout_s
                ),
                PATIENCE_S,
                name="node 0",
                on_wait=lambda: report(f"waiting up to {PATIENCE_S:g} s for node 0 at {address.netloc}"),
            )
        else:
            rules = Coordinator(
                range(options.num_ranks),
                min_ranks=options.min_ranks,
                max_ranks=max_ranks,
                report_timeout_s=REPORT_TIMEOUT_S,
                max_changes=options.max_changes,
            )
            launchers = Launchers(options.num_ranks, timeout_s=timeout_s, start_by_s=time.monotonic() + PATIENCE_S)
            self._coordinator = CoordinatorServer(rules, launchers, address, token, tls, self._expel)

    def start_all(self) -> None:
        for number in self._plans:
            self._start_rank(number)

    def _start_rank(self, number: int) -> Rank | None:
        member = self._coordinator.started(number)
        if member is None:
            return None
        self._started_s[member] = time.monotonic()
        plan = self._plans[number]
        rank = self._start(replace(plan, environment={**plan.environment, "PACELINE_INCARNATION": str(member)}))
        self._ranks[member] = rank
        return rank

    def failure(self) -> str | None:
        """Return the reason why the ranks cannot continue; None if they can."""
        return self._coordinator.failure

    @property
    def has_given_up(self) -> bool:
        """Whether a rank of this node was not replaced any more, and no rank of this node has ended with status 0."""
        return self._has_given_up and not self._has_finished

    @property
    def must_wait(self) -> bool:
        """Whether this launcher continues without a living rank: a rank will start, or other launchers need node 0."""
        if self._coordinator.failure is not None:
            return False
        return self._coordinator.must_serve or (bool(self._due) and not self._is_over)

    def notes(self) -> list[str]:
        """Return new notes for the user about other nodes."""
        return self._coordinator.take_notes()

    def kill_stopped(self, time_s: float) -> list[str]:
        """Kill ranks that were stopped (SIGSTOP) for too long, so that they are replaced. Return notes for the user."""
        stopped = {member for member, rank in self._ranks.items() if _is_stopped(rank.child.process.pid)}
        self._stopped_s = {member: self._stopped_s.get(member, time_s) for member in stopped}
        notes: list[str] = []
        for member, since_s in self._stopped_s.items():
            if time_s >= since_s + self._timeout_s:
                notes.append(f"rank {self._ranks[member].rank} was stopped for {self._timeout_s:g} s and is killed")
                self._expel(member)
        return notes

    def ended(self, rank: Rank) -> str | None:
        """Handle the end of a rank. Return a message for the user; None if the status is 0."""
        member = next(member for member, other in self._ranks.items() if other is rank)
        del self._ranks[member]
        life_s = time.monotonic() - self._started_s.pop(member)
        took_part = self._coordinator.ended(member, is_failure=bool(rank.status))
        is_expelled = member in self._expelled
        self._expelled.discard(member)
        if not rank.status:
            self._has_finished = True
            self._is_over = self._is_over or took_part  # the training is over, unless the rank never took part
            return None
        assert rank.status is not None
        text = f"paceline run: rank {rank.rank} {describe_status(rank.status)}"
        if self._is_over or self._coordinator.failure is not None:
            return text
        if rank.rank not in self._plans:
            return f"paceline run: rank {rank.rank} was ended, because the number of ranks is now {len(self._plans)}"
        if is_expelled or (took_part and (rank.status in _KILLED or life_s > _EARLY_S)):
            self._backoff.reset()
            self._num_failed_starts, pause_s = 0, 0.0
        else:
            self._num_failed_starts += 1
            pause_s = self._backoff.next_s()
        if self._num_failed_starts > _MOST_FAILED_STARTS:
            self._has_given_up = True
            return (
                f"{text}. It is not replaced, because {self._num_failed_starts} ranks in a row failed before they took "
                f"part or within {_EARLY_S:g} s of their start"
            )
        self._due.append((time.monotonic() + pause_s, rank.rank))
        return f"{text}. The other ranks continue, and a new rank {rank.rank} starts"

    def next_start_s(self) -> float | None:
        """Return the time of the next start of a replacement."""
        return min((due_s for due_s, _ in self._due), default=None)

    def replace(self, processes: RankProcesses, time_s: float) -> list[Rank]:
        """Start the replacements that are due, and return them."""
        if self._is_over or self._coordinator.failure is not None:
            self._due = []
        elif self._growth is not None:
            self._resize(self._growth, time_s)
        due = [number for due_s, number in self._due if due_s <= time_s]
        self._due = [(due_s, number) for due_s, number in self._due if due_s > time_s]
        processes.ranks = [rank for rank in processes.ranks if rank.status is None or rank.rank not in due]
        started = [self._start_rank(number) for number in due]
        return [rank for rank in started if rank is not None]

    def _resize(self, growth: RankGrowth, time_s: float) -> None:
        """Start ranks, or end those with the highest numbers, until the wanted number of ranks is planned."""
        wanted = max(growth.num_wanted(), self._min_ranks)
        if wanted > len(self._plans):
            for plan in growth.plan_ranks(growth.layout.with_ranks(wanted))[len(self._plans) :]:
                self._plans[plan.rank] = plan
                self._due.append((time_s, plan.rank))
        for number in range(wanted, len(self._plans)):
            del self._plans[number]
            self._due = [start for start in self._due if start[1] != number]
            for member in [member for member, rank in self._ranks.items() if rank.rank == number]:
                self._expel(member)

    def _expel(self, member: int) -> None:
        rank = self._ranks.get(member)
        if rank is not None:
            self._expelled.add(member)
            rank.child.kill()

    @override
    def close(self) -> None:
        self._coordinator.close()


def _is_stopped(pid: int) -> bool:
    import psutil  # here, because its import takes time at the start

    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False  # the process has ended
