"""A worker of a simulated cluster: it leases shards, and for each reads, thinks, pushes and ticks some iterations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from typing_extensions import override

from paceline.protocol.buckets import bucket_set
from paceline.protocol.client import Request
from paceline.protocol.jobs import ALL_DONE, NOTHING_NOW, Job, Key, Lease, messages
from paceline.protocol.scheduler import View
from simulator.client import SimulatedClient
from simulator.messages import AnswerFrame, Going, Value
from simulator.network import SimulatedConnection

if TYPE_CHECKING:
    from simulator.cluster import Cluster


class _UnsafePush:
    __slots__ = ("iteration", "requests", "values")

    def __init__(self, iteration: int, values: tuple[Value, ...], requests: list[Request]) -> None:
        self.iteration = iteration
        self.values = values
        self.requests = requests


class SimulatedWorker(SimulatedClient):
    """A loop around a client."""

    def __init__(self, host: str, name: str, cluster: Cluster) -> None:
        super().__init__(host, name, cluster)
        self.is_through = False
        self._job = 0
        self._lease: Lease | None = None
        self._iterations_left = 0
        self._examples = 0.0
        self._over: list[tuple[Lease, int, float]] = []  # leases that are through, the clock and count behind each
        self._unsafe: list[_UnsafePush] = []  # not acknowledged, or under sequential not known to be stable

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
            self._seek()

    # The job.

    @override
    def attached(self) -> None:
        if self.is_through:
            self.tell(Going(self.incarnation))

    def _seek(self) -> None:
        self.line.ask(messages.GetJob(after=self._job), self._on_job)

    def _on_job(self, job: Job | Exception) -> None:
        if self.is_leaving or not isinstance(job, Job):
            return
        if job.number < 0:
            self.leave()
            return
        if job.number != self._job:
            self._job, self._examples, self._over = job.number, 0.0, []
        self.join(self._go_on_with_job)

    def _go_on_with_job(self) -> None:
        if self.is_leaving:
            self._rest(self._seek)
        else:
            self._ask_for_lease(wait=False)

    def _ask_for_lease(self, *, wait: bool) -> None:
        self.line.ask(messages.TakeLease(job=self._job, wait=wait), self._on_lease)

    def _on_lease(self, lease: Lease | Exception) -> None:
        if self.is_leaving:  # a lease goes back when its worker goes
            return
        if not isinstance(lease, Lease):  # it has come to a scheduler that knows nothing of its job
            self.cluster.ended(self)
        elif lease.lease == ALL_DONE:
            self._rest(self._seek)
        elif lease.lease == NOTHING_NOW:
            self._rest(lambda: self._ask_for_lease(wait=True))
        else:
            self._lease = lease
            self._iterations_left = self.cluster.random.choice(self.cluster.settings.iterations_per_shard)
            if lease.shard >= self.cluster.settings.num_shards:
                self._iterations_left = 0
                self.line.tell(messages.FileEnded(job=self._job, file=0, num_shards=self.cluster.settings.num_shards))
            self._wake()

    def _wake(self) -> None:
        """Begin with a lease."""
        if self._iterations_left == 0:
            self._end_shard()
        elif self.is_counted:
            self._begin()
        else:
            self.join(self._begin)

    def _rest(self, then: Callable[[], None]) -> None:
        """Find out when all it pushed is safe, let nobody wait for this worker, and then go on."""
        self.until(
            [request for push in self._unsafe for request in push.requests], lambda: self._read_before_rest(then)
        )

    def _read_before_rest(self, then: Callable[[], None]) -> None:
        clock = self.core.clock
        if self.cluster.is_sequential and (self._unsafe or self.core.unstable()):
            self.until(
                self.pull(self.cluster.settings.all_buckets),
                lambda: self._have_read(clock, lambda: self._read_before_rest(then)),
            )
        elif self.is_counted:
            self.until(self.retire(), lambda: self._rested(then))
        else:
            self._rested(then)

    def _rested(self, then: Callable[[], None]) -> None:
        self._report_done()
        if self.is_leaving:
            self.line.ask(messages.JobStatus(job=self._job), lambda _: self._go())  # what was said before has come then
        else:
            then()

    def _report_done(self) -> None:
        first = self._unsafe[0].iteration if self._unsafe else self.finished_clock
        while self._over and first >= self._over[0][1]:
            lease, _, examples = self._over.pop(0)
            self.line.tell(messages.LeaseDone(job=self._job, lease=lease.lease, progress=self._counters(examples)))

    def _counters(self, examples: float) -> dict[str, float]:
        return {"job": self._job, "examples": examples}

    def leave(self) -> None:
        """Go after the current shard."""
        if not self.is_leaving:
            self.is_leaving = True
            if self._lease is None and self.member is not None and not self.is_busy:
                self._rest(self._seek)

    def _go(self) -> None:
        self.is_through = True
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

    def _acknowledge(self, pushes: Iterable[_UnsafePush]) -> None:
        for push in pushes:
            self._unsafe.remove(push)
            self.cluster.oracle.acknowledged(self.incarnation, push.values)
        self._report_done()

    @override
    def on_answer(self, connection: SimulatedConnection, frame: AnswerFrame) -> None:
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
            self._unsafe.append(_UnsafePush(iteration, tuple(values), self.push(tuple(values))))
        self.tick()
        self._iterations_left -= 1
        self.line.send_counters(self._counters(self._examples + 0.5))  # some of the shard
        if self._iterations_left:
            self._begin()
        else:
            self._end_shard()

    def _end_shard(self) -> None:
        lease, self._lease = self._lease, None
        assert lease is not None
        self._examples += self.cluster.expected.get(lease.key, 0)
        if lease.key in self.cluster.with_reports:
            self.line.ask(messages.Report(job=self._job, fields={"shard": lease.key}, shard=lease.key))
        self._over.append((lease, self.core.clock, self._examples))
        self._report_done()
        self._go_on_with_job()


def examples_in(key: Key) -> float:
    """How many examples a shard has."""
    return 1.0 + (5 * key[0] + key[2]) % 4
