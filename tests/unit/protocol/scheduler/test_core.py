"""Examples of the scheduler's core: the start of a cluster, and changes of its members."""

from __future__ import annotations

import pytest

from paceline.protocol import Role
from paceline.protocol.scheduler import events, messages
from paceline.protocol.scheduler.cluster import Phase
from paceline.protocol.scheduler.events import MessageReceived

from .toys import HEARTBEAT_S, TIMEOUT_S, Scheduler, chains, filled, holders, observer, server, started, worker

ALL = 0b1111_1111


# Forming.


def test_a_cluster_forms_when_all_servers_are_registered() -> None:
    scheduler = Scheduler(num_servers=2)
    w, a = scheduler.register(worker("w")), scheduler.register(server("a"))
    assert (scheduler.core.phase, scheduler.core.newest.num_waiting) == (Phase.FORMING, 1)
    assert scheduler.sent_instructions == []
    b = scheduler.register(server("b"))
    assert [member.node for member in scheduler.view.members] == ["a", "b", "w"]
    assert scheduler.view.voters == {a.incarnation, b.incarnation}
    assert len(scheduler.all(events.Publish)) == 1
    for node in (w, a, b):
        assert node.cluster == "ours"
        assert node.views.committed is not None
        assert node.views.committed.order == scheduler.view.order
    assert w.views.committed is not None
    assert w.views.committed.is_partial
    assert a.views.committed == b.views.committed == scheduler.view


def test_a_cluster_without_servers_forms_with_the_first_worker() -> None:
    scheduler = Scheduler(num_servers=0)
    w = scheduler.register(worker("w"))
    assert scheduler.member(w) is not None
    assert (scheduler.view.version, scheduler.view.groups) == (0, ())


def test_members_get_the_requested_ranks() -> None:
    scheduler = Scheduler(num_servers=2)
    a, b = scheduler.register(server("a"), 1), scheduler.register(server("b"))
    c, d = scheduler.register(worker("c"), 5), scheduler.register(worker("d"))
    scheduler.handle(events.Flush())
    ranks = {member.node: member.rank for member in scheduler.view.members}
    assert ranks == {"a": 1, "b": 0, "c": 5, "d": 0}
    assert scheduler.view.servers == {a.incarnation: 1, b.incarnation: 0}
    assert len({member.incarnation for member in (a, b, c, d)}) == 4


@pytest.mark.parametrize(("rank", "reason"), [(0, "node 's0'"), (-1, "negative")])
def test_a_request_for_an_unavailable_rank_is_rejected(rank: int, reason: str) -> None:
    scheduler, _, _ = started(1)
    before = scheduler.view
    refused = scheduler.register(server("x"), rank, is_extra=True)
    assert isinstance(refused.fate, events.Reject)
    assert reason in refused.fate.reason
    assert scheduler.view is before


def test_a_rejected_server_does_not_count_as_an_initial_server() -> None:
    scheduler = Scheduler(num_servers=2)
    scheduler.register(server("a"), 0)
    refused = scheduler.register(server("b"), 0)
    assert isinstance(refused.fate, events.Reject)
    assert scheduler.view.version == 0  # no bucket is placed before both servers are registered
    scheduler.register(server("c"))
    assert scheduler.view.version == 1
    assert [member.node for member in scheduler.view.members] == ["a", "c"]


def test_a_complete_cluster_accepts_only_extra_servers() -> None:
    scheduler, _, _ = started(1)
    refused = scheduler.register(server("b"))
    assert isinstance(refused.fate, events.Reject)
    assert "this cluster has its 1 server(s)" in refused.fate.reason
    extra = scheduler.register(server("c"), is_extra=True)
    assert scheduler.member(extra) is not None


