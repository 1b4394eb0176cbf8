"""Membership: examples, and calls in any order, compared with a simple model."""

from __future__ import annotations

import math

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace
from tests.random_examples import num_examples

from paceline.errors import UsageError
from paceline.protocol import Member, Role
from paceline.protocol.membership import Membership, ProcessIdentity


def nodes_of(membership: Membership) -> list[str]:
    return [member.node for member in membership.members]


def overdue_at(membership: Membership, now_s: float) -> list[str]:
    return [member.node for member in membership.overdue(now_s)]


def test_a_process_becomes_the_requested_member() -> None:
    assert not Membership(1).ready
    membership = Membership(1)
    member = membership.register("s", Role.SERVER, 0.0, address=("host", 1), process=ProcessIdentity("host", 7, 1))
    assert member == Member("s", Role.SERVER, 0, 1, ("host", 1), ProcessIdentity("host", 7, 1))
    assert membership.ready
    assert membership.members == (member,)
    assert membership.find(1) is member
    assert membership.named("s") is member
    assert membership.find(2) is membership.named("t") is None


def test_a_member_gets_the_smallest_free_rank_of_its_role() -> None:
    membership = Membership(0)
    for node, role in (("s", Role.SERVER), ("a", Role.WORKER), ("b", Role.WORKER), ("c", Role.WORKER)):
        membership.register(node, role, 0.0, address=node)
    assert [(m.node, m.rank) for m in membership.members] == [("s", 0), ("a", 0), ("b", 1), ("c", 2)]
    membership.remove(3)
    d = membership.register("d", Role.WORKER, 0.0)
    assert (d.rank, d.incarnation) == (1, 5)
    assert [m.node for m in membership.of(Role.WORKER)] == ["a", "d", "c"]


def test_members_are_ordered_by_role_and_then_by_rank() -> None:
    membership = Membership(0)
    for node, role, rank in (("o", Role.OBSERVER, None), ("b", Role.WORKER, 4), ("a", Role.WORKER, 1)):
        membership.register(node, role, 0.0, rank=rank, address=node)
    membership.register("s", Role.SERVER, 0.0, address="s")
    assert nodes_of(membership) == ["s", "a", "b", "o"]


def test_a_requested_rank_is_assigned_or_rejected() -> None:
    membership = Membership(0)
    assert membership.register("a", Role.WORKER, 0.0, rank=3).rank == 3
    for node, rank, why in (("b", 3, "node 'a'"), ("c", -1, "negative")):
        with pytest.raises(UsageError, match=why):
            membership.register(node, Role.WORKER, 0.0, rank=rank)
        assert membership.named(node) is None
    assert membership.last_incarnation == 1  # the rejection changes nothing
    assert membership.register("d", Role.SERVER, 0.0, rank=3, address="d").rank == 3  # each role has its own ranks


def test_a_repeated_registration_keeps_the_member_and_counts_as_a_heartbeat() -> None:
    membership = Membership(0, heartbeat_timeout_s=10.0)
    member = membership.register("a", Role.WORKER, 0.0, rank=2, address="here")
    assert membership.register("a", Role.WORKER, 8.0, rank=0, address="there") is member
    assert membership.last_incarnation == 1
    assert overdue_at(membership, 18.0) == []
    assert overdue_at(membership, 18.1) == ["a"]


def test_a_member_is_overdue_after_the_timeout_until_the_next_heartbeat() -> None:
    membership = Membership(0, heartbeat_timeout_s=10.0)
    a = membership.register("a", Role.WORKER, 0.0)
    membership.register("b", Role.WORKER, 0.0)
    assert membership.record_heartbeat(a.incarnation, 8.0)
    assert membership.record_heartbeat(a.incarnation, 5.0)  # a late message does not set the time back
    assert overdue_at(membership, 10.0) == []
    assert overdue_at(membership, 10.5) == ["b"]
    assert overdue_at(membership, 18.5) == ["a", "b"]
    assert nodes_of(membership) == ["a", "b"]  # an overdue member may be alive
    assert membership.record_heartbeat(2, 18.5)
    assert overdue_at(membership, 18.5) == ["a"]


def test_a_doubted_member_is_overdue_until_the_next_heartbeat() -> None:
    membership = Membership(0)
    a = membership.register("a", Role.WORKER, 0.0)
    membership.suspect(a.incarnation)
    membership.suspect(7)  # 7 is no member
    assert overdue_at(membership, 0.0) == ["a"]
    assert membership.record_heartbeat(a.incarnation, 0.0)
    assert overdue_at(membership, 0.0) == []


