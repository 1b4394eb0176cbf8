"""Examples of the scheduler's core: a scheduler that replaces another one takes over its cluster."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from msgspec.structs import replace

from paceline.protocol import Role
from paceline.protocol.scheduler import events, messages
from paceline.protocol.scheduler.cluster import Phase
from paceline.protocol.scheduler.events import MessageReceived
from paceline.protocol.scheduler.views import KnownViews

from .toys import HEARTBEAT_S, TIMEOUT_S, Node, Scheduler, chains, filled, holders, observer, server, started, worker

ALL = 0b1111_1111


def successor(name: str = "next", salt: int = 2, **options: Any) -> Scheduler:
    return Scheduler(name, salt=salt, **options)


def lose(former: Scheduler) -> None:
    """End a scheduler: all its connections break."""
    for wire in list(former.wires):
        wire.cut()


def deliver_only(scheduler: Scheduler, *nodes: Node) -> None:
    """Deliver all messages in flight to and from these nodes."""
    while any(node.wire is not None and (node.wire.to_node or node.wire.to_scheduler) for node in nodes):
        for node in nodes:
            wire = node.wire
            while wire is not None and wire.to_node:
                wire.deliver_to_node()
            while wire is not None and wire.to_scheduler:
                wire.deliver_to_scheduler()


# The awaited members.


def test_a_scheduler_takes_over_when_all_members_have_returned() -> None:
    former, (a, b), (w,) = started(2, 1, replicas=1)
    lose(former)
    scheduler = successor(num_servers=2, replicas=1)
    scheduler.rejoin(w, a)
    assert scheduler.core.phase is Phase.RECOVERING
    assert scheduler.core.missing_members == (b.member,)
    assert {type(instruction) for instruction in scheduler.sent_instructions} == {events.FlushSoon, events.WatchProcess}
    scheduler.rejoin(b)
    assert scheduler.core.phase is Phase.LEADING
    assert scheduler.core.name == "ours"
    assert scheduler.view.order > former.view.order
    assert scheduler.view.version > former.view.version
    assert scheduler.view.members == former.view.members
    assert chains(scheduler.view) == chains(former.view)
    taken = scheduler.last(events.TakenOver)
    assert {rejoin.member for _, rejoin in taken.returned} == {a.member, b.member, w.member}
    assert taken.dead == ()
    for node in (a, b, w):
        assert node.views.committed is not None
        assert node.views.committed.order == scheduler.view.order
    assert scheduler.core.missing_members == ()


def test_messages_that_arrive_together_lead_to_one_decision() -> None:
    former, (a, b), (w,) = started(2, 1, replicas=1)
    lose(former)
    scheduler = successor(num_servers=2, replicas=1, replaces=True)
    scheduler.pass_time(TIMEOUT_S - HEARTBEAT_S)
    for node in (w, a, worker("new"), b):
        wire = scheduler.connect(node)
        node.send(node.registration() if node.member is None else node.returned())
        wire.deliver_to_scheduler()
    assert scheduler.sent_instructions == [events.FlushSoon()]
    scheduler.feed(events.Flush())
    assert scheduler.sent_instructions[1:] == [scheduler.last(events.RequestPromise)]
    deliver_only(scheduler, a, b)
    assert len(scheduler.all(events.FlushSoon)) == 2  # all promises arrive before the second decision
    scheduler.deliver_all()
    assert scheduler.core.phase is Phase.LEADING
    assert len(scheduler.view.members) == 4


def test_the_takeover_is_published_after_a_quorum_has_the_view() -> None:
    former, (a, b), (w,) = started(2, 1, replicas=1)
    lose(former)
    a.prepares = b.prepares = False
    scheduler = successor(num_servers=2, replicas=1)
    scheduler.rejoin(a, b, w)
    assert scheduler.core.phase is Phase.LEADING
    assert scheduler.all(events.Prepare)
    assert scheduler.all(events.Publish) == scheduler.all(events.Admit) == scheduler.all(events.TakenOver) == []
    b.prepares = True
    scheduler.rejoin(b)
    kinds = [type(event) for event in scheduler.sent_instructions]
    assert kinds.index(events.TakenOver) < kinds.index(events.Admit)
    assert {admission.member for admission in scheduler.all(events.Admit)} == {a.member, b.member, w.member}


def test_a_majority_is_enough_after_the_timeout() -> None:
    former, (a, b, c), (v, w) = started(3, 2, replicas=1)
    lose(former)
    scheduler = successor(num_servers=3, replicas=1)
    scheduler.rejoin(a, b, v)
    scheduler.pass_time(TIMEOUT_S - HEARTBEAT_S)
    assert scheduler.core.phase is Phase.RECOVERING
    scheduler.pass_time(HEARTBEAT_S)
    assert scheduler.core.phase is Phase.LEADING
    assert set(scheduler.last(events.TakenOver).dead) == {c.member, w.member}  # other servers have the buckets of c
    assert [member.node for member in scheduler.view.members] == ["s0", "s1", "w0"]
    assert scheduler.all(events.BucketsLost) == []
    scheduler.rejoin(c, w)  # c returns too late
    assert isinstance(c.fate, events.DeclareDead)
    assert isinstance(w.fate, events.DeclareDead)


def test_a_minority_is_not_enough_and_names_missing_members() -> None:
    former, (a, b, c), _ = started(3, replicas=1)
    lose(former)
    scheduler = successor(num_servers=3, replicas=1)
    scheduler.rejoin(a)
    scheduler.pass_time(5 * TIMEOUT_S)
    assert scheduler.core.phase is Phase.RECOVERING
    assert scheduler.core.needed == (b.member, c.member)
    assert len(scheduler.notes) == 1
    assert "waits for server 1 (s1) and server 2 (s2)" in scheduler.notes[0]
    assert "to take over from the former scheduler" in scheduler.notes[0]
    scheduler.rejoin(c)
    assert scheduler.core.phase is Phase.LEADING
    assert scheduler.core.needed == ()
    assert scheduler.view.servers.keys() == {a.incarnation, c.incarnation}


def test_with_accept_minority_missing_members_count_as_dead() -> None:
    former, (a, b, c), _ = started(3, num_buckets=16)
    held = holders(former.view, a)
    lose(former)
    scheduler = successor(num_servers=3, accepts_minority=True)
    scheduler.rejoin(a)
    assert scheduler.core.phase is Phase.RECOVERING  # b and c may still return
    scheduler.pass_time(TIMEOUT_S)
    assert scheduler.core.phase is Phase.LEADING
    assert scheduler.view.servers.keys() == {a.incarnation}
    assert scheduler.all(events.BucketsLost) == [events.BucketsLost(0xFFFF & ~held)]
    assert set(scheduler.last(events.TakenOver).dead) == {b.member, c.member}
    scheduler.rejoin(b)
    assert isinstance(b.fate, events.DeclareDead)


def test_minority_mode_does_not_take_over_from_workers_alone() -> None:
    """Otherwise every row would be lost, although a server returns shortly afterwards."""
    former, (a, b), (w,) = started(2, 1, num_buckets=16)
    lose(former)
    scheduler = successor(num_servers=2, accepts_minority=True)
    scheduler.rejoin(w)
    scheduler.pass_time(2 * TIMEOUT_S)
    assert scheduler.core.phase is Phase.RECOVERING
    assert "At least one must return" in scheduler.notes[0]
    scheduler.rejoin(b)
    assert scheduler.core.phase is Phase.LEADING
    assert scheduler.all(events.BucketsLost) == [events.BucketsLost(holders(former.view, a))]


def test_minority_mode_needs_a_voter_of_every_possible_newest_view() -> None:
    """The returned server has moved all its rows to the other server. A takeover from it alone would lose all rows."""
    former, (a, b), _ = started(2, num_buckets=16)
    former.drain(a)
    b.prepares = False
    with contextlib.suppress(AssertionError):
        former.fill_all()
    assert a.views.newest is not None
    assert a.incarnation not in a.views.newest.voters
    lose(former)
    scheduler = successor(num_servers=2, accepts_minority=True)
    scheduler.rejoin(a)
    scheduler.pass_time(2 * TIMEOUT_S)
    assert scheduler.core.phase is Phase.RECOVERING
    assert scheduler.all(events.BucketsLost) == []


def test_minority_mode_skips_voters_only_if_necessary() -> None:
    """A majority suffices for a takeover, so missing servers are not declared dead."""
    former, (a, b, c), _ = started(3, num_buckets=16)
    held = holders(former.view, c)
    lose(former)
    scheduler = successor(num_servers=3, accepts_minority=True)
    scheduler.rejoin(a, b)
    scheduler.pass_time(2 * TIMEOUT_S)
    assert scheduler.core.phase is Phase.LEADING
    assert holders(scheduler.view, c) == held
    assert scheduler.all(events.BucketsLost) == []


def test_no_wait_for_an_ended_member() -> None:
    former, (a, b, c), (v, w) = started(3, 2, replicas=1)
    lose(former)
    scheduler = successor(num_servers=3, replicas=1)
    scheduler.rejoin(a, v)
    scheduler.handle(events.ProcessEnded(b.incarnation), events.ProcessEnded(w.incarnation))
    assert scheduler.core.phase is Phase.RECOVERING
    assert scheduler.core.missing_members == (c.member,)
    scheduler.rejoin(c)
    assert scheduler.core.phase is Phase.LEADING
    assert scheduler.view.servers.keys() == {a.incarnation, c.incarnation}
    assert scheduler.last(events.TakenOver).dead == (b.member, w.member)


def test_no_wait_for_a_probably_ended_member_after_the_return_of_a_majority() -> None:
    former, (a, b, c), _ = started(3, replicas=1)
    lose(former)
    scheduler = successor(num_servers=3, replicas=1)
    scheduler.rejoin(a)
    scheduler.handle(events.Suspected(b.incarnation), events.Suspected(c.incarnation))
    assert scheduler.core.phase is Phase.RECOVERING  # one of the two servers must return
    scheduler.rejoin(c)
    assert scheduler.core.phase is Phase.LEADING
    assert scheduler.view.servers.keys() == {a.incarnation, c.incarnation}


def test_the_scheduler_waits_again_for_a_member_with_a_broken_connection() -> None:
    former, (a, b), _ = started(2, replicas=1)
    lose(former)
    scheduler = successor(num_servers=2, replicas=1, replaces=True)
    scheduler.rejoin(a)
    assert a.wire is not None
    a.wire.cut()
    scheduler.rejoin(b)
    assert scheduler.core.phase is Phase.RECOVERING
    assert scheduler.core.missing_members == (a.member,)
    scheduler.rejoin(a)
    assert scheduler.core.phase is Phase.LEADING


def test_recovery_does_not_wait_for_a_leaving_member() -> None:
    former, (a, b), (w, stays) = started(2, 2, replicas=1)
    lose(former)
    scheduler = successor(num_servers=2, replicas=1)
    scheduler.rejoin(w, stays, a)
    scheduler.leave(w)
    scheduler.rejoin(b)
    assert scheduler.core.phase is Phase.LEADING
    assert [member.node for member in scheduler.view.members] == ["s0", "s1", stays.name]


def test_a_returned_member_with_an_ended_process_is_not_a_member() -> None:
    """The host reports the end of the process before the connection breaks."""
    former, (a, b), _ = started(2)
    held = holders(former.view, a)
    lose(former)
    scheduler = successor(num_servers=2)
    scheduler.rejoin(a)
    scheduler.handle(events.ProcessEnded(a.incarnation))
    scheduler.rejoin(b)
    assert isinstance(a.fate, events.DeclareDead)
    assert scheduler.view.servers.keys() == {b.incarnation}
    assert scheduler.all(events.BucketsLost) == [events.BucketsLost(held)]


def test_a_new_cluster_is_formed_after_the_end_of_all_servers() -> None:
    former, (a, b), (w,) = started(2, 1)
    lose(former)
    scheduler = successor(num_servers=1, replaces=True)
    scheduler.rejoin(w)
    scheduler.handle(events.ProcessEnded(a.incarnation), events.ProcessEnded(b.incarnation))
    assert isinstance(w.fate, events.DeclareDead)
    assert "all servers of its cluster have ended" in w.fate.reason
    assert scheduler.core.phase is Phase.FORMING
    new = scheduler.register(server("new"))
    assert new.cluster == "next"
    assert scheduler.view.version == 1


def test_ended_members_of_the_former_cluster_are_not_in_a_new_cluster() -> None:
    """The new cluster assigns the same incarnations, and its views need the usual number of servers."""
    former, servers, (w,) = started(3, 1, replicas=1)
    lose(former)
    scheduler = successor(num_servers=3, replicas=1, replaces=True)
    scheduler.rejoin(w)
    scheduler.handle(*[events.ProcessEnded(server.incarnation) for server in servers])
    scheduler.handle(events.ProcessEnded(w.incarnation))
    new = [scheduler.register(server(f"new {rank}")) for rank in range(3)]
    assert [server.incarnation for server in new] == [server.incarnation for server in servers]
    for silent in new[1:]:
        silent.is_silent = True
    scheduler.pass_time(2 * TIMEOUT_S)
    assert [server.node for server in scheduler.core.needed] == ["new 1", "new 2"]


def test_a_replacing_scheduler_gives_the_members_time_to_return() -> None:
    scheduler = successor(num_servers=1, replaces=True)
    assert scheduler.core.phase is Phase.RECOVERING
    new = scheduler.register(server("new"))
    scheduler.pass_time(TIMEOUT_S - HEARTBEAT_S)
    assert new.member is None
    scheduler.pass_time(2 * HEARTBEAT_S)
    assert new.cluster == "next"


def test_a_scheduler_without_a_predecessor_adopts_arriving_members() -> None:
    former, (a,), _ = started(1)
    lose(former)
    scheduler = successor(num_servers=2)
    scheduler.register(server("new"))
    assert scheduler.core.phase is Phase.FORMING
    scheduler.rejoin(a)
    assert scheduler.core.phase is Phase.LEADING
    assert scheduler.core.name == "ours"


def test_a_server_with_a_last_copy_prevents_a_new_cluster() -> None:
    former, (a, b, c), (w,) = started(3, 1, replicas=1)
    lose(former)
    scheduler = successor(num_servers=1, replaces=True)
    new = scheduler.register(server("new"))
    scheduler.rejoin(a, w)
    scheduler.pass_time(3 * TIMEOUT_S)
    assert scheduler.core.phase is Phase.RECOVERING
    assert new.member is None
    scheduler.rejoin(b, c)
    assert scheduler.core.name == "ours"


def test_a_new_cluster_is_formed_if_only_workers_return() -> None:
    former, _, (w,) = started(1, 1)
    lose(former)
    scheduler = successor(num_servers=1, replaces=True)
    new = scheduler.register(server("new"))
    scheduler.rejoin(w)
    scheduler.pass_time(TIMEOUT_S)
    assert new.cluster == "next"
    assert len(scheduler.all(events.SendElsewhere)) == 1
    assert w.is_alive
    assert w.wire is None  # the worker is disconnected, and waits for its own cluster


# Members that return later.


def test_an_absent_indispensable_server_stays_a_member() -> None:
    former, (a, b, c), _ = started(3, num_buckets=16)
    held = holders(former.view, c)
    lose(former)
    scheduler = successor(num_servers=3)
    scheduler.rejoin(a, b)
    scheduler.pass_time(TIMEOUT_S)
    assert holders(scheduler.view, c) == held
    assert scheduler.last(events.TakenOver).dead == ()
    assert any("is silent and has the only copy of" in note for note in scheduler.notes)
    scheduler.rejoin(c)
    assert c.fate is None
    assert chains(scheduler.view) == chains(former.view)


def test_a_worker_that_is_in_no_view_is_admitted() -> None:
    former, (a,), (w,) = started(1, 1)
    a.is_silent = w.is_silent = True  # servers do not receive the view with the new worker
    new, rival = former.register(worker("new"), 5), former.register(worker("rival"), 6)
    former.handle(events.Flush())
    assert new.member is not None
    lose(former)
    a.is_silent = w.is_silent = False
    scheduler = successor()
    scheduler.rejoin(a, w)
    assert scheduler.core.is_established
    later = scheduler.register(worker("later"), 6)
    scheduler.handle(events.Flush())
    assert later.incarnation > rival.incarnation  # no member has reported this worker
    scheduler.rejoin(new, rival)
    scheduler.handle(events.Flush())
    assert new.fate is None
    assert scheduler.member(new) == new.member
    assert isinstance(rival.fate, events.DeclareDead)  # another worker has its rank


def end_with_unpublished_worker() -> tuple[Node, Node]:
    """End a scheduler whose server has not received the view with the last worker; return the server and the worker."""
    former, (a,), _ = started(1)
    a.is_silent = True
    new = former.register(worker("new"))
    former.handle(events.Flush())
    lose(former)
    a.is_silent = False
    return a, new


def test_a_worker_in_no_view_is_rejected_after_new_grants_of_the_leases() -> None:
    """Otherwise this worker and other workers would do and count the same shards."""
    a, new = end_with_unpublished_worker()
    new.has_worked = True
    scheduler = successor()
    scheduler.rejoin(a)
    scheduler.rejoin(new)
    scheduler.handle(events.Flush())
    assert isinstance(new.fate, events.DeclareDead)


def test_a_timely_worker_in_no_view_keeps_leases() -> None:
    a, new = end_with_unpublished_worker()
    new.has_worked = True
    scheduler = successor()
    scheduler.rejoin(new)
    scheduler.rejoin(a)
    scheduler.handle(events.Flush())
    assert new.fate is None
    assert scheduler.member(new) == new.member


def test_a_worker_in_no_view_has_time_to_return() -> None:
    """Otherwise servers would reject the worker forever, although it becomes a member shortly afterwards."""
    a, new = end_with_unpublished_worker()
    scheduler = successor()
    scheduler.rejoin(a)
    assert scheduler.core.is_established
    later = scheduler.register(worker("later"))
    scheduler.handle(events.Flush())
    assert not scheduler.view.excludes(new.incarnation)
    assert scheduler.member(later) is not None
    scheduler.pass_time(TIMEOUT_S + HEARTBEAT_S)
    assert scheduler.view.excludes(new.incarnation)
    scheduler.rejoin(new)
    assert isinstance(new.fate, events.DeclareDead)
    assert scheduler.member(later) is not None


def test_a_worker_in_no_view_is_lost_together_with_a_later_worker() -> None:
    a, new = end_with_unpublished_worker()
    scheduler = successor()
    scheduler.rejoin(a)
    later = scheduler.register(worker("later"))
    scheduler.handle(events.Flush())
    scheduler.leave(later)
    assert scheduler.view.excludes(later.incarnation)
    assert scheduler.view.excludes(new.incarnation)
    scheduler.rejoin(new)
    assert isinstance(new.fate, events.DeclareDead)


def test_a_removed_worker_in_no_view_is_not_admitted_again() -> None:
    former, (a,), (w,) = started(1, 1)
    a.is_silent = w.is_silent = True
    new = former.register(worker("new"))
    former.handle(events.Flush())
    lose(former)
    a.is_silent = w.is_silent = False
    scheduler = successor()
    scheduler.rejoin(new, a, w)
    assert scheduler.member(new) is not None
    assert new.wire is not None
    new.wire.cut()
    scheduler.pass_time(TIMEOUT_S + HEARTBEAT_S)
    assert scheduler.member(new) is None
    scheduler.rejoin(new)
    assert isinstance(new.fate, events.DeclareDead)


def test_an_observer_may_join_at_any_time() -> None:
    former, (a,), _ = started(1)
    early, late = former.register(observer("early")), former.register(observer("late"))
    lose(former)
    scheduler = successor()
    scheduler.rejoin(early, a, late)
    for node in (early, late):
        assert node.fate is None
        assert scheduler.member(node) is not None
        assert scheduler.last(events.Admit).member in (a.member, late.member)


def test_two_observers_with_one_rank_both_get_an_answer() -> None:
    former, (a,), _ = started(1)
    early = former.register(observer("early"))
    lose(former)
    second = successor()
    second.rejoin(a)
    late = second.register(observer("late"))
    assert early.member is not None
    assert late.member is not None
    assert early.member.rank == late.member.rank
    lose(second)
    third = successor(salt=3)
    third.rejoin(early, late, a)
    third.pass_time(HEARTBEAT_S)
    answered = {event.peer for event in third.all(events.Admit)} | {
        event.peer for event in third.all(events.DeclareDead)
    }
    for node in (early, late):
        assert node.fate is not None or node.wire in answered


def test_members_without_a_welcome_register_again() -> None:
    former = Scheduler(num_servers=2, replicas=1)
    a, b = former.register(server("a")), server("b")
    wire = former.connect(b)
    former.feed(MessageReceived(wire, messages.Register(node="b", role=Role.SERVER, address="b")))
    deliver_only(former, a)
    assert a.member is not None
    assert b.member is None
    lose(former)
    scheduler = successor(num_servers=2, replicas=1)
    scheduler.register(b)
    scheduler.rejoin(a)
    assert scheduler.core.phase is Phase.LEADING
    assert b.member == next(member for member in former.view.members if member.node == "b")
    assert scheduler.view.members == former.view.members
    assert scheduler.last(events.TakenOver).dead == ()


def test_a_server_that_has_prepared_a_view_before_its_welcome_registers_again() -> None:
    former, (a, b), _ = started(2, replicas=1)
    b.member, b.views = None, KnownViews()  # the welcome and the view were lost
    lose(former)
    second = successor(num_servers=2, replicas=1)
    b.prepares = False
    second.register(b)
    second.rejoin(a)
    [prepare] = [event for event in second.all(events.Prepare) if b.wire in event.peers][-1:]
    b.prepares = True
    assert b.views.prepare(prepare.view)
    lose(second)
    third = successor(salt=0, num_servers=2, replicas=1)  # its first term is lower
    third.register(b)
    third.rejoin(a)
    assert third.view.term > prepare.view.term
    assert {member.node for member in third.view.members} == {"s0", "s1"}
    assert b.member is not None


def test_a_new_cluster_of_servers_that_have_prepared_a_view() -> None:
    former, (a,), _ = started(1)
    a.member = None
    lose(former)
    scheduler = Scheduler(salt=0)
    scheduler.register(a)
    assert a.member is not None
    assert scheduler.view.term > former.view.term


def test_members_arriving_during_a_takeover_join_after_it() -> None:
    former, (a,), _ = started(1)
    lose(former)
    a.prepares = False
    scheduler = successor(replaces=True)
    extra = scheduler.register(server("x"), is_extra=True)
    w = scheduler.register(worker("w"))
    scheduler.rejoin(a)
    refused = scheduler.register(server("y"))
    assert scheduler.core.phase is Phase.LEADING
    assert extra.member is w.member is refused.fate is None
    a.prepares = True
    scheduler.rejoin(a)
    scheduler.handle(events.Flush())
    assert isinstance(refused.fate, events.Reject)
    assert {member.node for member in scheduler.view.members} == {"s0", "x", "w"}
    assert extra.cluster == w.cluster == "ours"
    assert min(extra.incarnation, w.incarnation) > former.core.membership.last_incarnation


# Received facts.


def test_a_takeover_continues_from_a_prepared_view() -> None:
    former, (a, b, c), _ = started(3, replicas=1)
    for node in (a, b):
        node.prepares = False
    former.kill(c)
    prepared = former.last(events.Prepare).view
    a.views.prepare(prepared)  # the reply was lost with the scheduler
    a.prepares = b.prepares = True
    lose(former)
    scheduler = successor(num_servers=3, replicas=1)
    scheduler.rejoin(a, b)
    assert scheduler.core.phase is Phase.LEADING
    assert scheduler.view.servers.keys() == {a.incarnation, b.incarnation}
    assert scheduler.view.order > prepared.order
    assert scheduler.view.version > prepared.version


def test_fills_continue_after_a_takeover() -> None:
    former, (a,), _ = started(1)
    b = former.register(server("b"), is_extra=True)
    before = chains(former.view)
    lose(former)
    scheduler = successor()
    scheduler.rejoin(a, b)
    assert chains(scheduler.view) == before
    scheduler.fill(b, version=former.view.version)  # the fill was reported to the former scheduler
    assert chains(scheduler.view) == before
    scheduler.fill(b)
    assert holders(scheduler.view, b)


def test_the_next_scheduler_releases_a_draining_server() -> None:
    former, (a, b), _ = started(2)
    b.is_leaving = True  # the scheduler ended before it could send the release
    lose(former)
    scheduler = successor(num_servers=2)
    scheduler.rejoin(a, b)
    assert b.fate is None
    scheduler.fill_all()
    assert isinstance(b.fate, events.ReleaseServer)
    assert scheduler.view.servers.keys() == {a.incarnation}


def test_a_single_draining_server_stays_after_a_takeover() -> None:
    """Otherwise the last server would be released, and its rows would be lost."""
    former, (a, b), _ = started(2)
    former.drain(a)
    former.kill(b)
    a.is_leaving = True
    lose(former)
    scheduler = successor(num_servers=2)
    scheduler.rejoin(a)
    assert holders(scheduler.view, a)
    assert a.fate is None


def test_the_next_scheduler_releases_all_servers_if_all_drain() -> None:
    former, (a, b), _ = started(2)
    a.is_leaving = b.is_leaving = True
    lose(former)
    scheduler = successor(num_servers=2)
    scheduler.rejoin(a, b)
    assert isinstance(a.fate, events.ReleaseServer)
    assert isinstance(b.fate, events.ReleaseServer)


def test_a_drain_request_during_recovery_is_recorded() -> None:
    former, (a, b), _ = started(2)
    lose(former)
    scheduler = successor(num_servers=2)
    scheduler.rejoin(b)
    scheduler.drain(b)
    scheduler.rejoin(a)
    scheduler.fill_all()
    assert isinstance(b.fate, events.ReleaseServer)


def test_an_unnotified_released_server_is_released_again() -> None:
    former, (a, b), _ = started(2)
    former.drain(b)
    assert b.wire is not None
    b.wire.cut()
    former.fill_all()
    assert b.incarnation not in former.view.servers
    lose(former)
    scheduler = successor(num_servers=2)
    scheduler.rejoin(b, a)
    assert isinstance(b.fate, events.ReleaseServer)
    assert scheduler.all(events.DeclareDead) == []


def test_released_servers_do_not_take_over_without_the_remaining_servers() -> None:
    """The released servers have not received the view without them, so their rows are outdated."""
    former, (a, b, c), _ = started(3, num_buckets=16)
    former.drain(a, b)
    former.feed(filled(former.view.version, c.incarnation, 0xFFFF))
    former.feed(events.Flush())
    deliver_only(former, c)
    assert former.view.servers.keys() > {c.incarnation}  # more voters must receive the view
    assert a.wire is not None
    a.wire.deliver_to_node()
    a.wire.deliver_to_scheduler()
    deliver_only(former, c)
    committed = former.view
    assert committed.servers.keys() == {c.incarnation}  # from now on, c accepts pushes that no other server has
    for node in (a, b):
        assert node.wire is not None
        node.wire.to_node.clear()
    lose(former)
    scheduler = successor(num_servers=3)
    scheduler.rejoin(a, b)
    scheduler.pass_time(2 * TIMEOUT_S)
    scheduler.rejoin(c)
    scheduler.fill_all()
    for publish in scheduler.all(events.Publish):
        assert {members for members, _ in chains(publish.view).values()} == {(c.incarnation,)}


# Other schedulers.


def test_members_of_another_cluster_wait_for_their_scheduler() -> None:
    own_scheduler, (a, b), _ = started(2, replicas=1)
    foreign, (c, _), _ = started(2, replicas=1, cluster="theirs")
    lose(own_scheduler)
    lose(foreign)
    scheduler = successor(num_servers=2, replicas=1)
    scheduler.rejoin(c, a)
    assert c.wire is not None
    scheduler.rejoin(b)
    assert scheduler.core.name == "ours"
    assert c.wire is None
    assert c.is_alive
    scheduler.rejoin(c)
    assert c.wire is None
    assert c.fate is None
    assert len(scheduler.all(events.SendElsewhere)) == 2


def test_the_first_scheduler_ends_when_a_member_reports_another_scheduler() -> None:
    former, (a, b, c), (w,) = started(3, 1, replicas=1)
    scheduler = successor(num_servers=3, replicas=1)
    scheduler.rejoin(a, b, c)
    scheduler.pass_time(TIMEOUT_S)
    assert scheduler.core.is_established
    view = former.view
    former.pass_time(3 * TIMEOUT_S)
    assert former.view is view  # no quorum of servers replies
    former.rejoin(a)
    assert former.all(events.Superseded) == [events.Superseded(scheduler.core.term)]
    assert former.core.phase is Phase.SUPERSEDED
    former.sent_instructions = []
    former.kill(w)
    former.pass_time(2 * TIMEOUT_S)
    former.register(worker("v"))
    assert former.sent_instructions == []


def test_a_superseded_scheduler_does_not_form_another_cluster() -> None:
    former, (a, b, c), _ = started(3, replicas=1)
    for node in (a, b, c):
        node.prepares = False
    lose(former)
    scheduler = successor(num_servers=1, replicas=1)
    scheduler.rejoin(a, b, c)
    assert scheduler.core.phase is Phase.LEADING
    scheduler.register(server("new"))
    scheduler.pass_time(2 * TIMEOUT_S)
    scheduler.sent_instructions = []
    wire, returned = scheduler.connect(a), a.returned()
    later = replace(returned.view, term=scheduler.core.term + 1)
    assert scheduler.feed(MessageReceived(wire, replace(returned, view=later))) == [events.Superseded(later.term)]
    assert scheduler.core.phase is Phase.SUPERSEDED


def test_every_takeover_has_a_higher_term() -> None:
    scheduler, (a, b), (w,) = started(2, 1, replicas=1, salt=60_000)
    given = {scheduler.core.membership.last_incarnation}
    for number in range(6):
        former, scheduler = scheduler, successor(f"next{number}", salt=50_000 - number, num_servers=2, replicas=1)
        lose(former)
        scheduler.rejoin(a, b, w)
        new = scheduler.register(worker(f"new{number}"))
        scheduler.handle(events.Flush())
        assert scheduler.core.term > former.core.term
        assert scheduler.view.order > former.view.order
        assert new.incarnation not in given
        given.add(new.incarnation)
        scheduler.kill(new)
    assert chains(scheduler.view) == chains(former.view)


def test_a_scheduler_cannot_commit_after_the_next_scheduler_has_taken_over() -> None:
    """A member of the next scheduler returns to the first before it has prepared a view of the next scheduler."""
    former, (a, b, c, d), (w,) = started(4, 1, replicas=1, num_buckets=16)
    assert len(former.view.voters) == 4
    scheduler = successor(num_servers=4, replicas=1)
    for node in (b, c, d):
        node.prepares = False
    scheduler.rejoin(b, c, d)
    scheduler.pass_time(TIMEOUT_S)
    assert scheduler.core.phase is Phase.LEADING
    b.prepares = c.prepares = d.prepares = True
    former.rejoin(b)
    scheduler.rejoin(c, d)
    assert scheduler.core.is_established
    view = former.view
    former.kill(w)
    former.pass_time(3 * TIMEOUT_S)
    assert former.view is view
    assert a.views.committed is view


def test_a_report_of_an_ended_member_does_not_let_a_former_scheduler_commit() -> None:
    """The member had connected to the next scheduler before it ended."""
    former, (a, b, c), _ = started(3, replicas=1)
    scheduler = successor(num_servers=3, replicas=1)
    scheduler.rejoin(b, c)
    scheduler.pass_time(TIMEOUT_S)
    assert scheduler.core.is_established
    view = former.view
    assert c.wire is not None
    c.wire.cut()
    former.handle(events.ProcessEnded(c.incarnation))
    former.pass_time(3 * TIMEOUT_S)
    assert former.view is view
    assert a.views.committed is view


def test_a_takeover_from_an_uncommitted_view_needs_voters_of_the_earlier_view() -> None:
    """The prepared view has a third voter; the view before it permits one of two servers to commit another view."""
    former, (a, b), _ = started(2)
    c = former.register(server("c"), is_extra=True)
    before = former.view.voters
    assert before == {a.incarnation, b.incarnation}
    a.prepares = b.prepares = c.prepares = False
    former.fill(c, 0b0001)  # the chain of one bucket, whose former servers have other buckets
    prepared = former.last(events.Prepare).view
    assert prepared.voters == {*before, c.incarnation}
    b.views.prepare(prepared)
    c.views.prepare(prepared)  # the replies are in flight
    scheduler = successor(num_servers=2)
    scheduler.rejoin(b, c)
    scheduler.pass_time(3 * TIMEOUT_S)
    assert scheduler.core.phase is Phase.RECOVERING
    assert "waits for server 0 (s0)" in scheduler.notes[-1]
    scheduler.rejoin(a)
    assert scheduler.core.phase is Phase.LEADING


def test_a_voter_of_the_previous_view_is_expected_and_named() -> None:
    former, (a, b), _ = started(2, replicas=1)
    a.prepares = False
    former.kill(b)
    prepared = former.last(events.Prepare).view
    assert b.incarnation not in prepared.servers
    a.views.prepare(prepared)  # the reply is in flight
    lose(former)
    scheduler = successor(num_servers=2, replicas=1)
    scheduler.rejoin(a)
    assert scheduler.core.missing_members == (b.member,)
    scheduler.pass_time(TIMEOUT_S)
    assert scheduler.core.phase is Phase.RECOVERING
    assert "waits for server 1 (s1)" in scheduler.notes[-1]
    scheduler.handle(events.ProcessEnded(b.incarnation))
    assert scheduler.core.phase is Phase.LEADING
    assert scheduler.view.servers.keys() == {a.incarnation}


# While the first view is prepared.


def test_a_new_scheduler_reports_too_few_returned_members() -> None:
    former, (a, b, c), _ = started(3, replicas=1)
    lose(former)
    b.prepares = False
    scheduler = successor(num_servers=3, replicas=1)
    scheduler.rejoin(a, b)
    scheduler.pass_time(TIMEOUT_S)
    assert scheduler.core.phase is Phase.LEADING
    assert not scheduler.core.is_established
    b.is_silent = True
    scheduler.pass_time(3 * TIMEOUT_S)
    assert b.member in scheduler.core.needed
    assert any("waits for" in note and "server 1 (s1)" in note for note in scheduler.notes)
    assert scheduler.member(c) is not None


def test_a_server_ending_during_the_first_preparation_is_dead() -> None:
    former, (a, b, c), _ = started(3, replicas=1)
    lose(former)
    a.prepares = b.prepares = False
    scheduler = successor(num_servers=3, replicas=1)
    scheduler.rejoin(a, b, c)
    a.prepares = b.prepares = True
    scheduler.kill(c)
    scheduler.rejoin(a, b)
    assert scheduler.view.servers.keys() == {a.incarnation, b.incarnation}
    taken = scheduler.last(events.TakenOver)
    assert {rejoin.member for _, rejoin in taken.returned} == {a.member, b.member}
    assert taken.dead == (c.member,)
    assert scheduler.all(events.Removed) == []  # no member has received its welcome


@pytest.mark.parametrize("role", [Role.SERVER, Role.WORKER])
def test_a_server_arriving_during_the_first_preparation_is_welcomed(role: Role) -> None:
    former, (a, b, c), (w,) = started(3, 1, replicas=1)
    lose(former)
    late = c if role is Role.SERVER else w
    a.prepares = b.prepares = False
    scheduler = successor(num_servers=3, replicas=1)
    scheduler.rejoin(a, b, *({c, w} - {late}))
    scheduler.pass_time(TIMEOUT_S)
    assert scheduler.core.phase is Phase.LEADING
    assert not scheduler.core.is_established
    scheduler.rejoin(late)
    a.prepares = b.prepares = True
    scheduler.rejoin(a, b)
    assert scheduler.core.is_established
    assert (late.fate is None) == (role is Role.SERVER)  # the late worker was declared dead and notified
    assert (scheduler.member(late) is not None) == (role is Role.SERVER)


def test_a_server_leaving_during_the_first_preparation_is_not_welcomed() -> None:
    former, (a,), (w,) = started(1, 1)
    lose(former)
    a.prepares = False
    scheduler = successor()
    scheduler.rejoin(w, a)
    scheduler.leave(w)
    a.prepares = True
    scheduler.rejoin(a)
    assert {event.member for event in scheduler.all(events.Admit)} == {a.member}
    assert scheduler.last(events.TakenOver).dead == (w.member,)


def test_deaths_in_one_cluster_do_not_affect_another_cluster() -> None:
    """Members of two clusters use one address. A server of the other cluster was expelled, and its rows were lost."""
    _, servers, workers = started(3, 2, replicas=1, cluster="a")
    _, foreign_servers, _ = started(3, replicas=1, cluster="b", salt=9)
    scheduler = Scheduler("new", num_servers=3, replicas=1, replaces=True)
    for returning in workers:
        scheduler.rejoin(returning)
    scheduler.handle(events.ProcessEnded(servers[0].incarnation), events.ProcessEnded(servers[1].incarnation))
    scheduler.rejoin(*foreign_servers)
    assert scheduler.core.phase is Phase.LEADING
    assert scheduler.core.name == "b"
    assert {member.incarnation for member in foreign_servers} <= {
        member.incarnation for member in scheduler.core.membership.members
    }
    assert scheduler.all(events.BucketsLost) == []
