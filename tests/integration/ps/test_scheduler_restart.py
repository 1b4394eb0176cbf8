"""A scheduler dies and another scheduler replaces it. Members, leases, tables and results are recovered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.waiting import in_threads, wait_until

from paceline.errors import AddressError, ConnectionLostError, PeerError
from paceline.protocol import BoundedDelay, Eventual, Member, Role
from paceline.protocol.jobs import ALL_DONE, NONE_FREE, Job, JobSpec, JobState, Key, Lease, TakenReport
from paceline.protocol.scheduler.cluster import Phase
from paceline.ps import SGD, Scheduler, SchedulerLink, make_node_name, messages
from paceline.ps.scheduler.link import LinkHooks
from paceline.testing import serve_in_thread
from paceline.transport import Channel, Hello, Listener, SocketTransport

from .harness import PATIENCE_S, TOKEN, Cluster, break_off, floats


class GuardedTransport(SocketTransport):
    """A transport over TCP only, so an address can be reused. A process that is shut out reaches no member."""

    def __init__(self) -> None:
        super().__init__(TOKEN)
        self.shut_out: set[str] = set()

    def connect(self, target: Any, hello: Hello, *, timeout_s: float = 10.0) -> Channel:
        if hello.name in self.shut_out:
            raise AddressError("shut out")
        return super().connect(target, hello, timeout_s=timeout_s)

    async def serve(self, handler: Any, hello: Hello, *, address: Any = None, unix: bool = True) -> Listener:
        return await super().serve(handler, hello, address=address, unix=False)


class Restartable(Cluster):
    """A cluster whose scheduler can be killed and replaced."""

    def __init__(self, **options: Any) -> None:
        self.doors = GuardedTransport()
        self.links: list[SchedulerLink] = []
        self.ended: list[SchedulerLink] = []
        self._later = ExitStack()
        super().__init__(transport=self.doors, heartbeat_timeout_s=5.0, **options)
        for node in self.nodes:
            node.link.hooks.tables = node.server.known_tables
            self.links.append(node.link)

    def member(self, rank: int | None = None, *, role: str = "worker", **options: Any) -> SchedulerLink:
        """Return a member's link to the scheduler, without connections to servers."""
        node = make_node_name(role)
        hello = Hello(role=role, name=node)
        link = SchedulerLink(self.doors, self.scheduler_address, hello, timeout_s=PATIENCE_S, **options)
        self._later.callback(link.close)
        link.register(messages.Register(node=node, role=Role(role), rank=rank))
        self.links.append(link)
        return link

    def end(self, link: SchedulerLink) -> None:
        """Simulate the end of a member's process while no scheduler runs."""
        break_off(link)
        self.links.remove(link)
        self.ended.append(link)

    def kill_scheduler(self) -> None:
        """Simulate the death of the scheduler: it sends no further data."""
        scheduler = self.scheduler

        def send_nothing() -> None:
            scheduler._execute = lambda *arguments: None  # type: ignore[method-assign]
            scheduler.close()

        self.served.call(send_nothing)
        self.stop_scheduler()
        wait_until(lambda: not any(link.calls.is_connected for link in self.links if not link.is_closing))

    def replace(self, **options: Any) -> Scheduler:
        """Start another scheduler at the same address."""
        changes = {"num_servers": len(self.nodes), "replicas": 0, "heartbeat_timeout_s": 5.0, **options}
        own = {name: changes.pop(name) for name in list(changes) if name in self.settings.__struct_fields__}
        self.scheduler = Scheduler(
            msgspec.structs.replace(self.settings, **own), **{"fail": self.failures.append, **changes}
        )
        self._scheduler_stack = self._later.enter_context(ExitStack())
        self.served = self._scheduler_stack.enter_context(
            serve_in_thread(
                self.scheduler, self.transport, hello=Hello(role="scheduler"), address=self.scheduler_address
            )
        )
        self._scheduler_stack.callback(lambda: self.served.call(self.scheduler.close))
        for link in self.ended:
            assert link.state.welcome is not None
            self.served.call(partial(self.scheduler.process_ended, link.state.welcome.incarnation))
        return self.scheduler

    def wait_back(self, *links: SchedulerLink, times: int = 1) -> None:
        """Wait until these processes are members again."""
        wait_until(lambda: all(link.reconnections == times for link in links or self.links))

    def __enter__(self) -> Restartable:
        return self

    def close(self) -> None:
        for link in self.links:
            link.close()
        super().close()
        self._later.close()