def test_a_removed_member_does_not_return() -> None:
    membership = Membership(0)
    a = membership.register("a", Role.WORKER, 0.0)
    assert membership.remove(a.incarnation) is a
    assert membership.remove(a.incarnation) is None
    assert not membership.record_heartbeat(a.incarnation, 1.0)
    assert membership.members == ()
    again = membership.register("a", Role.WORKER, 1.0)
    assert (again.rank, again.incarnation) == (0, 2)


def test_a_rebuilt_membership_has_the_living_members_and_new_incarnations() -> None:
    former = Membership(1)
    for node, role in (("s", Role.SERVER), ("a", Role.WORKER), ("b", Role.WORKER)):
        former.register(node, role, 0.0, address=node)
    living = [member for member in former.members if member.node != "b"]
    membership = Membership.rebuild(living, 100, expected_servers=1, time_s=50.0, heartbeat_timeout_s=5.0)
    membership.validate()
    assert membership.ready
    assert membership.members == tuple(living)
    assert not membership.record_heartbeat(3, 51.0)
    assert overdue_at(membership, 55.0) == []
    assert overdue_at(membership, 55.5) == ["s", "a"]
    assert membership.last_incarnation == 99  # so b counts as a former member
    b = membership.register("b", Role.WORKER, 51.0)
    assert (b.rank, b.incarnation) == (1, 100)


@pytest.mark.parametrize(
    ("claims", "kept"),
    [
        ([("a", 0, 1), ("a", 1, 4), ("b", 2, 2)], [4, 2]),  # equal names
        ([("a", 0, 1), ("b", 0, 4), ("c", 1, 2)], [4, 2]),  # equal ranks
    ],
)
def test_the_later_of_two_members_with_one_place_is_kept(claims: list[tuple[str, int, int]], kept: list[int]) -> None:
    members = [Member(node, Role.WORKER, rank, incarnation) for node, rank, incarnation in claims]
    membership = Membership.rebuild(members, 1, expected_servers=0, time_s=0.0)
    membership.validate()
    assert [member.incarnation for member in membership.members] == kept
    assert membership.last_incarnation == 4  # even if the next incarnation would be lower


def test_a_member_in_no_view_is_readmitted_unless_the_rank_is_occupied() -> None:
    membership = Membership.rebuild([], 100, expected_servers=0, time_s=0.0, heartbeat_timeout_s=5.0)
    late = Member("a", Role.WORKER, 0, 7, "here")
    assert membership.readmit(late, 1.0) is late
    assert membership.find(7) is late
    assert overdue_at(membership, 6.1) == ["a"]
    assert not membership.readmit(Member("a", Role.WORKER, 3, 8), 1.0)
    assert not membership.readmit(Member("b", Role.WORKER, 0, 8), 1.0)
    assert not membership.readmit(Member("c", Role.WORKER, 3, 100), 1.0)  # this incarnation was never assigned
    assert membership.register("d", Role.WORKER, 1.0).rank == 1
    # No other member knows the rank of an observer, so it may change.
    for incarnation, rank in ((8, 0), (9, 1)):
        observer = membership.readmit(Member(f"o{incarnation}", Role.OBSERVER, 0, incarnation), 1.0)
        assert observer is not None
        assert observer.rank == rank
    membership.validate()


@pytest.mark.parametrize("numbers", [(-1, 1.0, 1), (1, 0.0, 1), (1, math.nan, 1), (1, 1.0, 0)])
def test_illegal_numbers_are_rejected(numbers: tuple[int, float, int]) -> None:
    with pytest.raises(UsageError, match="expected at least 0, more than 0 and at least 1"):
        Membership(numbers[0], numbers[1], first_incarnation=numbers[2])


TIMEOUT_S = 10.0
nodes = st.sampled_from("abcdef")


