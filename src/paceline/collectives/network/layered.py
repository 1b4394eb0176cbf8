"""All-reduce between hosts with several ranks each: shared memory in a host, a schedule between hosts.

The steps are a reduce to the leader (the first rank of the host), an all-reduce among the leaders, and a broadcast from
the leader; only leaders use the network.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.collectives.arrays import view_bytes
from paceline.collectives.engine import Area, Order, Reduction, copy
from paceline.collectives.network.executing import execute, scale
from paceline.collectives.network.executor import Blocks, ScheduleExecutor
from paceline.collectives.schedules import ALGORITHMS, Schedule
from paceline.collectives.schedules.base import renamed
from paceline.collectives.shared.engine import SharedMemory


class Layered:
    """All-reduce for ranks on several hosts; the network engine runs other collectives."""

    def __init__(
        self, executor: ScheduleExecutor, shared: SharedMemory | None, hosts: Sequence[int], rank: int
    ) -> None:
        """`shared` is the engine for the ranks of this host; None if this rank is alone on it."""
        self._executor, self._shared = executor, shared
        self._leaders = [hosts.index(host) for host in sorted(set(hosts))]
        self._is_leader = rank in self._leaders
        number = len(self._leaders)
        self._barrier = ALGORITHMS["barrier"]["dissemination"].schedule(rank, len(hosts))
        self._schedule: Schedule | None = None
        if self._is_leader:
            name = "halving-doubling" if number & (number - 1) == 0 else "ring"
            plain = ALGORITHMS["all_reduce"][name].schedule(self._leaders.index(rank), number)
            self._schedule = Schedule(plain.num_blocks, renamed(plain.rounds, self._leaders))

    def all_reduce(self, order: Order, source: Area, target: Area, reduction: Reduction) -> None:
        sums = reduction._replace(scale=1.0)
        try:
            # The barrier creates the links, so that a host can report a mismatch that it finds in shared memory.
            execute(self._executor, order, self._barrier, Blocks([]), None)
            if self._shared is not None:
                self._shared.reduce(order, source, target if self._is_leader else None, sums, 0)
            else:
                copy(source, target)
            if self._schedule is not None:
                blocks = Blocks.even(view_bytes(*target), self._schedule.num_blocks, reduction.item_bytes)
                execute(self._executor, order, self._schedule, blocks, sums)
                scale(target, reduction)
            if self._shared is not None:
                self._shared.broadcast(order, target, 0)
        except BaseException as error:  # both layers must report the error
            if self._shared is not None:
                self._shared.abort(error)
            self._executor.abort(order.call, order.sequence, error)
            raise
