"""A server's core: requests, views and messages of other servers. A token represents each request and its link."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from paceline.errors import ProtocolError
from paceline.protocol import BoundedDelay, Consistency, Eventual, Sequential, ServerCore
from paceline.protocol.buckets import to_bytes
from paceline.protocol.chains import chain_group, in_chain
from paceline.protocol.membership import Member, Role
from paceline.protocol.replication import (
    CALLS,
    Acknowledge,
    Acknowledged,
    Apply,
    Confirmed,
    Filled,
    Forward,
    Forwarded,
    LinkUp,
    StateReceived,
    Withhold,
)
from paceline.protocol.scheduler.views import View
from paceline.protocol.server import Clocks, Route, Timing, TimingClass
from paceline.protocol.server.events import (
    ApplySum,
    ClocksReceived,
    Completed,
    ConfirmJoin,
    DeadlinePassed,
    DropAllBuffered,
    DropBuffered,
    Event,
    ForgetWorker,
    Read,
    ReadyReceived,
    RejectExpelled,
    ResumeRequest,
    SendClocks,
    Serve,
    Stale,
    SumUp,
    Synced,
    Time,
    WorkerJoining,
    WorkerRetired,
    WorkerTicked,
)

ME, OTHER, THIRD = 1, 2, 3
FIRST, SECOND = 10, 11
BUCKETS = 0b1111


def view(
    version: int, *chains: tuple[int, ...], workers: Iterable[int] = (FIRST, SECOND), filling: int | None = None,
    epoch: int | None = None, last: int = SECOND,
) -> View:  # fmt: skip
    """Return a view in which these chains have equal shares of the buckets."""
    width = 4 // len(chains)
    groups = tuple(chain_group(chain, filling, (1 << width) - 1 << width * place) for place, chain in enumerate(chains))
    servers = {server for group in groups for server in in_chain(group.members, group.filling)}
    members = [Member(f"{server}", Role.SERVER, server, server, f"{server}") for server in sorted(servers)]
    members += [Member(f"{worker}", Role.WORKER, worker, worker) for worker in workers]
    epoch = version if epoch is None else epoch
    return View(version=version, groups=groups, members=tuple(members), last_incarnation=last, epoch=epoch)


class Driver:
    """A core and its last instructions."""

    def __init__(self, consistency: Consistency, *, expected: int = 2, **options: Any) -> None:
        self.core = ServerCore(consistency, expected_workers=expected, **options)
        self.core.joined(ME)

    def feed(self, *events: Event) -> list[Any]:
        """Feed events; return all instructions."""
        found: list[Any] = []
        for event in events:
            found += self.core.handle(event)
            self.core.validate()
        return found

    def join(self, *workers: int, clock: int = 0) -> list[Any]:
        """Let workers join the iterations."""
        return self.feed(*(WorkerJoining(f"join {worker}", worker, worker - FIRST, clock) for worker in workers))

    def push(self, token: object, worker: int, sequence: int, iteration: int, buckets: int = BUCKETS) -> list[Any]:
        """Push with the version of the current view; return the instructions."""
        verdict = self.core.push(worker, sequence, iteration, buckets)
        out = self.core.admit(verdict, token)
        self.core.validate()
        return out

    def fresh(self, worker: int, sequence: int, iteration: int, buckets: int = BUCKETS) -> int:
        """Push, and return the buckets for which the push was new."""
        verdict = self.core.push(worker, sequence, iteration, buckets)
        self.core.admit(verdict)
        self.core.validate()
        return verdict.fresh & buckets


def alone(consistency: Consistency) -> Driver:
    """Return a server with all buckets and no successor; two workers take part."""
    driver = Driver(consistency)
    driver.feed(view(1, (ME,)))
    driver.join(FIRST, SECOND)
    return driver


def first_of_two(consistency: Consistency, **options: Any) -> Driver:
    """Return a server with all buckets and one replica; two workers take part."""
    driver = Driver(consistency, replicas=1, **options)
    driver.feed(view(1, (ME, OTHER)), LinkUp(OTHER))
    driver.join(FIRST, SECOND)
    return driver


# Requests that are handled early, late or immediately.


def test_requests_are_early_before_the_server_is_a_member() -> None:
    core = ServerCore(Eventual())
    assert {core.time(kind, FIRST, 0) for kind in TimingClass} == {Timing.EARLY}
    assert core.handle(view(1, (ME,))) == []
    core.early.postpone(Timing.EARLY, FIRST, "frame")
    assert ResumeRequest("frame") in core.joined(ME)
    assert not core.early_requests


@pytest.mark.parametrize(
    ("kind", "older", "newer"),
    [
        (TimingClass.DATA, Timing.STALE, Timing.EARLY),
        (TimingClass.TICK, Timing.STALE, Timing.EARLY),
        (TimingClass.SYNCED, Timing.REPEATED, Timing.EARLY),
        (TimingClass.CHAIN, Timing.IMMEDIATE, Timing.EARLY),
        (TimingClass.CALL, Timing.IMMEDIATE, Timing.IMMEDIATE),
        (TimingClass.OTHER, Timing.IMMEDIATE, Timing.IMMEDIATE),
    ],
)
def test_a_request_of_another_view(kind: TimingClass, older: Timing, newer: Timing) -> None:
    driver = alone(Eventual())
    driver.feed(view(2, (ME,)))
    assert driver.core.time(kind, FIRST, 1) is older
    assert driver.core.time(kind, FIRST, 2) is Timing.IMMEDIATE
    assert driver.core.time(kind, FIRST, 3) is newer


def test_a_worker_in_no_view_does_not_join() -> None:
    driver = alone(Eventual())
    assert driver.core.time(TimingClass.CALL, 12, 0) is Timing.UNNAMED
    driver.core.early.postpone(Timing.UNNAMED, 12, "join")
    named = (FIRST, SECOND, 12)
    assert driver.feed(view(1, (ME,), workers=named, epoch=2, last=12)) == [ResumeRequest("join")]
    assert driver.core.time(TimingClass.CALL, 12, 0) is Timing.IMMEDIATE
    assert driver.feed(WorkerJoining("late", 9, 0, 0)) == [RejectExpelled("late")]


def test_a_workers_messages_are_handled_in_order() -> None:
    """The worker's resync for a newer view is early, so its later call is early too."""
    driver = alone(Sequential())
    assert driver.core.time(TimingClass.SYNCED, FIRST, 2) is Timing.EARLY
    driver.core.early.postpone(Timing.EARLY, FIRST, "synced")
    assert driver.core.time(TimingClass.CALL, FIRST, 0) is Timing.EARLY
    assert driver.core.time(TimingClass.CALL, SECOND, 0) is Timing.IMMEDIATE


