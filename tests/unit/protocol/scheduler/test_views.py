"""Views: the members that must prepare a view before its commit, and the views that a member stores."""

from __future__ import annotations

from itertools import product

import pytest
from msgspec.structs import replace

from paceline.protocol import Member, Role
from paceline.protocol.chains import ChainGroup
from paceline.protocol.scheduler.views import (
    KnownViews,
    Proposal,
    View,
    commit_quorum,
    gaining,
    may_commit,
    may_take_over,
)

from .toys import group


def member(incarnation: int, role: Role = Role.SERVER) -> Member:
    name = f"{role.value}{incarnation}"
    return Member(name, role, incarnation, incarnation, name)


def view(*groups: ChainGroup, servers: tuple[int, ...] = (), workers: tuple[int, ...] = (), epoch: int = 1) -> View:
    """Return a view of these chains, with the servers of the chains, other servers, and workers."""
    named = {incarnation for one in groups for incarnation in (*one.members, one.filling) if incarnation is not None}
    members = [member(incarnation) for incarnation in sorted({*named, *servers})]
    members += [member(worker, Role.WORKER) for worker in workers]
    return View(1, epoch, 1, tuple(members), groups, last_incarnation=100)


def test_contents_of_a_view() -> None:
    seen = view(group(1, 2), group(3, filling=4, buckets=2), servers=(5,), workers=(7, 8))
    assert seen.order == (1, 1)
    assert seen.servers == {1: 1, 2: 2, 3: 3, 4: 4, 5: 5}
    assert seen.voters == {1, 2, 3}  # a server that is being filled is no voter
    assert not seen.excludes(1)
    assert not seen.excludes(8)
    assert seen.excludes(9)
    assert not seen.excludes(101)  # the incarnation is newer than the view


def test_a_view_without_workers_excludes_no_member() -> None:
    seen = view(group(1), workers=(7,)).without_workers()
    assert seen.is_partial
    assert [member.incarnation for member in seen.members] == [1]
    assert seen.same_servers(view(group(1)))
    assert not seen.excludes(7)
    assert not seen.excludes(9)


@pytest.mark.parametrize(
    ("after", "is_more"),
    [
        (view(group(1), workers=(7,)), True),
        (view(group(1), workers=(7, 8)), True),
        (view(group(1)), False),  # a worker has left
        (view(group(1), workers=(8,)), False),
        (view(group(1), workers=(7,), servers=(2,)), False),
        (view(group(1, filling=2), workers=(7,)), False),
    ],
)
def test_new_workers_need_no_votes(after: View, is_more: bool) -> None:
    assert after.only_adds_workers(view(group(1), workers=(7,))) == is_more


def test_sizes_of_quorums() -> None:
    assert [commit_quorum(voters, 0) for voters in range(6)] == [0, 1, 1, 2, 2, 3]
    assert [commit_quorum(voters, 2) for voters in range(6)] == [0, 1, 1, 1, 2, 3]
    # A takeover needs a majority, or more than the number of tolerated failures.
    needed = {voters: next(n for n in range(9) if may_take_over(range(voters), (), range(n), 1)) for voters in range(6)}
    assert needed == {0: 0, 1: 1, 2: 2, 3: 2, 4: 3, 5: 3}
    # An ended voter is not awaited, and is not counted.
    assert not may_commit({1, 2, 3}, {3}, {3}, 0)
    assert may_commit({1, 2, 3}, {1, 3}, {2}, 0)
    assert not may_commit({1, 2, 3}, {1, 3}, {1, 3}, 0)
    assert not may_take_over({1, 2, 3}, (), {3}, 0)
    assert may_take_over({1, 2, 3}, {1, 2}, {3}, 0)
    assert may_take_over({1, 2, 3}, {1, 2, 3}, (), 0)


def test_a_commit_and_a_takeover_have_a_common_voter() -> None:
    """Each side has its own list of ended voters. A listed voter has neither prepared the view nor returned."""
    num_cases = 0
    for num_voters, replicas in product(range(1, 10), range(5)):
        voters = range(num_voters)
        for split in product(range(num_voters + 1), repeat=3):
            num_living = num_voters - sum(split)
            if num_living < 1:
                continue
            first_group, second_group, both = split
            of_committer = {*range(first_group), *range(first_group + second_group, first_group + second_group + both)}
            of_successor = set(range(first_group, first_group + second_group + both))
            living = range(first_group + second_group + both, num_voters)
            for num_prepared in range(num_living + 1):
                prepared, returned = living[:num_prepared], living[num_prepared:]
                may_both = may_commit(voters, of_committer, prepared, replicas) and may_take_over(
                    voters, of_successor, returned, replicas
                )
                assert not may_both, (num_voters, replicas, of_committer, of_successor, prepared, returned)
                num_cases += 1
    assert num_cases > 5_000


def test_an_ended_voter_may_have_been_with_the_successor() -> None:
    """Two of three voters had joined the next scheduler, which took over.

    Then one of them ended, and only the first scheduler was notified.
    """
    assert may_take_over({1, 2, 3}, (), {2, 3}, 1)
    assert not may_commit({1, 2, 3}, {3}, {1}, 1)


