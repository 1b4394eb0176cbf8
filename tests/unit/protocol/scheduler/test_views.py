"""Views: members that must have prepared a view before it takes effect, and the views that a member keeps."""

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
    """A view of these chains, with the servers that are in them and others, and workers."""
    named = {each for one in groups for each in (*one.members, one.filling) if each is not None}
    members = [member(each) for each in sorted({*named, *servers})]
    members += [member(each, Role.WORKER) for each in workers]
    return View(1, epoch, 1, tuple(members), groups, last_incarnation=100)


def test_contents_of_a_view() -> None:
    seen = view(group(1, 2), group(3, filling=4, buckets=2), servers=(5,), workers=(7, 8))
    assert seen.order == (1, 1)
    assert seen.servers == {1: 1, 2: 2, 3: 3, 4: 4, 5: 5}
    assert seen.voters == {1, 2, 3}  # not the one that is being filled
    assert not seen.excludes(1)
    assert not seen.excludes(8)
    assert seen.excludes(9)
    assert not seen.excludes(101)  # it is newer than the view


def test_a_view_without_workers_excludes_no_member() -> None:
    seen = view(group(1), workers=(7,)).without_workers()
    assert seen.is_partial
    assert [each.incarnation for each in seen.members] == [1]
    assert seen.same_servers(view(group(1)))
    assert not seen.excludes(7)
    assert not seen.excludes(9)


@pytest.mark.parametrize(
    ("after", "is_more"),
    [
        (view(group(1), workers=(7,)), True),
        (view(group(1), workers=(7, 8)), True),
        (view(group(1)), False),  # a worker is gone
        (view(group(1), workers=(8,)), False),
        (view(group(1), workers=(7,), servers=(2,)), False),
        (view(group(1, filling=2), workers=(7,)), False),
    ],
)
def test_new_workers_need_no_votes(after: View, is_more: bool) -> None:
    assert after.only_adds_workers(view(group(1), workers=(7,))) == is_more


def test_quorums_by_example() -> None:
    assert [commit_quorum(voters, 0) for voters in range(6)] == [0, 1, 1, 2, 2, 3]
    assert [commit_quorum(voters, 2) for voters in range(6)] == [0, 1, 1, 1, 2, 3]
    # To take over it is a majority, or more than may fail.
    needed = {voters: next(n for n in range(9) if may_take_over(range(voters), (), range(n), 1)) for voters in range(6)}
    assert needed == {0: 0, 1: 1, 2: 2, 3: 2, 4: 3, 5: 3}
    # Who has ended is not waited for, and does not count.
    assert not may_commit({1, 2, 3}, {3}, {3}, 0)
    assert may_commit({1, 2, 3}, {1, 3}, {2}, 0)
    assert not may_commit({1, 2, 3}, {1, 3}, {1, 3}, 0)
    assert not may_take_over({1, 2, 3}, (), {3}, 0)
    assert may_take_over({1, 2, 3}, {1, 2}, {3}, 0)
    assert may_take_over({1, 2, 3}, {1, 2, 3}, (), 0)


def test_one_that_commits_and_one_that_takes_over_have_a_voter_in_common() -> None:
    """Each of them may know of other voters that they have ended, of which neither was with the other one."""
    num_cases = 0
    for num_voters, replicas in product(range(1, 10), range(5)):
        voters = range(num_voters)
        for split in product(range(num_voters + 1), repeat=3):
            num_living = num_voters - sum(split)
            if num_living < 1:
                continue
            ours, theirs, both = split
            of_committer = {*range(ours), *range(ours + theirs, ours + theirs + both)}
            of_successor = set(range(ours, ours + theirs + both))
            living = range(ours + theirs + both, num_voters)
            for num_prepared in range(num_living + 1):
                prepared, returned = living[:num_prepared], living[num_prepared:]
                may_both = may_commit(voters, of_committer, prepared, replicas) and may_take_over(
                    voters, of_successor, returned, replicas
                )
                assert not may_both, (num_voters, replicas, of_committer, of_successor, prepared, returned)
                num_cases += 1
    assert num_cases > 5_000


def test_one_that_has_ended_since_may_have_been_with_the_successor() -> None:
    """Of three, two had come to the next scheduler, which took over: then one ended, and only the first knows."""
    assert may_take_over({1, 2, 3}, (), {2, 3}, 1)
    assert not may_commit({1, 2, 3}, {3}, {1}, 1)


