"""Membership: by example, and under any order of events against a plain model."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paceline.errors import UsageError
from paceline.protocol import Member, Membership, Role
from paceline.protocol.membership import (
    Clock,
    Dead,
    Disconnected,
    Event,
    Expel,
    Expelled,
    Heartbeat,
    Instruction,
    Leave,
    Publish,
    Refuse,
    Register,
    Welcome,
)


def feed(membership: Membership, *events: Event) -> list[Instruction]:
    """The instructions of the last event."""
    instructions: list[Instruction] = []
    for event in events:
        instructions = membership.handle(event)
        membership.validate()
    return instructions


def register(node: str, role: Role = Role.WORKER, now_s: float = 0.0, rank: int | None = None) -> Register:
    return Register(node, role, ("host", 1), now_s, rank)


def test_register_welcomes_then_publishes() -> None:
    membership = Membership(1)
    member = Member("s", Role.SERVER, 0, 1, ("host", 1))
    assert not Membership(1).ready
    assert feed(membership, register("s", Role.SERVER)) == [
        Welcome("s", Role.SERVER, 0, 1, 1),
        Publish(1, (member,)),
    ]
    assert membership.ready
    assert membership.publish() == Publish(1, (member,))


def test_ranks_are_the_smallest_free_of_the_role() -> None:
    membership = Membership(0)
    feed(membership, register("s", Role.SERVER), register("a"), register("b"), register("c"))
    assert [(m.node, m.rank) for m in membership.members] == [("s", 0), ("a", 0), ("b", 1), ("c", 2)]
    feed(membership, Leave("b", 3))
    assert feed(membership, register("d"))[0] == Welcome("d", Role.WORKER, 1, 5, 6)


def test_a_preferred_rank_is_given_or_refused() -> None:
    membership = Membership(0)
    assert feed(membership, register("a", rank=3))[0] == Welcome("a", Role.WORKER, 3, 1, 1)
    for node, rank, why in (("b", 3, "held by node 'a'"), ("c", -1, "negative")):
        (refusal,) = feed(membership, register(node, rank=rank))
        assert isinstance(refusal, Refuse)
        assert why in refusal.reason
    assert membership.epoch == 1
    assert feed(membership, register("d"))[0] == Welcome("d", Role.WORKER, 0, 2, 2)


def test_silence_is_death_and_the_dead_are_expelled() -> None:
    membership = Membership(0, heartbeat_timeout_s=10.0)
    feed(membership, register("a"), register("b"), Heartbeat("a", 1, 8.0))
    assert membership.next_expiry_s == 10.0
    assert feed(membership, Clock(10.0)) == []
    dead, published = feed(membership, Clock(10.5))
    assert dead == Dead("b", Role.WORKER, 1, 2, "nothing was heard from it for 10 s")
    assert isinstance(published, Publish)
    assert (published.epoch, [m.node for m in published.members]) == (3, ["a"])
    assert feed(membership, Heartbeat("b", 2, 11.0)) == [Expelled("b", 2)]
    assert feed(membership, Heartbeat("who", 9, 11.0)) == [Expelled("who", 9)]


def test_one_that_lives_is_expelled_when_told_so() -> None:
    membership = Membership(0)
    feed(membership, register("a"), register("b"))
    dead, published = feed(membership, Expel(2, "it reaches nobody"))
    assert dead == Dead("b", Role.WORKER, 1, 2, "it reaches nobody")
    assert isinstance(published, Publish)
    assert (published.epoch, [m.node for m in published.members]) == (3, ["a"])
    assert feed(membership, Heartbeat("b", 2, 0.0)) == [Expelled("b", 2)]
    assert feed(membership, Expel(2, "it reaches nobody")) == []


def test_several_deaths_at_once_are_one_epoch() -> None:
    membership = Membership(0)
    feed(membership, register("a"), register("b"), register("o", Role.OBSERVER))
    instructions = feed(membership, Clock(60.0))
    assert [type(i) for i in instructions] == [Dead, Dead, Dead, Publish]
    assert instructions[-1] == Publish(3, ())
    assert membership.next_expiry_s is None


def test_a_broken_connection_is_death_at_once() -> None:
    membership = Membership(0)
    feed(membership, register("a"))
    dead, published = feed(membership, Disconnected("a", 1, 1.0))
    assert dead == Dead("a", Role.WORKER, 0, 1, "its connection to the scheduler broke")
    assert published == Publish(2, ())
    assert feed(membership, Disconnected("a", 1, 1.0)) == []


def test_with_grace_a_broken_connection_may_come_back() -> None:
    membership = Membership(0, disconnect_grace_s=2.0)
    feed(membership, register("a"), register("b"), Disconnected("a", 1, 1.0), Disconnected("b", 2, 1.0))
    feed(membership, Heartbeat("a", 1, 2.5))
    dead, _ = feed(membership, Clock(3.5))
    assert dead == Dead("b", Role.WORKER, 1, 2, "its connection broke and it was not back within 2 s")
    assert [m.node for m in membership.members] == ["a"]
    dead, _ = feed(membership, Clock(13.0))
    assert dead == Dead("a", Role.WORKER, 0, 1, "nothing was heard from it for 10 s")


def test_a_node_that_registers_again_replaces_itself_in_one_epoch() -> None:
    membership = Membership(0)
    feed(membership, register("a", rank=4))
    assert feed(membership, register("a", rank=4)) == [
        Dead("a", Role.WORKER, 4, 1, "its node registered again"),
        Welcome("a", Role.WORKER, 4, 2, 2),
        Publish(2, (Member("a", Role.WORKER, 4, 2, ("host", 1)),)),
    ]
    # What the former process still says does no harm to the new one.
    assert feed(membership, Disconnected("a", 1, 1.0), Leave("a", 1)) == []
    assert feed(membership, Heartbeat("a", 1, 1.0)) == [Expelled("a", 1)]


def test_a_refused_registration_leaves_the_former_one_alone() -> None:
    membership = Membership(0)
    feed(membership, register("a"), register("b"))
    (refusal,) = feed(membership, register("a", rank=1))
    assert isinstance(refusal, Refuse)
    assert feed(membership, Heartbeat("a", 1, 1.0)) == []


def test_observers_do_not_change_the_map() -> None:
    membership = Membership(0)
    assert feed(membership, register("o", Role.OBSERVER)) == [Welcome("o", Role.OBSERVER, 0, 1, 0)]
    assert feed(membership, Leave("o", 1)) == []
    assert membership.publish() == Publish(0, ())


def test_rebuild_knows_the_living_and_reuses_nothing() -> None:
    former = Membership(1)
    feed(former, register("s", Role.SERVER), register("a"), register("b"), register("a"))
    reported = [m for m in former.members if m.node != "b"]
    stale = Member("a", Role.WORKER, 0, 2, "old")
    membership = Membership.rebuild(
        [stale, *reported], former.epoch, expected_servers=1, now_s=100.0, heartbeat_timeout_s=5.0
    )
    membership.validate()
    assert membership.ready
    assert set(membership.members) == set(reported)
    assert membership.publish().epoch == former.epoch + 1
    assert feed(membership, Heartbeat("s", 1, 101.0)) == []
    assert feed(membership, Heartbeat("a", 2, 101.0)) == [Expelled("a", 2)]
    welcome = feed(membership, register("c", now_s=101.0))[0]
    assert isinstance(welcome, Welcome)
    assert welcome.incarnation > 4
    dead, _ = feed(membership, Clock(105.5))
    assert isinstance(dead, Dead)
    assert dead.node == "a"


def test_no_incarnation_is_given_by_two_rebuilt_maps() -> None:
    membership = Membership(0)
    feed(membership, register("a"), *(register(f"o{number}", Role.OBSERVER) for number in range(5)))
    given: list[int] = []
    for node in ("b", "c"):  # each comes after a restart and is gone before the next, with nobody to tell of it
        survivors = [member for member in membership.members if member.role is Role.WORKER]
        membership = Membership.rebuild(survivors, membership.epoch, expected_servers=0, now_s=0.0)
        assert max(given, default=6) <= membership.last_incarnation  # so whoever is gone is known to be
        welcome = feed(membership, register(node))[0]
        assert isinstance(welcome, Welcome)
        assert welcome.incarnation == membership.last_incarnation
        given.append(welcome.incarnation)
        feed(membership, Leave(node, welcome.incarnation))
    assert given == sorted(set(given))
    assert given[0] > 6


@pytest.mark.parametrize("numbers", [(-1, 1.0, 0.0), (1, 0.0, 0.0), (1, math.nan, 0.0), (1, 1.0, -1.0)])
def test_illegal_numbers(numbers: tuple[int, float, float]) -> None:
    with pytest.raises(UsageError, match="expected"):
        Membership(numbers[0], numbers[1], disconnect_grace_s=numbers[2])


nodes = st.sampled_from("abcdef")
TIMEOUT_S, GRACE_S = 10.0, 3.0


class MembershipMachine(RuleBasedStateMachine):
    """The model follows from the instructions alone, as a runtime would: who is welcomed and not gone."""

    def __init__(self) -> None:
        super().__init__()
        self.membership = Membership(2, TIMEOUT_S, disconnect_grace_s=GRACE_S)
        self.now_s = 0.0
        self.live: dict[str, tuple[Role, int, int]] = {}  # node → role, rank, incarnation
        self.deadline_s: dict[str, float] = {}
        self.former: list[tuple[str, int]] = []
        self.last_incarnation = 0
        self.map_of_epoch: dict[int, set[tuple[str, int]]] = {0: set()}

    def apply(self, event: Event) -> list[Instruction]:
        before = self.membership.epoch
        instructions = self.membership.handle(event)
        for instruction in instructions:
            if isinstance(instruction, Dead):
                known = (instruction.role, instruction.rank, instruction.incarnation)
                assert self.live.pop(instruction.node) == known
                self.former.append((instruction.node, instruction.incarnation))
            elif isinstance(instruction, Welcome):
                assert instruction.node not in self.live
                assert instruction.incarnation > self.last_incarnation
                self.last_incarnation = instruction.incarnation
                taken = {rank for role, rank, _ in self.live.values() if role is instruction.role}
                assert instruction.rank not in taken
                if isinstance(event, Register) and event.preferred_rank is None:
                    assert taken >= set(range(instruction.rank))
                self.live[instruction.node] = instruction.role, instruction.rank, instruction.incarnation
                self.deadline_s[instruction.node] = self.now_s + TIMEOUT_S
                assert instruction.epoch == self.membership.epoch
        if isinstance(event, Leave):
            role_of = self.live.get(event.node)
            if role_of is not None and role_of[2] == event.incarnation:
                del self.live[event.node]
                self.former.append((event.node, event.incarnation))
        published = [i for i in instructions if isinstance(i, Publish)]
        mapped = {(n, i) for n, (role, _, i) in self.live.items() if role is not Role.OBSERVER}
        assert (mapped != self.map_of_epoch[before]) == bool(published), "the epoch follows the map"
        assert self.membership.epoch == before + len(published)
        if published:
            assert published == [instructions[-1]]
            assert {(m.node, m.incarnation) for m in published[0].members} == mapped
            self.map_of_epoch[published[0].epoch] = mapped
        return instructions

    @rule(node=nodes, role=st.sampled_from(Role), rank=st.none() | st.integers(-1, 3))
    def register(self, node: str, role: Role, rank: int | None) -> None:
        others = {r for n, (o, r, _) in self.live.items() if o is role and n != node}
        instructions = self.apply(Register(node, role, "here", self.now_s, rank))
        refused = any(isinstance(i, Refuse) for i in instructions)
        assert refused == (rank is not None and (rank in others or rank < 0))
        assert not refused or len(instructions) == 1

    @rule(node=nodes)
    def heartbeat(self, node: str) -> None:
        if node in self.live:
            assert self.apply(Heartbeat(node, self.live[node][2], self.now_s)) == []
            self.deadline_s[node] = self.now_s + TIMEOUT_S

    @rule(data=st.data(), how=st.sampled_from(["beat", "break", "leave"]))
    def the_dead_stay_dead(self, data: st.DataObject, how: str) -> None:
        if self.former:
            node, incarnation = data.draw(st.sampled_from(self.former))
            if how == "beat":
                assert self.apply(Heartbeat(node, incarnation, self.now_s)) == [Expelled(node, incarnation)]
            elif how == "break":
                assert self.apply(Disconnected(node, incarnation, self.now_s)) == []
            else:
                assert self.apply(Leave(node, incarnation)) == []

    @rule(node=nodes)
    def disconnect(self, node: str) -> None:
        if node in self.live:
            assert self.apply(Disconnected(node, self.live[node][2], self.now_s)) == []
            self.deadline_s[node] = min(self.deadline_s[node], self.now_s + GRACE_S)

    @rule(node=nodes)
    def leave(self, node: str) -> None:
        if node in self.live:
            self.apply(Leave(node, self.live[node][2]))

    @rule(node=nodes)
    def expel(self, node: str) -> None:
        if node in self.live:
            assert any(isinstance(each, Dead) for each in self.apply(Expel(self.live[node][2], "why")))

    @rule(by_s=st.sampled_from([0.0, 1.0, 2.5, 4.0, 11.0]))
    def time_goes_on(self, by_s: float) -> None:
        self.now_s += by_s
        expected = {node for node in self.live if self.deadline_s[node] < self.now_s}
        instructions = self.apply(Clock(self.now_s))
        assert {i.node for i in instructions if isinstance(i, Dead)} == expected

    @invariant()
    def agrees(self) -> None:
        self.membership.validate()
        assert {m.node: (m.role, m.rank, m.incarnation) for m in self.membership.members} == self.live
        servers = sum(role is Role.SERVER for role, _, _ in self.live.values())
        assert self.membership.ready == (servers >= 2)


TestMembershipMachine = MembershipMachine.TestCase
TestMembershipMachine.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)