@pytest.fixture
def cluster() -> Iterator[Restartable]:
    with Restartable(servers=0, workers=2) as cluster:
        yield cluster


@pytest.fixture
def poster(cluster: Restartable) -> SchedulerLink:
    return cluster.member(role="observer")


def post(poster: SchedulerLink, *files: int | None, epochs: int = 1, assignment: str = "first-come") -> int:
    job = messages.PostJob(spec=JobSpec(description=b"work", files=files, epochs=epochs, assignment=assignment))
    return int(poster.call(job, int))


def begin(worker: SchedulerLink, after: int = 0) -> int:
    return int(worker.call(messages.GetJob(after=after), Job).number)


def take(worker: SchedulerLink, job: int, *, wait: bool = False) -> Lease:
    lease: Lease = worker.call(messages.TakeLease(job=job, wait=wait), Lease)
    return lease


def finish(worker: SchedulerLink, job: int, lease: Lease, examples: float) -> None:
    worker.notify(messages.LeaseDone(job=job, lease=lease.lease, progress={"job": job, "examples": examples}))


def state(poster: SchedulerLink, job: int) -> JobState:
    found: JobState = poster.call(messages.JobStatus(job=job), JobState)
    return found


def count_calls(target: Any, name: str, condition: Callable[..., bool]) -> list[None]:
    """Count the calls of a method for which a condition holds."""
    calls: list[None] = []
    method = getattr(target, name)

    def counted(*args: Any) -> Any:
        if condition(*args):
            calls.append(None)
        return method(*args)

    setattr(target, name, counted)
    return calls


def member_rank(link: SchedulerLink) -> int:
    assert link.state.welcome is not None
    return link.state.welcome.rank


def test_members_leases_and_counters_survive(cluster: Restartable, poster: SchedulerLink) -> None:
    workers = [cluster.member(rank) for rank in range(2)]
    job = post(poster, 3, 3)
    assert [begin(worker) for worker in workers] == [job, job]
    before = poster.get_view()
    first, second = take(workers[0], job), take(workers[1], job)
    finish(workers[0], job, first, 10)
    third = take(workers[0], job)
    assert state(poster, job).done == 1
    cluster.kill_scheduler()
    finish(workers[0], job, third, 20)  # while no scheduler runs
    cluster.replace()
    cluster.wait_back()
    after = poster.get_view()
    assert after.epoch > before.epoch
    assert after.members == before.members
    wait_until(lambda: state(poster, job).done == 2)
    finish(workers[1], job, second, 5)
    seen = [first, second, third]
    examples = [20.0, 5.0]
    for turn in range(3):
        lease = take(workers[turn % 2], job)
        seen.append(lease)
        examples[turn % 2] += 10
        finish(workers[turn % 2], job, lease, examples[turn % 2])
    assert sorted((lease.file, lease.shard) for lease in seen) == [(f, s) for f in range(2) for s in range(3)]
    assert len({lease.lease for lease in seen}) == 6
    assert [take(worker, job, wait=True).lease for worker in workers] == [ALL_DONE, ALL_DONE]
    assert not state(poster, job).finished
    for worker in workers:
        worker.start(messages.GetJob(after=job), Job)
    wait_until(lambda: state(poster, job).finished)
    ended = state(poster, job)
    assert (ended.done, ended.total, ended.lost_workers) == (6, 6, 0)
    assert ended.progress == {"examples": 55.0}
    assert post(poster, 1) > job