class MembershipMachine(RuleBasedStateMachine):
    """A membership and its model: the members and their last heartbeats."""

    def __init__(self) -> None:
        super().__init__()
        self.membership = Membership(2, TIMEOUT_S)
        self.now_s = 0.0
        self.members: dict[str, Member] = {}
        self.heartbeat_s: dict[str, float] = {}
        self.removed: list[Member] = []
        self.last = 0

    def ranks(self, role: Role) -> set[int]:
        return {member.rank for member in self.members.values() if member.role is role}

    @rule(node=nodes, role=st.sampled_from(Role), rank=st.none() | st.integers(-1, 3))
    def register(self, node: str, role: Role, rank: int | None) -> None:
        taken, known = self.ranks(role), self.members.get(node)
        if known is None and rank is not None and (rank < 0 or rank in taken):
            with pytest.raises(UsageError):
                self.membership.register(node, role, self.now_s, rank=rank, address=self.now_s)
            return
        member = self.membership.register(node, role, self.now_s, rank=rank, address=self.now_s)
        if known is None:
            rank = min(set(range(len(taken) + 1)) - taken) if rank is None else rank
            self.last += 1
            known = Member(node, role, rank, self.last, self.now_s)
        assert member == known
        self.members[node], self.heartbeat_s[node] = member, self.now_s

    @rule(node=nodes, before_s=st.sampled_from([0.0, 3.0]))
    def receive_heartbeat(self, node: str, before_s: float) -> None:
        if node in self.members:
            assert self.membership.record_heartbeat(self.members[node].incarnation, self.now_s - before_s)
            self.heartbeat_s[node] = max(self.now_s - before_s, self.heartbeat_s[node])

    @rule(node=nodes)
    def suspect(self, node: str) -> None:
        if node in self.members:
            self.membership.suspect(self.members[node].incarnation)
            self.heartbeat_s[node] = -math.inf

    @rule(node=nodes)
    def remove(self, node: str) -> None:
        if node in self.members:
            member = self.members.pop(node)
            del self.heartbeat_s[node]
            assert self.membership.remove(member.incarnation) == member
            self.removed.append(member)

    @rule(data=st.data(), how=st.sampled_from(["heartbeat", "suspected", "removed"]))
    def the_dead_stay_dead(self, data: st.DataObject, how: str) -> None:
        if self.removed:
            incarnation = data.draw(st.sampled_from(self.removed)).incarnation
            if how == "heartbeat":
                assert not self.membership.record_heartbeat(incarnation, self.now_s)
            elif how == "suspected":
                self.membership.suspect(incarnation)
            else:
                assert self.membership.remove(incarnation) is None

    @rule(data=st.data())
    def readmit(self, data: st.DataObject) -> None:
        if self.removed:
            member = data.draw(st.sampled_from(self.removed))
            is_named = member.node in self.members
            ranks = self.ranks(member.role)
            readmitted = self.membership.readmit(member, self.now_s)
            if is_named or (member.rank in ranks and member.role is not Role.OBSERVER):
                assert readmitted is None
                return
            assert readmitted is not None
            assert readmitted.rank == (member.rank if member.rank not in ranks else min(set(range(9)) - ranks))
            assert replace(readmitted, rank=member.rank) == member
            self.members[member.node], self.heartbeat_s[member.node] = readmitted, self.now_s
            self.removed.remove(member)

    @rule(by=st.integers(0, 5))
    def restart(self, by: int) -> None:
        """Another scheduler rebuilds the membership from all members and one former member."""
        claims = [*self.members.values(), *self.removed[-1:]]
        self.members, self.removed = {}, self.removed[:-1]
        for member in sorted(claims, key=lambda claim: -claim.incarnation):
            if member.node in self.members or member.rank in self.ranks(member.role):
                self.removed.append(member)
            else:
                self.members[member.node] = member
        self.last += by
        self.membership = Membership.rebuild(
            claims, self.last + 1, expected_servers=2, time_s=self.now_s, heartbeat_timeout_s=TIMEOUT_S
        )
        self.heartbeat_s = dict.fromkeys(self.members, self.now_s)

    @rule(by_s=st.sampled_from([0.0, 1.0, 4.0, 11.0]))
    def pass_time(self, by_s: float) -> None:
        self.now_s += by_s

    @invariant()
    def agrees(self) -> None:
        self.membership.validate()
        assert set(self.membership.members) == set(self.members.values())
        for role in Role:
            of_role = [member for member in self.members.values() if member.role is role]
            assert list(self.membership.of(role)) == sorted(of_role, key=lambda listed: listed.rank)
        assert self.membership.ready == (len(self.membership.of(Role.SERVER)) >= 2)
        assert self.membership.last_incarnation == self.last
        late = [
            self.members[node] for node, heartbeat_s in self.heartbeat_s.items() if heartbeat_s < self.now_s - TIMEOUT_S
        ]
        assert list(self.membership.overdue(self.now_s)) == sorted(late, key=lambda listed: listed.incarnation)


TestMembershipMachine = MembershipMachine.TestCase
TestMembershipMachine.settings = num_examples(60, stateful_step_count=35)