@pytest.mark.parametrize("replicas", range(4))
@pytest.mark.parametrize("num_voters", range(1, 8))
def test_as_many_may_fail_as_there_are_replicas(num_voters: int, replicas: int) -> None:
    """Whatever the number of servers: what is left of them can commit."""
    num_left = max(num_voters - replicas, 1)
    assert may_commit(range(num_voters), (), range(num_left), replicas)
    assert may_commit(range(num_voters), range(num_left, num_voters), range(num_left), replicas)


def test_members_that_gain_a_bucket() -> None:
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


def test_a_proposal_is_accepted_by_a_quorum_of_the_voters_before_it() -> None:
    one = proposal(view(group(1, 2, 3), servers=(4, 5)), view(group(1, 2), servers=(4, 5)))
    one.prepared |= {3, 4, 5}  # 4 and 5 had nothing
    assert not one.is_accepted(())
    assert not one.is_accepted({3})  # whoever has ended does not count
    assert one.is_accepted({1, 2})
    one.prepared.add(1)
    assert one.is_accepted(())


def test_no_member_gains_a_bucket_without_its_view() -> None:
    one = proposal(view(group(1, filling=2)), view(group(1, 2)))
    one.prepared.add(1)
    assert not one.is_accepted(())
    one.prepared.add(2)
    assert one.is_accepted(())
    # Nor if all that had it before have ended.
    assert not proposal(view(group(1, filling=2)), view(group(2))).is_accepted({1})


def test_those_that_go_do_not_count_for_a_proposal() -> None:
    committed = view(group(1, 2, 3))
    one = proposal(committed, view(group(3)), 1, 2)
    one.prepared |= {1, 2}
    assert not one.is_accepted(())
    one.prepared.add(3)
    assert one.is_accepted(())  # more than those that stay cannot have it
    # One that goes leaves one voter less for whoever takes over without this view: he needs both others, so one knows.
    two = proposal(committed, view(group(2, 3)), 1)
    two.prepared |= {1, 2}
    assert two.is_accepted(())
    assert may_take_over(committed.voters, (), {2, 3}, 0)
    assert not any(may_take_over(committed.voters, (), {each}, 0) for each in (2, 3))
    # Where all go by it, nobody stays who could know of it.
    three = proposal(committed, view(group()), 1, 2, 3)
    assert not three.is_accepted(())
    three.prepared |= {1, 2}
    assert three.is_accepted(())


def test_a_member_applies_committed_views_and_stores_prepared_ones() -> None:
    known: KnownViews = KnownViews()
    first, second, third = (view(group(1), epoch=epoch) for epoch in (1, 2, 3))
    assert KnownViews().newest is None
    assert known.commit(first)
    assert not known.commit(first)
    assert known.prepare(second)
    assert [known.committed, known.prepared, known.newest] == [first, second, second]
    assert known.prepare(second)  # again, as the first answer may be lost
    assert known.commit(third)
    assert not known.commit(second)  # it came late
    assert [known.committed, known.prepared, known.newest] == [third, second, third]


def test_a_member_prepares_nothing_of_a_scheduler_that_was_superseded() -> None:
    known: KnownViews = KnownViews()
    known.commit(view(group(1), epoch=5))
    later = replace(view(group(1), epoch=3), term=2)
    assert known.prepare(later)
    assert not known.prepare(view(group(1), epoch=9))
    assert known.newest is later
    assert known.commit(view(group(1), epoch=9))  # it was committed, before the later one
    assert known.newest is later
    other: KnownViews = KnownViews()
    other.commit(later)
    assert not other.commit(view(group(1), epoch=9))


def test_a_member_keeps_its_promise() -> None:
    known: KnownViews = KnownViews()
    assert known.promise(3)
    assert known.promise(3)  # again, as the first answer may be lost
    assert not known.promise(2)
    assert not known.prepare(replace(view(group(1)), term=2))
    assert known.prepare(replace(view(group(1)), term=3))
    assert known.commit(replace(view(group(1)), term=2))  # what others have prepared holds


def test_a_later_view_is_not_replaced_by_an_earlier_view() -> None:
    known: KnownViews = KnownViews()
    known.prepare(view(group(2), epoch=3))
    known.prepare(view(group(1), epoch=2))
    assert known.prepared == view(group(2), epoch=3)