def test_an_older_view_is_ignored() -> None:
    driver = alone(Eventual())
    driver.feed(view(1, (ME,), epoch=5))
    assert driver.feed(view(1, (ME,), workers=(FIRST,), epoch=4)) == []
    assert driver.core.workers.counted == {FIRST, SECOND}


# Participants.


def test_a_departed_worker_is_rejected_and_not_waited_for() -> None:
    driver = alone(BoundedDelay(tau=0))
    driver.feed(WorkerTicked(FIRST, 1), Read("read", FIRST, 1), Read("dead", SECOND, 1))
    out = driver.feed(view(1, (ME,), workers=(FIRST,), epoch=2))
    assert out == [RejectExpelled("dead"), ForgetWorker(SECOND), Serve("read")]
    assert driver.join(SECOND) == [RejectExpelled(f"join {SECOND}")]
    assert driver.core.push(SECOND, 0, 0, BUCKETS).route is Route.EXPELLED
    assert driver.feed(Read("again", SECOND, 0)) == [RejectExpelled("again")]


def test_a_worker_dead_before_joining_is_not_expected() -> None:
    driver = Driver(BoundedDelay(tau=0))
    driver.feed(view(1, (ME,)))
    driver.join(FIRST)
    driver.feed(WorkerTicked(FIRST, 1), Read("read", FIRST, 1))
    assert Serve("read") in driver.feed(view(1, (ME,), workers=(FIRST,), epoch=2))


def test_a_worker_possibly_missing_at_a_new_scheduler_is_not_excluded() -> None:
    driver = alone(Eventual())
    driver.feed(view(1, (ME,), workers=(FIRST,), epoch=2, last=FIRST))
    assert not driver.core.workers.is_excluded(SECOND)
    assert SECOND in driver.core.workers.named


def test_a_worker_joins_at_the_current_iteration() -> None:
    driver = alone(Sequential())
    driver.feed(WorkerTicked(FIRST, 3), WorkerTicked(SECOND, 3))
    driver.feed(view(1, (ME,), workers=(FIRST, SECOND, 12), epoch=2, last=12))
    assert driver.join(12) == [ConfirmJoin("join 12", 3)]


