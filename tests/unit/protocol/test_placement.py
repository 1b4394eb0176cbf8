"""Placement: the same everywhere, even enough, and a change moves only what it must."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.protocol import NUM_BUCKETS, Move, place

servers_of = st.lists(st.integers(0, 10**6), min_size=1, max_size=6, unique=True)
PINNED = [2, 2, 1, 1, 2, 1, 1, 2, 2, 0, 2, 0, 2, 1, 0, 2]

fast = settings(max_examples=40, deadline=None)


def test_this_map_never_changes() -> None:
    # A saved table and a peer of another version rely on it: whoever changes the hash changes the format.
    assert [chain[0] for chain in place(16, [0, 1, 2]).chains] == PINNED


@fast
@given(servers_of, st.integers(0, 3), st.integers())
def test_order_of_servers_does_not_matter(servers: list[int], replicas: int, salt: int) -> None:
    placement = place(64, servers, replicas, salt)
    placement.validate()
    assert placement == place(64, list(reversed(servers)), replicas, salt)
    assert {len(chain) for chain in placement.chains} == {min(1 + replicas, len(servers))}
    assert sorted(b for s in servers for b in placement.owned(s)) == list(range(64))
    assert all(placement.primary(b) == s for s in servers for b in placement.owned(s))


@fast
@given(servers_of, st.integers(0, 10**6))
def test_a_join_moves_buckets_to_the_newcomer_only(servers: list[int], newcomer: int) -> None:
    if newcomer in servers:
        return
    before, after = place(128, servers), place(128, [*servers, newcomer])
    moves = before.moves(after)
    assert {move.target for move in moves} <= {newcomer}
    assert {move.bucket for move in moves} == set(after.owned(newcomer))


@fast
@given(servers_of.filter(lambda servers: len(servers) > 1))
def test_a_leave_moves_the_leavers_buckets_only_and_to_their_first_replica(servers: list[int]) -> None:
    leaver = servers[0]
    before, after = place(128, servers, replicas=1), place(128, servers[1:], replicas=1)
    moves = before.moves(after)
    assert {move.bucket for move in moves} == set(before.owned(leaver))
    assert all(move == Move(move.bucket, *before.chains[move.bucket]) for move in moves)


@pytest.mark.parametrize("num_servers", [2, 3, 8, 16])
def test_load_is_even_within_what_chance_allows(num_servers: int) -> None:
    mean = NUM_BUCKETS / num_servers
    spread = math.sqrt(mean * (1 - 1 / num_servers))
    for salt in range(5):
        placement = place(NUM_BUCKETS, range(num_servers), salt=salt)
        loads = [len(placement.owned(server)) for server in range(num_servers)]
        assert max(loads) < mean + 4 * spread
        assert min(loads) > mean - 4 * spread


def test_salt_gives_another_map() -> None:
    assert place(64, [0, 1], salt=0) != place(64, [0, 1], salt=1)


@pytest.mark.parametrize(
    ("num_buckets", "servers", "replicas", "match"),
    [(8, [], 0, "No servers"), (8, [1, 1], 0, "duplicate"), (0, [1], 0, "expected"), (8, [1], -1, "expected")],
)
def test_illegal_arguments(num_buckets: int, servers: list[int], replicas: int, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        place(num_buckets, servers, replicas)


def test_maps_of_different_sizes_do_not_compare() -> None:
    with pytest.raises(UsageError, match="8 and 9 buckets"):
        place(8, [0]).moves(place(9, [0]))