def test_several_schedulers_in_a_row_are_replaced(cluster: Restartable, poster: SchedulerLink) -> None:
    workers = [cluster.member(rank) for rank in range(2)]
    job = post(poster, 8)
    for worker in workers:
        begin(worker)
    seen = []
    for times in range(1, 5):
        for number, worker in enumerate(workers):
            lease = take(worker, job)
            seen.append(lease.shard)
            if number:
                cluster.kill_scheduler()
                cluster.replace()
            finish(worker, job, lease, 10.0 * times)
        cluster.wait_back(times=times)
    assert sorted(seen) == list(range(8))
    wait_until(lambda: state(poster, job).done == 8)
    assert state(poster, job).progress == {"examples": 80.0}


def test_pending_requests_are_sent_again(cluster: Restartable, poster: SchedulerLink) -> None:
    works, waits, idles = (cluster.member(rank) for rank in range(3))
    job = post(poster, 1)
    for worker in (works, waits, idles):
        begin(worker)
    lease = take(works, job)
    waiting = waits.start(messages.TakeLease(job=job, wait=True), Lease)
    idle = idles.start(messages.GetJob(after=job), Job)
    waits.call(messages.GetView())
    idles.call(messages.GetView())
    cluster.kill_scheduler()
    cluster.replace()
    cluster.wait_back()
    finish(works, job, lease, 1)
    assert waiting().lease == ALL_DONE
    number = post(poster, 1)
    assert number > job
    next_of = [worker.start(messages.GetJob(after=job), Job) for worker in (works, waits)]  # with all leases
    assert [call().number for call in (idle, *next_of)] == [number] * 3


def test_an_undelivered_lease_is_granted_again(cluster: Restartable, poster: SchedulerLink) -> None:
    worker = cluster.member()
    job = post(poster, 1)
    begin(worker)
    take(worker, job)
    worker.calls._end.ledger._leases.clear()  # as if the scheduler had died while its answer was in flight
    cluster.kill_scheduler()
    cluster.replace()
    cluster.wait_back()
    assert take(worker, job).shard == 0
    assert take(worker, job).lease == NONE_FREE


def test_a_missing_member_is_declared_dead(cluster: Restartable, poster: SchedulerLink) -> None:
    lives, dies = cluster.member(0), cluster.member(1)
    job = post(poster, 3)
    for worker in (lives, dies):
        begin(worker)
    held, lost = take(lives, job), take(dies, job)
    finish(dies, job, lost, 7)
    lost = take(dies, job)
    dies.notify(messages.Heartbeat(progress={"job": job, "examples": 9.0}))
    wait_until(lambda: state(poster, job).progress == {"examples": 9.0})
    dies.is_closing = True
    cluster.doors.shut_out.add(dies.hello.name)
    cluster.links.remove(dies)
    cluster.kill_scheduler()
    cluster.replace()
    cluster.wait_back()
    finish(lives, job, held, 4)
    again = take(lives, job)
    assert again.shard == lost.shard
    finish(lives, job, again, 8)
    found = state(poster, job)
    assert (found.done, found.lost_workers, found.num_workers) == (3, 1, 1)
    assert found.progress == {"examples": 15.0}  # finished shards of the dead worker are counted


def test_reports_are_neither_lost_nor_repeated(cluster: Restartable, poster: SchedulerLink) -> None:
    worker = cluster.member()
    job = post(poster, 3)
    begin(worker)

    def report(index: int, shard: Key | None) -> None:
        worker.call(messages.Report(job=job, fields={"index": index}, shard=shard), body=(bytes([index]) * 9,))

    def taken() -> list[int]:
        found: list[int] = []
        while True:
            record, body = poster.call_with_body(messages.TakeReports(job=job), TakenReport | None)
            if record is None:
                return found
            assert bytes(body) == bytes([record.fields["index"]]) * 9
            found.append(record.fields["index"])

    for index in range(3):
        lease = take(worker, job)
        report(index, lease.key)
        if index < 2:
            finish(worker, job, lease, index)
        if index == 0:
            wait_until(lambda: state(poster, job).num_reports == 1)
            assert taken() == [0]
    report(3, None)
    cluster.kill_scheduler()
    cluster.replace()
    cluster.wait_back()
    wait_until(lambda: state(poster, job).num_reports == 2)
    assert sorted(taken()) == [1, 3]
    finish(worker, job, lease, 3)
    wait_until(lambda: state(poster, job).num_reports == 1)
    assert taken() == [2]


