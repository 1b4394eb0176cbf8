"""A worker of a simulated cluster: it leases shards, and for each reads, thinks, pushes and ticks some iterations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from typing_extensions import override

from paceline.protocol.buckets import bucket_set
from paceline.protocol.client import Request
from paceline.protocol.jobs.shards import Granted
from paceline.protocol.scheduler import View
from paceline.simulation.client import Client
from paceline.simulation.messages import (
    Answer,
    Going,
    JoinedGate,
    Key,
    LeaseAnswer,
    LeaseRequest,
    Map,
    PrepareView,
    ShardDone,
    ShardDoneOk,
    Stale,
    Thrown,
    Value,
    Welcomed,
)
from paceline.simulation.network import Connection

if TYPE_CHECKING:
    from paceline.simulation.cluster import Cluster


class _Push:
    __slots__ = ("iteration", "requests", "values")

    def __init__(self, iteration: int, values: tuple[Value, ...], requests: list[Request]) -> None:
        self.iteration = iteration
        self.values = values
        self.requests = requests


class Worker(Client):
    """A loop around a client."""

    def __init__(self, host: str, name: str, cluster: Cluster) -> None:
        super().__init__(host, name, cluster)
        self.is_through = False
        self._lease: Granted | None = None
        self._iterations_left = 0
        self._request = 0
        self._awaits_lease = False
        self._over: dict[int, tuple[Granted, int]] = {}  # lease that is through → its grant, the clock behind it
        self._done: set[Key] = set()
        self._reported: set[int] = set()
        self._is_resting = False
        self._unsafe: list[_Push] = []  # not acknowledged, or under sequential not known to be stable
        self.handlers = {
            Welcomed: self.on_welcomed,
            Thrown: self.on_thrown,
            Map: self.on_map,
            PrepareView: self.on_prepare,
            LeaseAnswer: self._on_lease,
            ShardDoneOk: self._on_done_ok,
            JoinedGate: self.on_joined,
            Answer: self.on_answer,
            Stale: self.on_stale,
        }

    @property
    def is_counted(self) -> bool:
        """Whether it takes part in iterations."""
        return self.core.takes_part

    @property
    def finished_clock(self) -> int:
        """How many iterations it has finished."""
        return self.core.clock

    @override
    def welcomed(self) -> None:
        self.cluster.oracle.workers.append(self)

    @override
    def mapped(self, former: View | None, new: View) -> None:
        is_first = not self.core.version and bool(new.version)
        super().mapped(former, new)
        if is_first:
            self.execute(self.core.join())

    @override
    def joined(self) -> None:
        if self._lease is not None:
            self._begin()
        else:
            self._ask_for_lease()

    # Shards.

    @override
    def attached(self) -> None:
        if self._awaits_lease:
            self.tell(LeaseRequest(self.incarnation, self._request))
        self._reported = set()
        self._report_done()
        if self.is_leaving and self.is_through:
            self.tell(Going(self.incarnation))

    @override
    def held(self) -> tuple[tuple[Granted, ...], frozenset[Key]]:
        held = [grant for grant, _ in self._over.values()]
        return (*held, *([] if self._lease is None else [self._lease])), frozenset(self._done)

    def _ask_for_lease(self) -> None:
        self._request += 1
        self._awaits_lease = True
        self.tell(LeaseRequest(self.incarnation, self._request))

    def _on_lease(self, _: Connection, frame: LeaseAnswer) -> None:
        if frame.number != self._request or not self._awaits_lease:
            return
        self._awaits_lease = frame.wait
        if frame.granted is not None:
            self._lease = frame.granted
            self._iterations_left = self.cluster.random.choice(self.cluster.settings.iterations_per_shard)
            self._wake()
            return
        self.is_leaving |= not frame.wait
        self._rest()
        if self.is_leaving:
            self._go()

    def _wake(self) -> None:
        """Begin with a lease, unless this worker is about to rest: then behind that."""
        if self._is_resting or self.core.is_joining:
            return
        if self.is_counted:
            self._begin()
        else:
            self.execute(self.core.join())

    def _rest(self) -> None:
        """Find out when all it pushed is safe, and let nobody wait for this worker."""
        if self.is_counted and not self._is_resting:
            self._is_resting = True
            self.until([request for push in self._unsafe for request in push.requests], self._read_before_rest)

    def _read_before_rest(self) -> None:
        clock = self.core.clock
        if self.cluster.is_sequential and (self._unsafe or self.core.unstable()):
            self.until(
                self.pull(self.cluster.settings.all_buckets), lambda: self._have_read(clock, self._read_before_rest)
            )
        else:
            self.until(self.retire(), self._rested)

    def _rested(self) -> None:
        self._is_resting = False
        if self._lease is not None:
            self._wake()
        elif self.is_leaving:
            self._go()

    def _report_done(self) -> None:
        first = self._unsafe[0].iteration if self._unsafe else self.finished_clock
        for lease, (_, clock) in self._over.items():
            if first >= clock and lease not in self._reported:
                self._reported.add(lease)
                self.tell(ShardDone(self.incarnation, lease))

    def _on_done_ok(self, _: Connection, frame: ShardDoneOk) -> None:
        over = self._over.pop(frame.lease, None)
        if over is not None:
            self._done.add((over[0].epoch, over[0].file, over[0].shard))
        if self.is_leaving:
            self._go()

    def leave(self) -> None:
        """Go after the current shard."""
        self.is_leaving = True
        if self._lease is None and self.member is not None:
            self._rest()
            self._go()

    def _go(self) -> None:
        """Leave the cluster, if nothing is left to do or to say."""
        if self._lease is None and not self._over and not self.is_counted and not self._is_resting:
            self.is_leaving = self.is_through = True
            self.tell(Going(self.incarnation))

    # Iterations.

    def _begin(self) -> None:
        used, random = self.cluster.settings.num_buckets, self.cluster.random
        buckets = self.cluster.settings.all_buckets
        if not self.cluster.is_sequential:
            buckets = bucket_set(random.sample(range(used), random.randint(1, min(4, used))))
        clock = self.core.clock
        self.until(self.pull(buckets), lambda: self._have_read(clock, self._think))

    def _have_read(self, clock: int, then: Callable[[], None]) -> None:
        """Take note that all buckets were read in iteration `clock`: what is of iterations before it is stable."""
        if self.cluster.is_sequential:
            self._acknowledge(push for push in list(self._unsafe) if push.iteration < clock)
        then()

    def _acknowledge(self, pushes: Iterable[_Push]) -> None:
        for push in pushes:
            self._unsafe.remove(push)
            self.cluster.oracle.acknowledged(self.incarnation, push.values)
        self._report_done()

    @override
    def on_answer(self, connection: Connection, frame: Answer) -> None:
        super().on_answer(connection, frame)
        if not self.cluster.is_sequential:
            self._acknowledge(push for push in list(self._unsafe) if all(each.is_done for each in push.requests))

    def _think(self) -> None:
        low, high = self.cluster.settings.think_s
        self.later(low + (high - low) * self.cluster.random.random(), self._work)

    def _work(self) -> None:
        random, settings = self.cluster.random, self.cluster.settings
        iteration = self.core.clock
        for _ in range(random.choice((1, 1, 2, 3))):
            buckets = random.sample(range(settings.num_buckets), random.randint(1, settings.num_buckets))
            values = []
            for bucket in sorted(buckets):
                value = random.getrandbits(40)
                values.append((bucket, self.cluster.oracle.push(self.incarnation, iteration, bucket, value), value))
            self._unsafe.append(_Push(iteration, tuple(values), self.push(tuple(values))))
        self.tick()
        self._iterations_left -= 1
        if self._iterations_left:
            self._begin()
            return
        assert self._lease is not None
        self._over[self._lease.lease] = self._lease, self.core.clock
        self._lease = None
        if self.is_leaving:
            self._rest()
        else:
            self._ask_for_lease()