def test_the_rank_of_a_removed_server_is_free() -> None:
    scheduler, (a, _), _ = started(2, replicas=1)
    scheduler.kill(a)
    b = scheduler.register(server("b"))
    assert b.fate is None
    assert scheduler.view.servers[b.incarnation] == 0
    scheduler.fill_all()
    assert holders(scheduler.view, b) == ALL


def test_extra_servers_do_not_count_while_a_cluster_forms() -> None:
    scheduler = Scheduler(num_servers=1)
    extra = scheduler.register(server("x"), is_extra=True)
    assert (scheduler.core.phase, scheduler.core.newest.num_waiting) == (Phase.FORMING, 0)
    assert extra.member is None


def test_an_extra_server_does_not_count_as_an_initial_server() -> None:
    scheduler = Scheduler(num_servers=2)
    extra = scheduler.register(server("x"), is_extra=True)
    a, b = scheduler.register(server("a"), 0), scheduler.register(server("b"), 1)
    assert [member.fate for member in (a, b, extra)] == [None, None, None]
    assert scheduler.view.servers == {a.incarnation: 0, b.incarnation: 1, extra.incarnation: 2}


def test_a_departure_during_the_forming_is_forgotten() -> None:
    scheduler = Scheduler(num_servers=2)
    a = scheduler.register(server("a"))
    assert a.wire is not None
    a.wire.cut()
    scheduler.leave(scheduler.register(server("b")))
    assert scheduler.core.newest.num_waiting == 0
    scheduler.register(server("c"))
    assert scheduler.core.phase is Phase.FORMING
    scheduler.register(a)
    assert [member.node for member in scheduler.view.members] == ["c", "a"]


def test_a_second_registration_during_the_forming_is_one_member() -> None:
    scheduler = Scheduler(num_servers=2)
    a = server("a")
    scheduler.register(a)
    former = a.wire
    a.wire = None  # the process has closed this connection, but the scheduler has not detected it yet
    scheduler.register(a)
    assert scheduler.core.newest.num_waiting == 1
    assert former is not None
    former.cut()
    assert scheduler.core.newest.num_waiting == 1
    scheduler.register(server("b"))
    assert scheduler.member(a) is not None


# Joining.


def test_simultaneous_workers_are_published_together() -> None:
    scheduler, _, _ = started(1)
    before, scheduler.sent_instructions = scheduler.view, []
    v, w = scheduler.register(worker("v")), scheduler.register(worker("w"))
    assert scheduler.sent_instructions == [events.FlushSoon()]
    assert scheduler.view is before
    assert v.member is w.member is None  # if this scheduler dies now, no process has a record of these workers
    scheduler.handle(events.Flush())
    assert len(scheduler.all(events.Publish)) == 1
    assert scheduler.view.epoch == before.epoch + 1
    assert [scheduler.member(worker) for worker in (v, w)] == list(scheduler.core.membership.of(Role.WORKER))
    scheduler.sent_instructions = []
    scheduler.handle(events.Flush())
    assert scheduler.sent_instructions == []
    scheduler.register(worker("u"))
    assert scheduler.sent_instructions == [events.FlushSoon()]


def test_a_second_registration_before_the_welcome_is_the_same_member() -> None:
    scheduler, _, (w,) = started(1, 1)
    member, w.member = w.member, None
    view = scheduler.view
    scheduler.register(w)
    assert w.member == member
    assert scheduler.view is view


def test_an_observer_is_admitted_immediately_and_is_in_no_view() -> None:
    scheduler = Scheduler(num_servers=1)
    early = scheduler.register(observer("early"))
    assert early.member is None
    scheduler.register(server("s"))
    view = scheduler.view
    late = scheduler.register(observer("late"))
    assert early.member is not None
    assert late.member is not None
    scheduler.leave(late)
    assert scheduler.member(late) is None
    assert scheduler.view.members == view.members == scheduler.core.membership.of(Role.SERVER)