@pytest.mark.parametrize("replicas", range(4))
@pytest.mark.parametrize("num_voters", range(1, 8))
def test_the_number_of_tolerated_failures_equals_the_number_of_replicas(num_voters: int, replicas: int) -> None:
    """With any number of servers, the remaining servers can commit a view."""
    num_left = max(num_voters - replicas, 1)
    assert may_commit(range(num_voters), (), range(num_left), replicas)
    assert may_commit(range(num_voters), range(num_left, num_voters), range(num_left), replicas)


def test_members_with_a_new_bucket() -> None:
    before = [group(1, 2, buckets=0b011), group(2, filling=3, buckets=0b100)]
    assert gaining(before, before) == frozenset()
    assert gaining(before, [group(2, 1, buckets=0b011), group(2, filling=3, buckets=0b100)]) == frozenset()
    assert gaining(before, [group(1, filling=4, buckets=0b111)]) == {1}  # bucket 2 is new to it
    assert gaining(before, [group(1, 2, buckets=0b011), group(2, 3, buckets=0b100)]) == {3}
    assert gaining((), before) == {1, 2}
    assert gaining(before, [group(buckets=0b111)]) == frozenset()


def proposal(committed: View, following: View, *released: int) -> Proposal:
    return Proposal(following, committed, 0, frozenset(released))


def test_a_proposal_is_sent_to_the_servers_of_both_views() -> None:
    one = proposal(view(group(1, 2)), view(group(2, filling=3), workers=(7,)))
    assert one.audience == {1, 2, 3}


def test_a_proposal_needs_a_quorum_of_the_voters_of_the_previous_view() -> None:
    one = proposal(view(group(1, 2, 3), servers=(4, 5)), view(group(1, 2), servers=(4, 5)))
    one.prepared |= {3, 4, 5}  # servers 4 and 5 had no bucket
    assert not one.is_accepted(())
    assert not one.is_accepted({3})  # an ended voter is not counted
    assert one.is_accepted({1, 2})
    one.prepared.add(1)
    assert one.is_accepted(())


def test_a_member_must_have_the_view_to_gain_a_bucket() -> None:
    one = proposal(view(group(1, filling=2)), view(group(1, 2)))
    one.prepared.add(1)
    assert not one.is_accepted(())
    one.prepared.add(2)
    assert one.is_accepted(())
    # The same holds if all former owners have ended.
    assert not proposal(view(group(1, filling=2)), view(group(2))).is_accepted({1})


def test_departing_members_are_not_counted_for_a_proposal() -> None:
    committed = view(group(1, 2, 3))
    one = proposal(committed, view(group(3)), 1, 2)
    one.prepared |= {1, 2}
    assert not one.is_accepted(())
    one.prepared.add(3)
    assert one.is_accepted(())  # only the remaining servers can vote
    # A leaving server cannot vote for a takeover without this view. The takeover needs both other voters, and at least
    # one voter has the view.
    two = proposal(committed, view(group(2, 3)), 1)
    two.prepared |= {1, 2}
    assert two.is_accepted(())
    assert may_take_over(committed.voters, (), {2, 3}, 0)
    assert not any(may_take_over(committed.voters, (), {server}, 0) for server in (2, 3))
    # If all servers leave with this view, no remaining server can have prepared it.
    three = proposal(committed, view(group()), 1, 2, 3)
    assert not three.is_accepted(())
    three.prepared |= {1, 2}
    assert three.is_accepted(())


def test_a_member_applies_committed_views_and_stores_prepared_views() -> None:
    known: KnownViews = KnownViews()
    first, second, third = (view(group(1), epoch=epoch) for epoch in (1, 2, 3))
    assert KnownViews().newest is None
    assert known.commit(first)
    assert not known.commit(first)
    assert known.prepare(second)
    assert [known.committed, known.prepared, known.newest] == [first, second, second]
    assert known.prepare(second)  # again, because the first reply may be lost
    assert known.commit(third)
    assert not known.commit(second)  # the message arrived late
    assert [known.committed, known.prepared, known.newest] == [third, second, third]


def test_a_member_prepares_no_view_of_a_superseded_scheduler() -> None:
    known: KnownViews = KnownViews()
    known.commit(view(group(1), epoch=5))
    later = replace(view(group(1), epoch=3), term=2)
    assert known.prepare(later)
    assert not known.prepare(view(group(1), epoch=9))
    assert known.newest is later
    assert known.commit(view(group(1), epoch=9))  # this view was committed before the later view
    assert known.newest is later
    other: KnownViews = KnownViews()
    other.commit(later)
    assert not other.commit(view(group(1), epoch=9))


def test_a_member_keeps_promises() -> None:
    known: KnownViews = KnownViews()
    assert known.promise(3)
    assert known.promise(3)  # again, because the first reply may be lost
    assert not known.promise(2)
    assert not known.prepare(replace(view(group(1)), term=2))
    assert known.prepare(replace(view(group(1)), term=3))
    assert known.commit(replace(view(group(1)), term=2))  # the views that others prepared remain valid


def test_a_later_view_is_not_replaced_by_an_earlier_view() -> None:
    known: KnownViews = KnownViews()
    known.prepare(view(group(2), epoch=3))
    known.prepare(view(group(1), epoch=2))
    assert known.prepared == view(group(2), epoch=3)
