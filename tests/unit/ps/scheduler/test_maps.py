"""Views as they travel: what comes out is what went in."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ProtocolError
from paceline.protocol import NUM_BUCKETS, ChainGroup, Member, Role
from paceline.protocol.scheduler import View
from paceline.ps import messages
from paceline.ps.messages import ClusterMap, MapChange, ProcessIdentity
from paceline.ps.scheduler.maps import change_of, map_of, member_of, view_of
from paceline.transport import Address, Endpoint

seeds = st.integers(0, 2**32)


def some_members(random: Random, *, first: int = 1) -> list[Member]:
    members: list[Member] = []
    ranks = {role: random.sample(range(6), random.randrange(6)) for role in (Role.SERVER, Role.WORKER)}
    for role, taken in ranks.items():
        for rank in sorted(taken):
            incarnation = first + len(members)
            endpoint = Endpoint(Address.parse(f"tcp://10.0.0.{rank}:{1000 + rank}")) if role is Role.SERVER else None
            process = ProcessIdentity("host", incarnation, 7) if random.random() < 0.5 else None
            members.append(Member(f"{role.value} {incarnation}", role, rank, incarnation, endpoint, process))
    return members


def some_groups(random: Random, servers: list[int]) -> tuple[ChainGroup, ...]:
    masks: dict[tuple[tuple[int, ...], int | None], int] = {}
    for bucket in range(NUM_BUCKETS):
        chain = tuple(random.sample(servers, min(len(servers), random.randrange(3))))
        others = [each for each in servers if each not in chain]
        filling = random.choice(others) if others and chain and random.random() < 0.3 else None
        masks[chain, filling] = masks.get((chain, filling), 0) | 1 << bucket
    return tuple(ChainGroup(members, filling, mask) for (members, filling), mask in masks.items())


def some_view(random: Random, members: list[Member] | None = None) -> View:
    members = some_members(random) if members is None else members
    servers = [each.incarnation for each in members if each.role is Role.SERVER]
    return View(
        term=random.randrange(1 << 20),
        epoch=random.randrange(1 << 20),
        version=random.randrange(1 << 20),
        members=tuple(members),
        groups=some_groups(random, servers) if random.random() < 0.8 else (),
        last_incarnation=random.randrange(1 << 30),
        former_voters=tuple(random.sample(range(1, 30), random.randrange(4))),
    )


def travelled(cluster: ClusterMap) -> ClusterMap:
    return msgspec.msgpack.decode(messages.encode(cluster), type=ClusterMap)


@given(seed=seeds, is_partial=st.booleans())
def test_a_view_travels_whole(seed: int, is_partial: bool) -> None:
    view = some_view(Random(seed))
    view = view.without_workers() if is_partial else view
    assert view_of(travelled(map_of(view, num_waiting=3))) == view


@given(seed=seeds)
def test_a_change_applied_to_the_map_before_is_the_map_after(seed: int) -> None:
    random = Random(seed)
    base = some_view(random)
    kept = [each for each in base.members if random.random() < 0.7]
    after = some_view(random, [*kept, *some_members(random, first=100)])
    change = msgspec.msgpack.decode(messages.encode(change_of(base, after)), type=MapChange)
    cluster = change.apply(travelled(map_of(base)))
    view = view_of(cluster)
    assert sorted(view.members, key=lambda each: each.incarnation) == sorted(
        after.members, key=lambda each: each.incarnation
    )
    whole = map_of(after)
    assert msgspec.structs.replace(cluster, members=()) == msgspec.structs.replace(whole, members=())
    assert {each.incarnation for each in change.joined} == {each.incarnation for each in after.members} - {
        each.incarnation for each in kept
    }


def test_chains_that_stay_do_not_travel_again() -> None:
    base = some_view(Random(1))
    after = some_view(Random(2), list(base.members))
    same = View(base.term, base.epoch + 1, base.version, base.members, base.groups)
    assert change_of(base, same).groups is None
    assert change_of(base, after).groups == map_of(after).groups
    assert (change_of(base, base).joined, change_of(base, base).gone) == ((), ())


def test_a_change_of_another_map_is_refused() -> None:
    base, other = View(epoch=4), View(epoch=5)
    with pytest.raises(ProtocolError, match="since map 4, and 5 is here"):
        change_of(base, View(epoch=6)).apply(map_of(other))


@pytest.mark.parametrize("role", list(Role))
def test_a_member_is_who_it_was(role: Role) -> None:
    member = Member("name", role, 3, 9, Endpoint(Address.parse("tcp://10.0.0.1:5")), ProcessIdentity("host", 1, 2))
    info = map_of(View(members=(member,))).members[0]
    assert member_of(info) == member