def test_a_joining_server_is_welcomed_at_the_commit_and_then_filled() -> None:
    scheduler, (a,), _ = started(1)
    a.prepares = False
    b = scheduler.register(server("b"), is_extra=True)
    assert b.member is None
    a.prepares = True
    scheduler.rejoin(a)  # the server receives the unprepared view again
    assert b.member is not None
    moving = sum(group.buckets for group in scheduler.view.groups if group.filling == b.incarnation)
    assert moving
    assert holders(scheduler.view, b) == 0
    scheduler.fill(b)
    assert holders(scheduler.view, b) == moving
    assert holders(scheduler.view, a) == ALL & ~moving


def test_reports_of_fills_in_another_version_are_ignored() -> None:
    scheduler, _, _ = started(1)
    b = scheduler.register(server("b"), is_extra=True)
    view = scheduler.view
    scheduler.fill(b, ALL, version=view.version - 1)
    scheduler.fill(b, ALL, version=view.version + 1)
    assert scheduler.view is view
    scheduler.fill(b, ALL)
    assert holders(scheduler.view, b)


# Connections.


def test_a_broken_connection_changes_nothing() -> None:
    scheduler, servers, workers = started(2, 1)
    view, scheduler.sent_instructions = scheduler.view, []
    for node in (*servers, *workers):
        assert node.wire is not None
        node.wire.cut()
    scheduler.pass_time(TIMEOUT_S - HEARTBEAT_S)
    assert scheduler.sent_instructions == []
    scheduler.rejoin(*servers, *workers)
    assert [(admission.peer, admission.member) for admission in scheduler.all(events.Admit)] == [
        (node.wire, node.member) for node in (*servers, *workers)
    ]
    scheduler.pass_time(2 * TIMEOUT_S)
    assert scheduler.view is view
    assert len(scheduler.sent_instructions) == 3


def test_the_newest_connection_of_a_member_is_used() -> None:
    scheduler, _, (w,) = started(1, 1)
    former, w.wire = w.wire, None
    assert former is not None
    scheduler.rejoin(w)
    former.to_scheduler.append(
        MessageReceived(former, messages.Leave())
    )  # later messages on the former connection belong to no member
    scheduler.deliver_all()
    former.cut()
    assert w.wire is not None
    assert scheduler.core.incarnation_of(w.wire) == w.incarnation
    scheduler.pass_time(2 * TIMEOUT_S)
    assert scheduler.member(w) is not None


# Death.


def test_an_ended_process_is_removed_immediately() -> None:
    scheduler, (a, b), (w,) = started(2, 1, replicas=1)
    scheduler.kill(w)
    assert scheduler.last(events.Removed) == events.Removed(w.member, "its process ended")  # type: ignore[arg-type]
    assert scheduler.view.excludes(w.incarnation)
    scheduler.kill(b)
    assert scheduler.view.servers == {a.incarnation: 0}
    assert chains(scheduler.view) == dict.fromkeys(range(8), ((a.incarnation,), None))
    assert scheduler.all(events.BucketsLost) == []
    assert scheduler.all(events.DeclareDead) == []  # their connections had broken before


def test_a_bucket_is_lost_with_the_last_server() -> None:
    scheduler, (a, b), _ = started(2)
    lost = holders(scheduler.view, b)
    assert lost
    scheduler.kill(b)
    assert scheduler.all(events.BucketsLost) == [events.BucketsLost(lost)]
    scheduler.kill(a)
    # No server has the bucket: the loss is reported, and a joining server has no rows of the bucket.
    assert scheduler.all(events.BucketsLost) == [events.BucketsLost(lost), events.BucketsLost(ALL & ~lost)]
    c = scheduler.register(server("c"), is_extra=True)
    assert scheduler.member(c) is not None
    assert chains(scheduler.view) == dict.fromkeys(range(8), ((), None))