@pytest.mark.parametrize("taken", [False, True])
def test_a_shard_with_a_lost_report_is_read_again(cluster: Restartable, poster: SchedulerLink, taken: bool) -> None:
    """The worker dies, and then the scheduler. The report is lost unless the poster has received it."""
    lives, dies = cluster.member(0), cluster.member(1)
    job = post(poster, 1)
    for worker in (lives, dies):
        begin(worker)
    lease = take(dies, job)
    dies.call(messages.Report(job=job, fields={}, shard=lease.key))
    finish(dies, job, lease, 5)
    wait_until(lambda: state(poster, job).num_reports == 1)
    if taken:
        assert poster.call(messages.TakeReports(job=job), TakenReport).done == ((0, 0, 0),)
    cluster.end(dies)
    cluster.kill_scheduler()
    cluster.replace()
    cluster.wait_back()
    found = state(poster, job)
    assert (found.done, found.progress.get("examples", 0)) == ((1, 5) if taken else (0, 0))
    assert (take(lives, job).lease == ALL_DONE) is taken


def test_a_failure_is_recovered(cluster: Restartable, poster: SchedulerLink) -> None:
    worker = cluster.member()
    job = post(poster, 3)
    begin(worker)
    worker.call(messages.JobFailed(job=job, error="DataError", message="bad"))
    cluster.kill_scheduler()
    cluster.replace()
    cluster.wait_back()
    assert state(poster, job).failed == ("DataError", "bad")
    assert take(worker, job).lease == ALL_DONE


def test_ends_of_files_are_recovered(cluster: Restartable, poster: SchedulerLink) -> None:
    worker = cluster.member()
    job = post(poster, None, 1)
    begin(worker)
    finish(worker, job, take(worker, job), 1)
    worker.notify(messages.FileEnded(job=job, file=0, num_shards=1))
    cluster.kill_scheduler()
    cluster.replace()
    cluster.wait_back()
    assert (state(poster, job).done, state(poster, job).total) == (1, 2)
    assert take(worker, job).file == 1


def test_strided_work_stays_with_the_rank(cluster: Restartable, poster: SchedulerLink) -> None:
    workers = [cluster.member(rank) for rank in range(2)]
    job = post(poster, 6, assignment="strided")
    for worker in workers:
        begin(worker)
    pending = [worker.start(messages.TakeLease(job=job, wait=False), Lease) for worker in workers]
    leases = [answer() for answer in pending]
    assert [lease.shard for lease in leases] == [0, 1]
    cluster.kill_scheduler()
    cluster.replace(num_workers=2)
    cluster.wait_back()
    for worker, lease in zip(workers, leases, strict=True):
        finish(worker, job, lease, 1)
    assert [take(workers[1], job).shard for _ in range(2)] == [3, 5]
    assert [take(workers[0], job).shard for _ in range(2)] == [2, 4]


def test_workers_leave_a_job_after_the_end_of_the_driver(cluster: Restartable, poster: SchedulerLink) -> None:
    worker = cluster.member()
    job = post(poster, 3)
    begin(worker)
    take(worker, job)
    cluster.end(poster)
    cluster.kill_scheduler()
    cluster.replace(heartbeat_timeout_s=1.0)
    cluster.wait_back()
    assert take(worker, job).lease == ALL_DONE
    other = cluster.member(role="observer")
    number = post(other, 1)
    assert number > job
    assert begin(worker, job) == number


