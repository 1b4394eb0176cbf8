"""Examples of the scheduler's core: a view is prepared before it is committed."""

from __future__ import annotations

import pytest

from paceline.protocol.scheduler import events, messages
from paceline.protocol.scheduler.events import MessageReceived

from .toys import HEARTBEAT_S, TIMEOUT_S, Node, Scheduler, chains, holders, server, started, worker

ALL = 0b1111_1111


def published(scheduler: Scheduler) -> list[tuple[int, int]]:
    return [event.view.order for event in scheduler.all(events.Publish)]


def proposed(scheduler: Scheduler) -> list[tuple[int, int]]:
    return [event.view.order for event in scheduler.all(events.Prepare)]


def join(scheduler: Scheduler, name: str, *, prepares: bool = True) -> Node:
    node = server(name)
    node.prepares = prepares
    return scheduler.register(node, is_extra=True)


def test_a_view_is_committed_when_a_quorum_of_the_servers_has_it() -> None:
    scheduler, servers, _ = started(4, replicas=1, num_buckets=16)
    assert len(scheduler.view.voters) == 4
    view, scheduler.sent_instructions = scheduler.view, []
    dead, *remaining = servers
    for node in remaining:
        node.prepares = False
    scheduler.kill(dead)
    prepare = scheduler.last(events.Prepare)
    assert prepare.peers == tuple(node.wire for node in remaining)
    assert dead.incarnation not in prepare.view.servers
    assert scheduler.view is view
    for number, node in enumerate(remaining):
        assert scheduler.view is view, number
        assert node.wire is not None
        scheduler.handle(MessageReceived(node.wire, messages.Prepared(prepare.view.term, prepare.view.epoch)))
        if scheduler.view is not view:
            break
    assert 1 <= number < 2
    assert scheduler.view is prepare.view
    assert published(scheduler) == [prepare.view.order]
    assert all(node.views.committed is prepare.view for node in remaining)


def test_only_voters_count_for_a_quorum() -> None:
    scheduler, (a, b, c), _ = started(3, replicas=1)
    extra = join(scheduler, "x")
    view = scheduler.view
    assert extra.incarnation not in view.voters
    assert len(view.voters) == 3
    for node in (a, b):
        node.prepares = False
    c.is_silent = True
    scheduler.pass_time(TIMEOUT_S + HEARTBEAT_S)
    assert extra.views.prepared is not None
    assert extra.views.prepared.order == proposed(scheduler)[-1]
    assert scheduler.view is view


def test_no_server_joins_a_chain_before_it_is_informed() -> None:
    scheduler, (a,), _ = started(1)
    b = join(scheduler, "b")
    view = scheduler.view
    b.prepares = False
    scheduler.fill(b)
    assert a.views.prepared is not None
    assert a.views.prepared.order == proposed(scheduler)[-1]  # the only voter has the view
    assert scheduler.view is view
    b.prepares = True
    scheduler.rejoin(b)
    assert holders(scheduler.view, b)


def test_a_view_does_not_wait_for_the_server_that_joins_by_it() -> None:
    scheduler, _, _ = started(1)
    b = join(scheduler, "b", prepares=False)
    assert b.incarnation in scheduler.view.servers  # the server has no rows yet


def test_a_proposal_is_replaced_when_servers_change() -> None:
    scheduler, (a, b, c), _ = started(3, replicas=2)
    view = scheduler.view
    for node in (a, b, c):
        node.prepares = False
    c.is_silent = True
    scheduler.pass_time(TIMEOUT_S + HEARTBEAT_S)
    first = scheduler.last(events.Prepare).view
    x = join(scheduler, "x", prepares=False)
    second = scheduler.last(events.Prepare).view
    assert second.order > first.order
    assert second.version >= first.version
    for node in (a, b):
        assert node.wire is not None
        scheduler.handle(MessageReceived(node.wire, messages.Prepared(first.term, first.epoch)))
    assert scheduler.view is view
    assert a.wire is not None
    scheduler.handle(MessageReceived(a.wire, messages.Prepared(second.term, second.epoch)))
    assert scheduler.view is second
    assert scheduler.view.servers.keys() == {a.incarnation, b.incarnation, x.incarnation}