def test_members_leave_after_their_request() -> None:
    scheduler, _, (v, w) = started(1, 2)
    scheduler.leave(v)
    assert scheduler.last(events.Removed) == events.Removed(v.member, None)  # type: ignore[arg-type]
    assert [member.node for member in scheduler.view.members] == ["s0", "w1"]
    assert scheduler.all(events.DeclareDead) == []
    assert scheduler.member(w) is not None


def test_a_view_is_committed_after_simultaneous_departures_of_servers() -> None:
    """A leaving member prepares no further views, so the scheduler does not wait for it."""
    scheduler, (*leaving, stays), _ = started(5, num_buckets=16)
    assert len(scheduler.view.voters) == 5
    for node in leaving:
        node.prepares = False
        node.send(messages.Leave())
    scheduler.deliver_all()
    assert set(scheduler.view.servers) == {stays.incarnation}


# Silence.


def test_a_silent_worker_is_expelled() -> None:
    scheduler, _, (v, w) = started(1, 2)
    v.is_silent = True
    scheduler.pass_time(TIMEOUT_S)
    assert scheduler.member(v) is not None
    scheduler.pass_time(HEARTBEAT_S)
    assert scheduler.last(events.Removed) == events.Removed(v.member, "it was silent for 10 s")  # type: ignore[arg-type]
    assert scheduler.view.excludes(v.incarnation)
    assert scheduler.member(w) is not None
    scheduler.wake(v)
    assert isinstance(v.fate, events.DeclareDead)


def test_a_member_removed_during_a_broken_connection_is_expelled_when_it_returns() -> None:
    scheduler, _, (w,) = started(1, 1)
    assert w.wire is not None
    w.wire.cut()
    scheduler.pass_time(TIMEOUT_S + HEARTBEAT_S)
    assert scheduler.view.excludes(w.incarnation)
    assert scheduler.all(events.DeclareDead) == []
    scheduler.rejoin(w)
    assert isinstance(w.fate, events.DeclareDead)
    assert scheduler.view.excludes(w.incarnation)


def test_a_removed_but_active_member_is_expelled() -> None:
    scheduler, _, (w,) = started(1, 1)
    assert w.wire is not None
    scheduler.feed(events.ProcessEnded(w.incarnation))
    assert scheduler.feed(MessageReceived(w.wire, messages.Heartbeat())) == [
        events.DeclareDead(w.wire, "it was silent too long")
    ]


def test_a_silent_server_is_expelled_if_replicas_have_the_buckets() -> None:
    scheduler, (a, b, c), _ = started(3, replicas=1)
    c.is_silent = True
    scheduler.pass_time(TIMEOUT_S + HEARTBEAT_S)
    assert set(scheduler.view.servers) == {a.incarnation, b.incarnation}
    assert scheduler.last(events.Removed).member == c.member
    scheduler.wake(c)
    assert isinstance(c.fate, events.DeclareDead)
    scheduler.fill_all()
    assert holders(scheduler.view, a) == holders(scheduler.view, b) == ALL
    assert scheduler.notes == []


def test_the_scheduler_waits_without_limit_for_the_last_server_of_a_bucket() -> None:
    scheduler, (a, b), _ = started(2)
    held = holders(scheduler.view, b)
    before = chains(scheduler.view)
    for times in (1, 2):
        b.is_silent = True
        scheduler.pass_time(10 * TIMEOUT_S)
        assert set(scheduler.view.servers) == {a.incarnation, b.incarnation}
        assert holders(scheduler.view, b) == held
        assert len(scheduler.notes) == 2 * times - 1  # the scheduler reports the wait once
        assert f"server 1 is silent and has the only copy of {held.bit_count()} buckets" in scheduler.notes[-1]
        scheduler.wake(b)
        assert scheduler.notes[2 * times - 1 :] == ["server 1 is back: it sends heartbeats again"]
        assert chains(scheduler.view) == before
    assert scheduler.all(events.Removed) == scheduler.all(events.BucketsLost) == []
    # If the server's process has ended, the scheduler does not wait.
    b.is_silent = True
    scheduler.pass_time(2 * TIMEOUT_S)
    scheduler.kill(b)
    assert scheduler.all(events.BucketsLost) == [events.BucketsLost(held)]


