"""Placement is the same in all processes, nearly even, and moves as few buckets as possible."""

from __future__ import annotations

import math
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.random_examples import num_examples

from paceline.errors import UsageError
from paceline.protocol import NUM_BUCKETS
from paceline.protocol.placement import place

servers_of = st.lists(st.integers(0, 10**6), min_size=1, max_size=6, unique=True)
PINNED = [2, 2, 1, 1, 2, 1, 1, 2, 2, 0, 2, 0, 2, 1, 0, 2]

Chains: TypeAlias = tuple[tuple[int, ...], ...]

fast = num_examples(40)


def moves_of(before: Chains, after: Chains) -> dict[int, tuple[int, int]]:
    """Return the buckets whose primary changes, with both primaries."""
    pairs = enumerate(zip(before, after, strict=True))
    return {bucket: (old[0], new[0]) for bucket, (old, new) in pairs if old[0] != new[0]}


def led_by(chains: Chains, server: int) -> set[int]:
    return {bucket for bucket, chain in enumerate(chains) if chain[0] == server}


def test_the_placement_never_changes() -> None:
    # Saved tables and peers of other versions depend on the placement, so another hash needs another format.
    assert [chain[0] for chain in place(16, [0, 1, 2])] == PINNED


@fast
@given(servers_of, st.integers(0, 3))
def test_order_of_servers_does_not_matter(servers: list[int], replicas: int) -> None:
    chains = place(64, servers, replicas)
    assert chains == place(64, list(reversed(servers)), replicas)
    assert len(chains) == 64
    assert {len(set(chain)) for chain in chains} == {min(1 + replicas, len(servers))}


@fast
@given(servers_of, st.integers(0, 10**6))
def test_a_join_moves_buckets_only_to_the_new_server(servers: list[int], newcomer: int) -> None:
    if newcomer in servers:
        return
    before, after = place(128, servers), place(128, [*servers, newcomer])
    moves = moves_of(before, after)
    assert {target for _, target in moves.values()} <= {newcomer}
    assert moves.keys() == led_by(after, newcomer)


@fast
@given(servers_of.filter(lambda servers: len(servers) > 1))
def test_a_leave_moves_only_the_buckets_of_the_server_to_the_first_replicas(servers: list[int]) -> None:
    leaver = servers[0]
    before, after = place(128, servers, replicas=1), place(128, servers[1:], replicas=1)
    moves = moves_of(before, after)
    assert moves.keys() == led_by(before, leaver)
    assert all(move == before[bucket] for bucket, move in moves.items())


@pytest.mark.parametrize("num_servers", [2, 3, 8, 16])
def test_load_is_even_within_random_variation(num_servers: int) -> None:
    mean = NUM_BUCKETS / num_servers
    spread = math.sqrt(mean * (1 - 1 / num_servers))
    for first in range(0, 500, 100):
        servers = range(first, first + num_servers)
        chains = place(NUM_BUCKETS, servers)
        loads = [len(led_by(chains, server)) for server in servers]
        assert max(loads) < mean + 4 * spread
        assert min(loads) > mean - 4 * spread


@pytest.mark.parametrize(
    ("num_buckets", "servers", "replicas", "match"),
    [(8, [], 0, "No servers"), (8, [1, 1], 0, "duplicate"), (0, [1], 0, "expected"), (8, [1], -1, "expected")],
)
def test_illegal_arguments_are_rejected(num_buckets: int, servers: list[int], replicas: int, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        place(num_buckets, servers, replicas)
