"""The encoding of views keeps their content."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from paceline.errors import ProtocolError
from paceline.protocol import NUM_BUCKETS, Member, Role
from paceline.protocol.chains import ChainGroup, chain_group, chains_of, groups_of
from paceline.protocol.membership import ProcessIdentity
from paceline.protocol.scheduler.views import View, ViewChange
from paceline.ps import messages
from paceline.transport import Address, Endpoint

seeds = st.integers(0, 2**32)


def random_members(random: Random, *, first: int = 1) -> list[Member]:
    members: list[Member] = []
    ranks = {role: random.sample(range(6), random.randrange(6)) for role in (Role.SERVER, Role.WORKER)}
    for role, taken in ranks.items():
        for rank in sorted(taken):
            incarnation = first + len(members)
            endpoint = Endpoint(Address.parse(f"tcp://10.0.0.{rank}:{1000 + rank}")) if role is Role.SERVER else None
            process = ProcessIdentity("host", incarnation, 7) if random.random() < 0.5 else None
            members.append(Member(f"{role.value} {incarnation}", role, rank, incarnation, endpoint, process))
    return members


def random_groups(random: Random, servers: list[int]) -> tuple[ChainGroup, ...]:
    masks: dict[tuple[tuple[int, ...], int | None], int] = {}
    for bucket in range(NUM_BUCKETS):
        chain = tuple(random.sample(servers, min(len(servers), random.randrange(3))))
        candidates = [server for server in servers if server not in chain]
        filling = random.choice(candidates) if candidates and chain and random.random() < 0.3 else None
        masks[chain, filling] = masks.get((chain, filling), 0) | 1 << bucket
    return tuple(chain_group(members, filling, mask) for (members, filling), mask in masks.items())


def random_view(random: Random, members: list[Member] | None = None) -> View:
    members = random_members(random) if members is None else members
    servers = [member.incarnation for member in members if member.role is Role.SERVER]
    return View(
        term=random.randrange(1 << 20),
        epoch=random.randrange(1 << 20),
        version=random.randrange(1 << 20),
        members=tuple(members),
        groups=random_groups(random, servers) if random.random() < 0.8 else (),
        last_incarnation=random.randrange(1 << 30),
        former_voters=tuple(random.sample(range(1, 30), random.randrange(4))),
    )


def received(view: View) -> View:
    return msgspec.msgpack.decode(messages.encode(view), type=View[Endpoint])


@given(seed=seeds, is_partial=st.booleans())
def test_a_received_view_equals_the_sent_view(seed: int, is_partial: bool) -> None:
    view = random_view(Random(seed))
    view = view.without_workers() if is_partial else view
    assert received(view) == view


@given(seed=seeds)
def test_a_change_applied_to_the_earlier_view_gives_the_later_view(seed: int) -> None:
    random = Random(seed)
    base = random_view(random)
    retained = [member for member in base.members if random.random() < 0.7]
    after = random_view(random, [*retained, *random_members(random, first=100)])
    after = replace(after, groups=after.groups or base.groups)  # a view with chains never loses all chains
    change = msgspec.msgpack.decode(messages.encode(ViewChange.between(base, after)), type=ViewChange[Endpoint])
    view = change.apply(received(base))
    assert sorted(view.members, key=lambda listed: listed.incarnation) == sorted(
        after.members, key=lambda listed: listed.incarnation
    )
    assert msgspec.structs.replace(view, members=()) == msgspec.structs.replace(after, members=())
    assert {member.incarnation for member in change.joined} == {member.incarnation for member in after.members} - {
        member.incarnation for member in retained
    }


def test_unchanged_chains_are_not_sent_again() -> None:
    base = random_view(Random(1))
    same = View(base.term, base.epoch + 1, base.version, base.members, base.groups)
    assert ViewChange.between(base, same).groups == ()
    chain = chain_group((7, 9), None, 1 << 5)
    others = [chain_group(each.members, each.filling, each.buckets & ~chain.buckets) for each in base.groups]
    moved = replace(same, groups=groups_of(chains_of([chain, *others])))
    assert ViewChange.between(base, moved).groups == (chain,)
    unchanged = ViewChange.between(base, base)
    assert (unchanged.joined, unchanged.removed) == ((), ())


def test_a_change_of_another_view_is_refused() -> None:
    base, other = View(epoch=4), View(epoch=5)
    with pytest.raises(ProtocolError, match=r"view 4.*view 5"):
        ViewChange.between(base, View(epoch=6)).apply(other)


@pytest.mark.parametrize(
    "fields",
    [
        {"epoch": -1},
        {"groups": [((1,), None, b"\5" + b"\0" * 63)]},
        {"groups": [((1, 1), None, b"\0" * 64)]},
        {"groups": [((1,), None, b"\0" * 65)]},
        {"groups": [((1,), None, b"\1", 64)]},
        {"members": [{"node": "s", "role": "server", "rank": 0, "incarnation": 1}]},
        {"members": [{"node": "w", "role": "boss", "rank": 0, "incarnation": 1}]},
    ],
)
def test_bounds_of_views_are_checked(fields: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="cannot be read"):
        messages.decode_notice(msgspec.msgpack.encode({"type": "View", **fields}))