def test_a_silent_server_with_a_last_copy_stays() -> None:
    """The server is removed from chains with another member, and must be filled again there."""
    scheduler, (a,), _ = started(1, replicas=1)
    b = scheduler.register(server("b"), is_extra=True)
    scheduler.fill(b, 0b0001)
    assert holders(scheduler.view, b) == 0b0001
    a.is_silent = True
    scheduler.pass_time(TIMEOUT_S + HEARTBEAT_S)
    assert holders(scheduler.view, a) == 0b1111_1110
    assert chains(scheduler.view)[0] == ((b.incarnation,), None)
    scheduler.wake(a)
    assert chains(scheduler.view)[0] == ((b.incarnation,), a.incarnation)
    scheduler.fill_all()
    assert holders(scheduler.view, a) == holders(scheduler.view, b) == ALL


def test_a_server_returning_before_the_commit_keeps_the_role() -> None:
    scheduler, (a, b, c), _ = started(3, replicas=1)
    view = scheduler.view
    for node in (a, b):
        node.prepares = False
    c.is_silent = True
    scheduler.pass_time(TIMEOUT_S + HEARTBEAT_S)
    assert scheduler.all(events.Prepare)
    assert scheduler.view is view
    scheduler.wake(c)
    for node in (a, b):
        node.prepares = True
    scheduler.rejoin(a, b)
    scheduler.pass_time(2 * TIMEOUT_S)
    assert scheduler.view is view
    assert scheduler.all(events.Removed) == []


def test_a_returning_server_keeps_buckets_although_another_server_was_being_filled() -> None:
    scheduler, (a, b), _ = started(2, replicas=2)
    c = scheduler.register(server("c"), is_extra=True)
    a.prepares = False
    b.is_silent = True
    scheduler.pass_time(TIMEOUT_S + HEARTBEAT_S)
    scheduler.feed(filled(scheduler.view.version, c.incarnation, 0b0001))
    a.prepares = True
    scheduler.wake(b)
    scheduler.rejoin(a)
    scheduler.fill_all()
    assert chains(scheduler.view)[0][1] is None
    assert all(
        group.filling != b.incarnation for published in scheduler.all(events.Publish) for group in published.view.groups
    )


def test_a_silent_server_is_live_after_another_registration() -> None:
    scheduler, (a, b), _ = started(2, replicas=1)
    c = server("c")
    c.is_silent = True  # the server does not receive its welcome
    scheduler.register(c, is_extra=True)
    a.prepares = b.prepares = False
    scheduler.pass_time(TIMEOUT_S + HEARTBEAT_S)
    c.is_silent = False
    assert c.wire is not None
    c.wire.cut()
    scheduler.register(c, is_extra=True)
    a.prepares = b.prepares = True
    scheduler.rejoin(a, b)
    assert c.fate is None
    assert scheduler.member(c) is not None


def test_the_takeover_does_not_wait_for_a_probably_ended_server() -> None:
    scheduler, (a, b), (w,) = started(2, 1, replicas=1)
    scheduler.handle(events.Suspected(b.incarnation))
    assert set(scheduler.view.servers) == {a.incarnation}
    scheduler.handle(events.Suspected(w.incarnation))
    assert scheduler.view.excludes(w.incarnation)
    reason = "its connection broke, and its host refuses connections to its address"
    assert scheduler.all(events.Removed) == [
        events.Removed(b.member, reason),  # type: ignore[arg-type]
        events.Removed(w.member, reason),  # type: ignore[arg-type]
    ]
    scheduler.handle(events.Suspected(99))