def test_a_worker_is_expelled_if_it_returns_too_late() -> None:
    with Restartable(servers=1, workers=2) as cluster:
        received_messages: list[msgspec.Struct] = []
        lost: list[BaseException] = []
        notes: list[str] = []
        late = cluster.member(hooks=LinkHooks(received_messages.append, lost.append))
        cluster.doors.shut_out.add(late.hello.name)
        cluster.kill_scheduler()
        cluster.replace(heartbeat_timeout_s=1.0, on_note=notes.append)
        cluster.wait_back(cluster.nodes[0].link)
        death_message = f"worker 0 ({late.hello.name}) is declared dead"
        wait_until(lambda: notes == [f"{death_message}: it did not rejoin the scheduler that took over"])
        cluster.doors.shut_out.clear()
        wait_until(lambda: bool(lost))
        assert any(isinstance(notice, messages.Expelled) for notice in received_messages)
        with pytest.raises(PeerError, match="declared dead: it did not reconnect in time"):
            late.call(messages.GetView())


def test_a_late_server_is_readmitted_with_the_rows() -> None:
    """The late server has the only copy of its buckets, so its exclusion would have no benefit."""
    notes: list[str] = []
    with Restartable(servers=2, workers=1) as cluster:
        client = cluster.connect()
        cluster.links.append(client.link)
        table = client.sparse_table("w", update=SGD(lr=1.0))
        table.push(np.arange(100), np.ones(100, np.float32)).wait()
        late = cluster.nodes[1].link
        cluster.doors.shut_out.add(late.hello.name)
        cluster.kill_scheduler()
        cluster.replace(heartbeat_timeout_s=1.0, on_note=notes.append)
        wait_until(lambda: bool(notes))
        # Half of the servers may be in a part of the network that is cut off. The takeover needs the other server.
        assert notes[0].startswith(f"waits for server 1 ({late.hello.name}): too few servers that hold buckets")
        assert table.pull(np.arange(100)).tolist() == [[-1.0]] * 100
        cluster.doors.shut_out.clear()
        cluster.wait_back()
        assert table.push_pull(np.arange(100), np.ones(100, np.float32)).tolist() == [[-2.0]] * 100


def test_a_server_of_the_previous_view_is_expected_by_name() -> None:
    notes: list[str] = []
    with Restartable(servers=2, workers=1, replicas=1) as cluster:
        first, other = (node.link for node in cluster.nodes)
        known = first.state.views.committed
        assert known is not None
        number = first.state.welcome.incarnation if first.state.welcome is not None else 0
        groups = tuple(msgspec.structs.replace(group, members=(number,)) for group in known.groups)
        members = tuple(member for member in known.members if member.incarnation == number)
        voters = tuple(member.incarnation for member in known.of_role(Role.SERVER))
        changes = {"epoch": known.epoch + 1, "version": known.version + 1, "former_voters": voters}
        view = msgspec.structs.replace(known, members=members, groups=groups, **changes)
        assert first.state.views.prepare(view)  # the scheduler dies before the commit
        cluster.doors.shut_out.add(other.hello.name)
        cluster.kill_scheduler()
        cluster.replace(replicas=1, heartbeat_timeout_s=1.0, on_note=notes.append)
        wait_until(lambda: bool(notes))
        assert notes[0].startswith(f"waits for server 1 ({other.hello.name}): too few")
        cluster.doors.shut_out.clear()
        wait_until(lambda: cluster.scheduler.core.cluster.is_established)


def test_newcomers_wait_until_the_members_have_returned(cluster: Restartable) -> None:
    member = cluster.member(0)
    cluster.doors.shut_out.add(member.hello.name)
    cluster.kill_scheduler()
    cluster.replace(replaces=True)
    newcomers: list[SchedulerLink] = []

    def let_in() -> None:
        wait_until(lambda: cluster.served.call(lambda: len(cluster.scheduler.core.cluster.newcomers.nodes)) > 0)
        cluster.doors.shut_out.clear()

    in_threads(lambda: newcomers.append(cluster.member()), let_in)
    cluster.wait_back(member)
    members = member.get_view().members
    assert [member.rank for member in members] == [0, 1]
    assert members[0].incarnation < members[1].incarnation