def test_a_leap_over_many_iterations_is_rejected() -> None:
    driver = alone(Sequential())
    with pytest.raises(ProtocolError, match="from iteration 0 to 1000000"):
        driver.join(FIRST, clock=1_000_000)
    with pytest.raises(ProtocolError, match="at most 1048576"):
        Driver(Sequential()).feed(ClocksReceived(Clocks(((FIRST, 0, 2_000_000, True),), 0, 0)))


def test_no_iteration_waits_for_a_retired_worker_and_unfinished_pushes_are_dropped() -> None:
    driver = alone(Sequential())
    driver.push("first", FIRST, 0, 0)
    driver.push("second", SECOND, 0, 0)
    driver.feed(WorkerTicked(FIRST, 1))
    assert driver.feed(WorkerRetired(SECOND)) == [DropBuffered(SECOND, 0), ApplySum(0, (FIRST,), BUCKETS), Completed(0)]
    assert driver.feed(WorkerRetired(SECOND)) == []


def test_a_worker_without_iterations_sends_a_resync() -> None:
    driver = Driver(Eventual())
    driver.feed(view(1, (ME,)))
    driver.feed(Synced("synced", FIRST, 0, 1, 0, has_joined=False, counts=False))
    assert driver.core.workers.ranks == {}


# Pushes and reads with one copy.


@pytest.mark.parametrize("consistency", [Eventual(), BoundedDelay(tau=1)])
def test_without_a_replica_a_push_is_acknowledged_immediately(consistency: Consistency) -> None:
    driver = alone(consistency)
    assert driver.core.push(FIRST, 0, 0, BUCKETS).route is Route.ALONE
    assert driver.push("push", FIRST, 0, 0, 0b11) == [Apply("push", BUCKETS), Acknowledge("push")]
    assert driver.push("again", FIRST, 0, 0, 0b11) == [Apply("again", 0), Acknowledge("again")]


def test_requests_for_other_primaries_are_rejected() -> None:
    driver = Driver(Eventual())
    driver.feed(view(1, (ME,), (OTHER,)))
    assert driver.core.push(FIRST, 0, 0, BUCKETS).route is Route.STALE
    assert driver.feed(Read("read", FIRST, 0, buckets=BUCKETS)) == [Stale("read")]


def test_a_server_without_replica_sums_and_applies_an_iteration_once() -> None:
    driver = alone(Sequential())
    assert driver.push("first", FIRST, 0, 0, 0b1) == [Acknowledge("first")]
    assert driver.fresh(FIRST, 0, 0, 0b1) == 0
    driver.push("second", SECOND, 0, 0)
    assert driver.feed(WorkerTicked(FIRST, 1), Read("read", FIRST, 1)) == []
    assert driver.feed(WorkerTicked(SECOND, 1)) == [ApplySum(0, (FIRST, SECOND), BUCKETS), Completed(0), Serve("read")]
    assert driver.fresh(FIRST, 0, 0) == 0


def test_ticked_pushes_of_a_retired_worker_are_in_the_sum() -> None:
    driver = alone(Sequential())
    driver.feed(WorkerTicked(FIRST, 1), WorkerRetired(FIRST))
    assert driver.core.push(FIRST, 0, 0, BUCKETS).route is Route.BUFFER
    assert driver.core.push(FIRST, 0, 1, BUCKETS).route is Route.ALONE
    assert driver.core.push(99, 0, 0, BUCKETS).route is Route.ALONE


def test_a_read_waits_for_the_gate_until_the_deadline() -> None:
    driver = alone(BoundedDelay(tau=0))
    assert driver.core.is_readable(0)
    assert not driver.core.is_readable(1)
    driver.feed(Read("first", FIRST, 1, 5.0), Read("second", FIRST, 1, 9.0))
    assert driver.core.progress.num_waiting == 2
    assert driver.feed(Time(4.9)) == []
    assert driver.feed(Time(5.0)) == [DeadlinePassed("first")]
    assert driver.feed(WorkerTicked(FIRST, 1), WorkerTicked(SECOND, 1)) == [Serve("second")]
    assert driver.feed(Time(100.0)) == []