def test_a_doubt_does_not_remove_the_last_server_of_a_bucket() -> None:
    scheduler, (a, b), _ = started(2)
    held = holders(scheduler.view, b)
    scheduler.handle(events.Suspected(b.incarnation))
    assert holders(scheduler.view, b) == held
    assert "is silent" in scheduler.notes[-1]
    scheduler.pass_time(HEARTBEAT_S)  # a heartbeat of the server arrives
    scheduler.handle(events.Suspected(a.incarnation))
    assert holders(scheduler.view, a) == ALL & ~held
    assert scheduler.all(events.BucketsLost) == []


def test_no_view_is_published_while_too_few_servers_send_heartbeats() -> None:
    scheduler, (_, b, c), (v, w) = started(3, 2, replicas=1)
    view = scheduler.view
    for node in (b, c, v):
        node.is_silent = True
    scheduler.pass_time(3 * TIMEOUT_S)
    assert scheduler.view is view
    assert scheduler.core.needed == (b.member, c.member)
    assert len(scheduler.notes) == 1
    assert "waits for server 1 (s1) and server 2 (s2)" in scheduler.notes[0]
    assert "--accept-minority" in scheduler.notes[0]
    assert scheduler.member(b) is not None
    scheduler.wake(b)
    scheduler.pass_time(2 * HEARTBEAT_S)
    assert scheduler.core.needed == ()
    assert scheduler.notes[1:] == ["enough servers with buckets are connected again: the scheduler continues"]
    assert c.incarnation not in scheduler.view.servers
    assert scheduler.view.excludes(v.incarnation)
    assert scheduler.member(w) is not None


def test_an_ended_member_is_not_awaited() -> None:
    scheduler, (a, b, c), _ = started(3, replicas=1)
    scheduler.kill(b, c)
    assert set(scheduler.view.servers) == {a.incarnation}
    assert scheduler.core.needed == ()


# Servers that do not reach each other.


def test_one_of_two_mutually_unreachable_servers_is_expelled() -> None:
    scheduler, (a, b, c), _ = started(3, replicas=1)
    unreachable = {"s0": (c.incarnation,), "s2": (a.incarnation,)}
    scheduler.pass_time(TIMEOUT_S, unreachable=unreachable)
    assert set(scheduler.view.servers) == {a.incarnation, b.incarnation}
    removed = scheduler.last(events.Removed)
    assert removed.member == c.member
    assert removed.reason is not None
    assert "it and server 0 could not reach each other for 10 s, although all are alive" in removed.reason
    assert c.fate == events.DeclareDead(scheduler.last(events.DeclareDead).peer, removed.reason)


def test_a_cut_off_server_with_a_last_copy_stays() -> None:
    scheduler, (a, b), _ = started(2)
    view = scheduler.view
    scheduler.pass_time(5 * TIMEOUT_S, unreachable={"s0": (b.incarnation,), "s1": (a.incarnation,)})
    assert scheduler.view is view


# Draining.


def test_a_draining_server_is_released_without_buckets() -> None:
    scheduler, (a, b), (w,) = started(2, 1)
    scheduler.drain(b)
    held = holders(scheduler.view, b)
    assert held  # the server stays until other servers have its buckets
    assert {group.filling for group in scheduler.view.groups if b.incarnation in group.members} == {a.incarnation}
    scheduler.fill_all()
    assert scheduler.view.servers == {a.incarnation: 0}
    assert isinstance(b.fate, events.ReleaseServer)
    assert scheduler.all(events.Removed) == [events.Removed(b.member, None)]  # type: ignore[arg-type]
    assert scheduler.member(w) is not None
    scheduler.drain(w)  # only servers drain
    assert scheduler.member(w) is not None
    assert w.fate is None


def test_a_server_is_not_released_before_the_new_owners_are_informed() -> None:
    scheduler, (a, b), _ = started(2)
    scheduler.drain(b)
    a.prepares = False
    scheduler.fill(a)
    assert b.fate is None
    assert holders(scheduler.view, b)
    a.prepares = True
    scheduler.rejoin(a)
    assert isinstance(b.fate, events.ReleaseServer)