def test_a_scheduler_without_a_predecessor_starts_a_new_cluster(cluster: Restartable) -> None:
    cluster.kill_scheduler()
    cluster.replace(replaces=True, heartbeat_timeout_s=0.3)
    assert cluster.member().get_view().epoch == 1


def test_a_member_stays_if_another_cluster_uses_the_address(cluster: Restartable) -> None:
    member = cluster.member()
    cluster.doors.shut_out.add(member.hello.name)
    cluster.kill_scheduler()
    other = cluster.replace()
    stranger = cluster.member()
    cluster.doors.shut_out.clear()
    tries = count_calls(
        other.core, "handle", lambda event, now_s: isinstance(getattr(event, "message", None), messages.Rejoin)
    )
    wait_until(lambda: len(tries) > 1)
    assert len(stranger.get_view().members) == 1
    stranger.close()
    cluster.links.remove(stranger)
    cluster.kill_scheduler()
    cluster.replace(replaces=True)
    cluster.wait_back(member)
    assert [member.rank for member in member.get_view().members] == [member_rank(member)]


@pytest.mark.parametrize("first", ["survivor", "newcomer"])
def test_survivors_are_readmitted_in_any_order(first: str) -> None:
    """The scheduler is restarted with its first command, so it has no list of members."""
    with Restartable(servers=1, workers=1) as cluster:
        client = cluster.connect()
        cluster.links.append(client.link)
        table = client.sparse_table("w", update=SGD(lr=1.0))
        table.push([1], floats(1.0)).wait()
        survivors = [link.hello.name for link in cluster.links]
        cluster.doors.shut_out.update(survivors)
        cluster.kill_scheduler()
        cluster.replace(num_servers=1)
        newcomers: list[SchedulerLink] = []

        def let_in() -> None:
            if first == "newcomer":
                wait_until(lambda: cluster.served.call(lambda: len(cluster.scheduler.core.cluster.newcomers.nodes)) > 0)
            cluster.doors.shut_out.clear()

        def rejoin() -> None:
            if first == "survivor":
                wait_until(lambda: cluster.scheduler.core.cluster.phase is not Phase.FORMING)
            newcomers.append(cluster.member())

        in_threads(rejoin, let_in)
        cluster.wait_back(cluster.nodes[0].link, client.link)
        assert table.pull([1]).tolist() == [[-1.0]]
        ranks = [worker.rank for worker in newcomers[0].call(messages.GetView(), messages.View).of_role(Role.WORKER)]
        assert ranks == [0, 1]


def test_other_settings_are_reported_and_no_process_ends(cluster: Restartable) -> None:
    notes: list[str] = []
    member = cluster.member()
    cluster.kill_scheduler()
    cluster.replace(consistency="bounded:3", on_note=notes.append)
    wait_until(lambda: bool(notes))
    assert notes == [
        "cannot take over a cluster with consistency=eventual: this scheduler was started with "
        "consistency=bounded:3. Start it with the former scheduler's settings"
    ]
    cluster.kill_scheduler()
    cluster.replace()
    cluster.wait_back(member)


def test_no_replacement_joins(cluster: Restartable) -> None:
    lost: list[BaseException] = []
    patient = cluster.member(reconnect_s=0.3, hooks=LinkHooks(on_lost=lost.append))
    impatient = cluster.member(reconnect_s=0.0)
    cluster.links.clear()
    cluster.kill_scheduler()
    message = r"the scheduler at .* within 0.3 s"
    with pytest.raises(ConnectionLostError, match=message):
        patient.call(messages.GetView())
    wait_until(lambda: bool(lost))
    assert [str(error) for error in lost] == [str(patient.calls.lost)]
    with pytest.raises(ConnectionLostError, match=r"the scheduler at .* is lost: "):
        impatient.call(messages.GetView())


def test_a_link_closes_without_waiting_for_a_dead_scheduler(cluster: Restartable) -> None:
    member = cluster.member()
    cluster.kill_scheduler()
    member.close()
    assert not member.thread.is_alive()