def test_requests_of_a_lost_connection_are_dropped() -> None:
    driver = alone(BoundedDelay(tau=0))
    driver.feed(Read("cut read", FIRST, 1), Read("read", SECOND, 1))
    driver.core.early.postpone(Timing.EARLY, FIRST, "cut frame")
    driver.core.disconnected(lambda token: str(token).startswith("cut"))
    assert not driver.core.early_requests
    assert driver.feed(WorkerTicked(FIRST, 1), WorkerTicked(SECOND, 1)) == [Serve("read")]


def test_waiting_reads_are_refused_when_the_view_changes() -> None:
    driver = alone(BoundedDelay(tau=0))
    driver.feed(Read("read", FIRST, 1))
    assert driver.feed(view(2, (ME,)))[0] == Stale("read")
    assert driver.feed(WorkerTicked(FIRST, 1), WorkerTicked(SECOND, 1)) == []


def test_a_call_is_applied_once_per_bucket_and_separately_from_pushes() -> None:
    driver = alone(Eventual())
    caller = FIRST | CALLS
    assert Apply("call", 0b0001) in driver.push("call", caller, 7, 0, 0b0001)
    # After another view, the call is resent with more buckets.
    assert Apply("rest", 0b0110) in driver.push("rest", caller, 7, 0, 0b0111)
    assert Apply("push", BUCKETS) in driver.push("push", FIRST, 5, 0)
    assert Apply("again", 0) in driver.push("again", caller, 7, 0, 0b0111)


# Chains.


def test_a_push_is_acknowledged_when_the_replica_has_it() -> None:
    driver = first_of_two(Eventual())
    assert driver.core.push(FIRST, 0, 0, BUCKETS).route is Route.CHAIN
    assert driver.push("push", FIRST, 0, 0) == [Forward("push", OTHER, 1, BUCKETS), Apply("push", BUCKETS)]
    assert driver.feed(Acknowledged(OTHER, 1)) == [Acknowledge("push")]


def test_a_sum_is_forwarded_and_readable_once_the_replica_has_it() -> None:
    driver = first_of_two(Sequential())
    driver.push("push", FIRST, 0, 0)
    driver.feed(WorkerTicked(FIRST, 1), Read("read", FIRST, 1))
    out = driver.feed(WorkerTicked(SECOND, 1))
    token = out[0]
    assert isinstance(token, SumUp)
    assert (token.iteration, token.workers, token.buckets) == (0, (FIRST, SECOND), BUCKETS)
    assert out[1:] == [Forward(token, OTHER, 1, BUCKETS), Apply(token, BUCKETS), Completed(0)]
    assert driver.core.progress.iterations is not None
    assert driver.core.progress.iterations.durable == 0
    assert driver.feed(Acknowledged(OTHER, 1)) == [Serve("read")]
    assert driver.core.progress.iterations.durable == 1


def test_too_few_replicas_withhold_acknowledgements_until_the_deadline() -> None:
    driver = Driver(Eventual(), replicas=1, min_replicas=1)
    driver.feed(view(1, (ME,)))
    assert driver.core.push(FIRST, 0, 0, BUCKETS).route is Route.CHAIN
    for sequence, token in enumerate(("late", "cut", "push")):
        assert driver.push(token, FIRST, sequence, 0) == [Apply(token, BUCKETS), Withhold(token)]
        driver.core.withhold(token, 5.0 + sequence)
    assert driver.core.progress.num_waiting == 3
    assert driver.feed(Time(5.0)) == [DeadlinePassed("late")]
    driver.core.disconnected(lambda token: token == "cut")
    out = driver.feed(view(2, (ME, OTHER)))
    assert Acknowledge("push") in out
    assert Acknowledge("late") not in out
    assert Acknowledge("cut") not in out
    assert driver.core.progress.num_waiting == 0


def test_a_takeover_waits_for_resent_pushes() -> None:
    driver = Driver(BoundedDelay(tau=1), replicas=1)
    driver.feed(view(1, (OTHER, ME)))
    driver.join(FIRST, SECOND)
    driver.feed(view(2, (ME,)))
    assert not driver.core.is_readable(0)
    driver.feed(Read("read", FIRST, 0))
    assert driver.feed(Synced("synced", FIRST, 0, 2, 0, has_joined=True, counts=True)) == []
    assert driver.feed(view(2, (ME,), workers=(FIRST,), epoch=3)) == [ForgetWorker(SECOND), Serve("read")]


def test_the_first_view_needs_no_takeover() -> None:
    driver = Driver(BoundedDelay(tau=0))
    driver.feed(view(1, (ME,)))
    assert driver.core.progress.updates.pending_workers == frozenset()