def test_all_servers_can_drain_and_be_released() -> None:
    scheduler, (a, b), _ = started(2)
    scheduler.drain(a)
    assert a.fate is None
    scheduler.drain(b)
    assert isinstance(a.fate, events.ReleaseServer)
    assert isinstance(b.fate, events.ReleaseServer)
    assert scheduler.all(events.BucketsLost) == []  # the servers have not left yet


def test_a_draining_server_stays_when_the_successors_die() -> None:
    """Otherwise the last server would be released, and its rows would be lost."""
    scheduler, (a, b), _ = started(2)
    scheduler.drain(a)
    scheduler.kill(b)
    assert a.fate is None
    assert holders(scheduler.view, a)
    scheduler.register(server("c"), is_extra=True)
    assert len(scheduler.all(events.BucketsLost)) == 1  # buckets that only the dead server had
    scheduler.fill_all()
    assert isinstance(a.fate, events.ReleaseServer)
    assert len(scheduler.all(events.BucketsLost)) == 1


def test_a_returning_draining_server_is_released_again() -> None:
    scheduler, (a, b), _ = started(2)
    assert a.wire is not None
    a.wire.cut()
    a.is_leaving = True  # the scheduler died before the server received its release
    scheduler.drain(b)
    assert b.fate is None
    scheduler.rejoin(a)
    assert isinstance(a.fate, events.ReleaseServer)
    assert isinstance(b.fate, events.ReleaseServer)


def test_a_returning_released_server_is_released_again() -> None:
    scheduler, (_, b), _ = started(2)
    scheduler.drain(b)
    assert b.wire is not None
    b.wire.cut()
    scheduler.fill_all()
    assert b.incarnation not in scheduler.view.servers
    assert scheduler.all(events.ReleaseServer) == []
    scheduler.rejoin(b)
    assert isinstance(b.fate, events.ReleaseServer)
    assert scheduler.all(events.DeclareDead) == []


def test_an_ended_draining_server_is_dead() -> None:
    scheduler, (_, b), _ = started(2)
    held = holders(scheduler.view, b)
    scheduler.drain(b)
    scheduler.kill(b)
    assert scheduler.all(events.BucketsLost) == [events.BucketsLost(held)]
    assert scheduler.last(events.Removed).reason == "its process ended"


# Time.


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_jump_of_the_clock_makes_no_member_overdue(jump_s: float) -> None:
    scheduler, _, (w,) = started(1, 1)
    view = scheduler.view
    scheduler.pass_time(3 * HEARTBEAT_S)
    for _ in range(3):
        scheduler.now_s += jump_s
        scheduler.handle(events.TimePassed())
        scheduler.pass_time(3 * HEARTBEAT_S)
    assert scheduler.view is view
    # A silent server is still detected.
    w.is_silent = True
    scheduler.pass_time(TIMEOUT_S + 2 * HEARTBEAT_S)
    assert scheduler.view.excludes(w.incarnation)


def test_a_suspended_scheduler_discards_complaints() -> None:
    scheduler, (a, _, c), _ = started(3, replicas=1)
    view = scheduler.view
    unreachable = {"s0": (c.incarnation,), "s2": (a.incarnation,)}
    for _ in range(4):
        scheduler.pass_time(0.4 * TIMEOUT_S, unreachable=unreachable)
        scheduler.now_s += TIMEOUT_S
    assert scheduler.view is view


def test_without_a_clock_no_member_is_overdue() -> None:
    scheduler, _, (w,) = started(1, 1)
    w.is_silent = True
    scheduler.now_s += 100 * TIMEOUT_S
    scheduler.register(worker("v"))
    scheduler.handle(events.Flush(), events.TimePassed())
    assert scheduler.member(w) is not None