def test_a_proposal_is_kept_when_only_workers_join_and_leave() -> None:
    scheduler, (a, b), (w,) = started(2, 1, replicas=1)
    for node in (a, b):
        node.prepares = False
    b.is_silent = True
    scheduler.pass_time(TIMEOUT_S + HEARTBEAT_S)
    view, scheduler.sent_instructions = scheduler.last(events.Prepare).view, []
    v = scheduler.register(worker("v"))
    scheduler.kill(w)
    scheduler.handle(events.Flush())
    assert scheduler.all(events.Prepare) == scheduler.all(events.Publish) == []
    assert v.member is None
    a.prepares = True
    assert a.wire is not None
    scheduler.handle(MessageReceived(a.wire, messages.Prepared(view.term, view.epoch)))
    assert published(scheduler)[0] == view.order
    # The next view has all waiting changes.
    assert [member.node for member in scheduler.view.members] == ["s0", "v"]
    assert v.member is not None


def test_a_proposal_without_remaining_changes_is_dropped() -> None:
    scheduler, (a, b), _ = started(2, replicas=1)
    view = scheduler.view
    for node in (a, b):
        node.prepares = False
    b.is_silent = True
    scheduler.pass_time(TIMEOUT_S + HEARTBEAT_S)
    dropped = scheduler.last(events.Prepare).view
    b.prepares = True
    scheduler.wake(b)
    assert a.wire is not None
    scheduler.handle(MessageReceived(a.wire, messages.Prepared(dropped.term, dropped.epoch)))
    assert scheduler.view is view
    # A member may have prepared the proposal, so the next view is newer.
    scheduler.register(worker("w"))
    scheduler.handle(events.Flush())
    assert scheduler.view.order > dropped.order


def test_a_reported_fill_is_kept_in_the_next_proposal() -> None:
    scheduler, (a, b), _ = started(2, replicas=1)
    c = join(scheduler, "c")
    moving = sum(group.buckets for group in scheduler.view.groups if group.filling == c.incarnation)
    for node in (a, b):
        node.prepares = False
    scheduler.fill(c)
    d = join(scheduler, "d")
    for node in (a, b):
        node.prepares = True
    scheduler.rejoin(a, b)
    assert holders(scheduler.view, c) == moving
    assert d.incarnation in scheduler.view.servers
    scheduler.fill_all()
    assert all(len(members) == 2 for members, _ in chains(scheduler.view).values())


def test_a_fill_of_a_silent_server_is_planned_again_when_it_returns() -> None:
    scheduler, (a,), _ = started(1)
    b = join(scheduler, "b")
    view = scheduler.view
    moving = sum(group.buckets for group in view.groups if group.filling == b.incarnation)
    b.is_silent = True
    scheduler.fill(b)  # the last message of the server; it prepares no view
    assert scheduler.view is view
    a.prepares = False
    scheduler.pass_time(TIMEOUT_S + HEARTBEAT_S)  # the server must leave
    assert b.incarnation not in scheduler.last(events.Prepare).view.servers
    assert scheduler.view is view
    a.prepares = True
    scheduler.wake(b)
    scheduler.rejoin(a)
    assert holders(scheduler.view, b) == moving
    assert holders(scheduler.view, a) == ALL & ~moving
    assert scheduler.all(events.Removed) == []


def test_a_fill_of_a_silent_server_blocks_no_view() -> None:
    """The filled server does not become a member: it would have to prepare the view, but it is silent."""
    scheduler, (a, b), (w,) = started(2, 1)
    c = join(scheduler, "c")
    a.is_silent = c.is_silent = True
    scheduler.fill(c)
    assert not holders(scheduler.view, c)
    scheduler.pass_time(TIMEOUT_S + HEARTBEAT_S)
    scheduler.kill(w)
    assert scheduler.view.excludes(w.incarnation)
    assert set(scheduler.view.servers) == {a.incarnation, b.incarnation}


def test_a_server_dies_before_the_fill() -> None:
    scheduler, (a,), _ = started(1)
    b = join(scheduler, "b")
    b.prepares = False
    scheduler.fill(b)
    scheduler.kill(b)
    assert scheduler.view.servers.keys() == {a.incarnation}
    assert holders(scheduler.view, a) == ALL
    assert scheduler.all(events.BucketsLost) == []


def test_the_death_of_a_filling_server_loses_nothing() -> None:
    """The reported fill is valid, although the view without the fill is not committed yet."""
    scheduler, (a,), _ = started(1)
    b = join(scheduler, "b")
    moving = sum(group.buckets for group in scheduler.view.groups if group.filling == b.incarnation)
    a.prepares = False
    scheduler.fill(b)
    scheduler.kill(a)
    assert scheduler.all(events.BucketsLost) == [events.BucketsLost(ALL & ~moving)]
    assert holders(scheduler.view, b) == moving


