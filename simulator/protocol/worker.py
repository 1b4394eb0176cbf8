"""The work of a protocol run. A poster posts jobs and receives reports. Workers lease shards, read, push and tick."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from typing_extensions import override

from paceline.protocol.buckets import bucket_set
from paceline.protocol.client import Request
from paceline.protocol.jobs import ALL_DONE, NONE_FREE, Job, JobAccount, JobSpec, JobState, Key, Lease, TakenReport
from paceline.protocol.jobs import messages as jobs
from paceline.protocol.membership import Role
from paceline.protocol.scheduler.messages import Heartbeat, Leave
from paceline.protocol.scheduler.views import View
from simulator.oracle import Value
from simulator.protocol.client import SimulatedClient
from simulator.protocol.links import MessageEnd
from simulator.protocol.messages import EndWork
from simulator.protocol.node import SimulatedNode, Surroundings
from simulator.protocol.programs import Performer, Program
from simulator.settings import RunSettings

_POLL_S: Final = 0.05


class Work:
    """The job of a cluster, and its progress."""

    def __init__(self, settings: RunSettings, *, has_reports: bool) -> None:
        keys = [(epoch, 0, shard) for epoch in range(settings.epochs) for shard in range(settings.num_shards)]
        self.expected: dict[Key, float] = {key: 1.0 + (5 * key[0] + key[2]) % 4 for key in keys}
        """The number of examples of each shard."""
        self.has_reports = has_reports
        """Whether workers report on some shards. If not, posters save accounts of the job (its finished shards)."""
        self.with_reports = [key for key in keys if has_reports and key[2] % 3]
        self.account: JobAccount | None = None
        """The account from which the next poster continues."""
        self.is_done = False


@dataclass(slots=True, eq=False)
class _UnsafePush:
    iteration: int
    values: tuple[Value, ...]
    requests: list[Request]


class SimulatedWorker(SimulatedClient):
    """A client that works on one shard after another, in some iterations per shard."""

    def __init__(self, name: str, around: Surroundings, work: Work) -> None:
        super().__init__(name, around)
        self._shards = work
        self._has_ended = False
        self._job = 0
        self._lease: Lease | None = None
        self._examples = 0.0
        self._finished: list[tuple[Lease, int, float]] = []  # lease, then clock and examples
        self._unsafe: list[_UnsafePush] = []  # not acknowledged, or (sequential) not known to be stable

    @property
    def is_counted(self) -> bool:
        return self.core.takes_part

    @property
    def finished_clock(self) -> int:
        return self.core.clock

    @override
    def welcomed(self) -> None:
        self.oracle.workers.append(self)

    @override
    def view_changed(self, view: View) -> None:
        is_first = not self.core.version and bool(view.version)
        super().view_changed(view)
        if is_first:
            self.work.perform(self._work())

    def leave(self) -> None:
        if not self.is_leaving:
            self.is_leaving = True
            if self._lease is None and self.is_member and not self.work.is_waiting:
                self.work.perform(self._retire())

    # The job.

    def _work(self) -> Program:
        while not self._has_ended:
            job = yield jobs.GetJob(after=self._job)
            if not isinstance(job, Job):
                return
            if job.number < 0:
                self.is_leaving = True
                yield from self._retire()
                return
            if job.number != self._job:
                self._job, self._examples, self._finished = job.number, 0.0, []
            yield self.join()
            yield from self._train()

    def _train(self) -> Program:
        must_wait = False
        while not self.is_leaving:
            lease = yield jobs.TakeLease(job=self._job, wait=must_wait)
            if not isinstance(lease, Lease):  # a new scheduler does not know the job
                self.kill()
                return
            if lease.lease == ALL_DONE:
                break
            must_wait = lease.lease == NONE_FREE
            if must_wait:
                yield from self._retire()
            else:
                yield from self._learn(lease)
        if not self._has_ended:
            yield from self._retire()

    def _learn(self, lease: Lease) -> Program:
        self._lease = lease
        num_iterations = self.world.random.choice(self.settings.iterations_per_shard)
        if lease.shard >= self.settings.num_shards:
            num_iterations = 0
            self.notify(jobs.FileEnded(job=self._job, file=0, num_shards=self.settings.num_shards))
        if num_iterations and not self.is_counted:
            yield self.join()
        for _ in range(num_iterations):
            yield from self._iterate()
        self._lease = None
        self._examples += self._shards.expected.get(lease.key, 0)
        if lease.key in self._shards.with_reports:
            self.request(jobs.Report(job=self._job, fields={"shard": lease.key}, shard=lease.key))
        self._finished.append((lease, self.core.clock, self._examples))
        self._report_done()

    def _retire(self) -> Program:
        """Wait until all pushes are acknowledged and stable. Then retire, and leave if requested."""
        yield [request for push in self._unsafe for request in push.requests]
        while self.settings.is_sequential and (self._unsafe or self.core.unstable()):
            clock = self.core.clock
            yield self.pull(self.settings.all_buckets)
            self._have_read(clock)
        if self.is_counted:
            yield self.retire()
        self._report_done()
        if self.is_leaving:
            yield jobs.JobStatus(job=self._job)  # after the answer, all earlier messages have arrived
            self._has_ended = True
            self.notify(Leave())

    def _report_done(self) -> None:
        first = self._unsafe[0].iteration if self._unsafe else self.finished_clock
        while self._finished and first >= self._finished[0][1]:
            lease, _, examples = self._finished.pop(0)
            self.notify(jobs.LeaseDone(job=self._job, lease=lease.lease, progress=self._counters(examples)))

    def _counters(self, examples: float) -> dict[str, float]:
        return {"job": self._job, "examples": examples}

    # Iterations.

    def _iterate(self) -> Program:
        settings, random, clock = self.settings, self.world.random, self.core.clock
        buckets, num_buckets = settings.all_buckets, settings.num_buckets
        if not self.settings.is_sequential:
            buckets = bucket_set(random.sample(range(num_buckets), random.randint(1, min(4, num_buckets))))
        yield self.pull(buckets)
        self._have_read(clock)
        yield settings.think_s * random.random()
        for _ in range(random.choice((1, 1, 2, 3))):
            self._push_random(clock)
        self.tick()
        self.notify(Heartbeat(progress=self._counters(self._examples + 0.5)))  # 0.5: a part of the shard

    def _push_random(self, iteration: int) -> None:
        random, num_buckets = self.world.random, self.settings.num_buckets
        values = []
        for bucket in sorted(random.sample(range(num_buckets), random.randint(1, num_buckets))):
            value = random.getrandbits(40)
            values.append((bucket, self.oracle.push(self.incarnation, iteration, bucket, value), value))
        self._unsafe.append(_UnsafePush(iteration, tuple(values), self.push(tuple(values))))

    def _have_read(self, clock: int) -> None:
        """Record that all buckets were read in iteration `clock`. So if sequential, earlier iterations are stable."""
        if self.settings.is_sequential:
            self._acknowledge(push for push in list(self._unsafe) if push.iteration < clock)

    def _acknowledge(self, pushes: Iterable[_UnsafePush]) -> None:
        for push in pushes:
            self._unsafe.remove(push)
            self.oracle.acknowledged(self.incarnation, push.values)
        self._report_done()

    @override
    def receive_from_peer(self, connection: MessageEnd, message: Any) -> None:
        super().receive_from_peer(connection, message)
        if not self.settings.is_sequential:
            self._acknowledge(push for push in list(self._unsafe) if all(request.is_done for request in push.requests))


class Poster(SimulatedNode):
    """An observer that posts the job. After its death, another poster continues from the last account."""

    def __init__(self, name: str, around: Surroundings, work: Work) -> None:
        super().__init__(name, around, Role.OBSERVER)
        self._shards = work

    @override
    def welcomed(self) -> None:
        Performer(self).perform(self._work())

    def _work(self) -> Program:
        while not self._shards.is_done:
            job: Any = yield jobs.PostJob(spec=self._spec())
            yield from self._follow(job)
        while True:
            yield EndWork()
            yield 4 * _POLL_S  # repeated for workers that join later

    def _spec(self) -> JobSpec:
        settings, account, random = self.settings, self._shards.account, self.world.random
        spec = JobSpec(
            description=b"",
            files=(random.choice((settings.num_shards, None)),) if account is None else account.files,
            epochs=settings.epochs,
            assignment=random.choice(("first-come", "strided")),
            done=() if account is None else account.done,
            progress={} if account is None else account.progress,
        )
        self.oracle.posted(spec.done)
        return spec

    def _follow(self, job: int) -> Program:
        """Receive the reports of a job until the job is finished or must be posted again."""
        while not self._shards.is_done:
            state = yield jobs.JobStatus(job=job)
            if not isinstance(state, JobState) or state.failed:  # a new scheduler does not know the job
                return
            if state.num_reports:
                report = yield jobs.TakeReports(job=job)
                if isinstance(report, TakenReport):
                    self.oracle.reported(report.fields["shard"])
            elif state.finished:
                self.oracle.finished(state, self._shards.expected, self._shards.with_reports)
                self._shards.is_done = True
            else:
                if not self._shards.has_reports:
                    self.request(jobs.GetAccount(job=job), self._take_account)
                yield _POLL_S

    def _take_account(self, account: JobAccount | Exception) -> None:
        if isinstance(account, JobAccount):
            self._shards.account = account