def test_training_continues_and_tables_are_recovered() -> None:
    with Restartable(servers=2, workers=1, consistency=Eventual()) as cluster:
        client = cluster.connect()
        cluster.links.append(client.link)
        table = client.sparse_table("w", update=SGD(lr=1.0))
        table.push([1], floats(1.0))
        table.set_update(SGD(lr=0.5))
        cluster.kill_scheduler()
        table.push([1], floats(1.0))  # pushes need no scheduler
        assert table.pull([1]).tolist() == [[-1.5]]
        cluster.replace()
        cluster.wait_back()
        assert [spec.update["lr"] for spec in client.tables()] == [0.5]
        assert client.sparse_table("w", update=SGD(lr=1.0)) is table  # the first declaration
        assert client.sparse_table("v", update=SGD(lr=1.0)).number == table.number + 1
        table.push([1], floats(1.0))
        assert table.pull([1]).tolist() == [[-2.0]]


def test_without_servers_a_new_cluster_starts() -> None:
    with Restartable(servers=1, workers=1) as cluster:
        member = cluster.member()
        cluster.end(cluster.nodes[0].link)
        cluster.kill_scheduler()
        cluster.replace()
        with pytest.raises(PeerError, match="declared dead: all servers of its cluster have ended"):
            member.call(messages.GetView())


def test_a_worker_unknown_to_the_new_scheduler_is_not_refused() -> None:
    """None of the returned members has a record of this worker.

    One server may have received it, so it is a member when it arrives.
    """
    with Cluster(servers=1, workers=2, consistency=BoundedDelay(tau=8)) as cluster:
        server = cluster.nodes[0].server
        worker, other = cluster.connect_all()
        table = worker.sparse_table("w", update=SGD(lr=1.0))
        known: messages.View = worker.link.get_view()
        without = tuple(member for member in known.members if member.incarnation != worker.incarnation)

        def take(members: tuple[Member, ...], last_incarnation: int) -> None:
            changes = {"members": members, "epoch": server.core.epoch + 1, "last_incarnation": last_incarnation}
            server.view_changed(msgspec.structs.replace(known, **changes))

        before = min(worker.incarnation, other.incarnation) - 1
        cluster.nodes[0].call(lambda: take(without, before))
        table.push(np.arange(3), np.ones(3, np.float32)).wait()
        worker.retire()
        worker.join()
        cluster.nodes[0].call(
            lambda: setattr(server.core.workers, "named", frozenset({other.incarnation}))
        )  # it has no record of the worker
        joining = threading.Thread(target=worker.join)
        joining.start()
        wait_until(lambda: len(list(server.core.early)) == 1)
        cluster.nodes[0].call(lambda: take(known.members, before))
        joining.join(PATIENCE_S)
        assert not list(server.core.early)
        assert table.push_pull(np.arange(3), np.ones(3, np.float32)).tolist() == [[-2.0]] * 3
        cluster.nodes[0].call(lambda: take(without, known.last_incarnation))
        with pytest.raises(PeerError, match="left the cluster or was declared dead"):
            worker.join()


def test_a_member_dead_between_two_views_is_not_expected() -> None:
    with Cluster(servers=1, workers=2, consistency=BoundedDelay(tau=1)) as cluster:
        server = cluster.nodes[0].server
        lost, left = cluster.connect_all()
        known: messages.View = left.link.get_view()

        def take(last_incarnation: int) -> set[int]:
            members = tuple(member for member in known.members if member.incarnation != lost.incarnation)
            server.core.workers.named = frozenset()  # no view of this server has listed the worker
            epoch = server.core.epoch + 1
            changes = {"members": members, "epoch": epoch, "last_incarnation": last_incarnation}
            server.view_changed(msgspec.structs.replace(known, **changes))
            return set(server.core.workers.counted)

        assert cluster.nodes[0].call(lambda: take(lost.incarnation - 1)) == {lost.incarnation, left.incarnation}
        assert cluster.nodes[0].call(lambda: take(known.last_incarnation)) == {left.incarnation}