@pytest.mark.parametrize("num_remaining", [0, 1])
@pytest.mark.parametrize("is_silent_before", [False, True])
def test_a_silent_server_filled_by_a_dead_server_is_expected(num_remaining: int, is_silent_before: bool) -> None:
    scheduler, remaining, _ = started(1 + num_remaining)
    a = remaining[0]
    b = join(scheduler, "b")
    moving = sum(group.buckets for group in scheduler.view.groups if group.filling == b.incarnation)
    only_copies = holders(scheduler.view, a) & ~moving
    moving &= holders(scheduler.view, a)
    b.is_silent = True
    scheduler.fill(b)
    for node in remaining:
        node.prepares = False
    if not is_silent_before:
        scheduler.kill(a)
    scheduler.pass_time(3 * TIMEOUT_S)
    if is_silent_before:
        scheduler.kill(a)
    for node in remaining:
        node.prepares = True
    scheduler.rejoin(*remaining[1:])
    notes = scheduler.notes
    scheduler.wake(b)
    assert sum(event.buckets for event in scheduler.all(events.BucketsLost)) == only_copies
    assert holders(scheduler.view, b) & moving == moving
    message = f"server {num_remaining + 1} is silent and has the only copy of {moving.bit_count()} buckets"
    assert sum(message in note for note in notes) == 1


def test_a_returning_server_is_requested_again_to_prepare() -> None:
    scheduler, (a, b), _ = started(2, replicas=1)
    for node in (a, b):
        node.prepares = False
    x = join(scheduler, "x", prepares=False)
    preparation = scheduler.last(events.Prepare)
    assert set(preparation.peers) == {a.wire, b.wire, x.wire}
    assert b.wire is not None
    b.wire.cut()
    scheduler.sent_instructions = []
    scheduler.rejoin(b)
    assert scheduler.all(events.Prepare) == [events.Prepare((b.wire,), preparation.view)]
    scheduler.sent_instructions = []
    x.prepares = True
    assert x.wire is not None
    x.wire.cut()
    scheduler.register(x)  # the server was not welcomed yet, so it registers again
    assert scheduler.all(events.Prepare) == [events.Prepare((x.wire,), preparation.view)]
    assert x.member is None
    b.prepares = True
    scheduler.rejoin(b)
    assert x.member is not None


def test_a_view_with_only_new_workers_needs_no_preparation() -> None:
    scheduler, (a,), _ = started(1)
    a.prepares = False
    scheduler.sent_instructions = []
    w = scheduler.register(worker("w"))
    scheduler.handle(events.Flush())
    assert scheduler.all(events.Prepare) == []
    assert w.member is not None


def test_a_worker_is_removed_only_by_a_view_of_enough_servers() -> None:
    scheduler, (a,), (v, w) = started(1, 2)
    a.prepares = False
    scheduler.kill(v)
    assert scheduler.member(v) is None
    assert not scheduler.view.excludes(v.incarnation)
    scheduler.leave(w)
    a.prepares = True
    scheduler.rejoin(a)
    assert [member.node for member in scheduler.view.members] == ["s0"]
    assert scheduler.view.excludes(v.incarnation)


def test_only_changed_chains_raise_the_version() -> None:
    scheduler, (a, b), _ = started(2, 1, replicas=1)
    versions = [scheduler.view.version]
    scheduler.register(worker("v"))
    scheduler.handle(events.Flush())
    versions.append(scheduler.view.version)
    join(scheduler, "x")
    versions.append(scheduler.view.version)
    scheduler.fill_all()
    versions.append(scheduler.view.version)
    scheduler.kill(b)
    versions.append(scheduler.view.version)
    assert versions[0] == versions[1]
    assert versions[1:] == sorted(set(versions[1:]))
    orders = published(scheduler)
    assert orders == sorted(set(orders))
    assert a.views.committed is scheduler.view


def test_a_view_without_voters_is_committed_immediately() -> None:
    scheduler, (a, b), (w,) = started(2, 1, replicas=1)
    scheduler.kill(a, b)
    assert [member.node for member in scheduler.view.members] == ["w0"]
    assert scheduler.all(events.BucketsLost) == [events.BucketsLost(ALL)]
    assert scheduler.member(w) is not None