def test_a_takeover_of_iterations_also_waits_for_replicas() -> None:
    driver = Driver(Sequential(), replicas=2)
    driver.feed(view(1, (OTHER, ME, THIRD)))
    driver.join(FIRST, SECOND)
    driver.feed(view(2, (ME, THIRD)), LinkUp(THIRD))
    for worker in (FIRST, SECOND):
        driver.feed(Synced("synced", worker, 0, 2, 0, has_joined=True, counts=True))
    driver.feed(Read("read", FIRST, 0))
    assert driver.core.progress.updates.pending_workers == {THIRD}
    assert driver.feed(ReadyReceived(THIRD, 2)) == [Serve("read")]


# Fills.


def test_a_new_server_waits_for_the_clocks() -> None:
    driver = Driver(Sequential(), replicas=1)
    driver.feed(view(2, (OTHER,), filling=ME))
    assert not driver.core.progress.has_clocks
    assert driver.core.time(TimingClass.CALL, FIRST, 0) is Timing.BEFORE_CLOCKS
    driver.core.early.postpone(Timing.BEFORE_CLOCKS, FIRST, "join")
    known = Clocks(((FIRST, 0, 3, True), (SECOND, 1, 4, True), (12, 2, 3, False)), 0, 3)
    assert driver.feed(ClocksReceived(known)) == [ResumeRequest("join")]
    assert driver.core.progress.has_clocks
    assert driver.core.workers.known_clocks() == Clocks(known.workers, 0, 3)
    assert driver.core.workers.counted == {FIRST, SECOND}
    assert driver.feed(StateReceived("state", OTHER, 2, 0, ())) != []


def test_a_sum_in_flight_is_acknowledged_although_the_server_starts_later() -> None:
    driver = first_of_two(Sequential())
    driver.feed(WorkerTicked(FIRST, 1), WorkerTicked(SECOND, 1))
    out = driver.feed(view(2, (OTHER, ME, THIRD), workers=()), LinkUp(THIRD))
    forwards = [action for action in out if isinstance(action, Forward)]
    driver.feed(ClocksReceived(Clocks((), 0, 1)))
    iterations = driver.core.progress.iterations
    assert iterations is not None
    assert iterations.durable == 0
    driver.feed(*(Acknowledged(forward.target, forward.number) for forward in forwards))
    assert iterations.durable == 1


def test_a_fill_is_reported_when_the_chain_has_all_pending_data() -> None:
    driver = alone(Sequential())
    driver.push("push", FIRST, 0, 0)
    driver.feed(view(2, (ME,), filling=OTHER))
    assert driver.feed(LinkUp(OTHER))[0] == SendClocks(OTHER)
    for _ in range(4):
        number, _, _ = driver.core.replication.next_fill(OTHER) or (0, 0, ())
        assert not any(isinstance(action, Filled) for action in driver.feed(Confirmed(OTHER, number)))
    for worker in (FIRST, SECOND):
        driver.feed(Synced("synced", worker, 0, 2, 0, has_joined=True, counts=True))
    out = driver.feed(WorkerTicked(FIRST, 1), WorkerTicked(SECOND, 1))
    forward = next(action for action in out if isinstance(action, Forward))
    assert not any(isinstance(action, Filled) for action in out)
    assert driver.feed(Acknowledged(OTHER, forward.number)) == [Filled(2, OTHER, to_bytes(BUCKETS))]


def test_a_server_in_no_chain_drops_the_workers() -> None:
    driver = alone(Sequential())
    driver.push("push", FIRST, 0, 0)
    out = driver.feed(view(2, (OTHER,)))
    assert {FIRST, SECOND} == {action.worker for action in out if isinstance(action, ForgetWorker)}
    assert DropAllBuffered() in out
    assert driver.core.workers.known_clocks() == Clocks((), 0, 0)
    assert driver.core.time(TimingClass.CALL, FIRST, 0) is Timing.BEFORE_CLOCKS


def test_the_last_server_of_a_chain_answers_and_applies_forwards() -> None:
    driver = Driver(Eventual(), replicas=1)
    driver.feed(view(1, (OTHER, ME)))
    out = driver.feed(Forwarded("push", OTHER, FIRST, 0, 1, BUCKETS))
    assert out == [Acknowledge("push"), Apply("push", BUCKETS)]
