"""Hierarchical: reduce within each host, then all-reduce between one leader per host.

A binomial tree reduces within each host to its leader (the lowest rank), the leaders run an all-reduce, and each leader
broadcasts within its host. For h hosts of g ranks, with links inside that cost α', β': ``2 log2(g) (α' + n β') +
log2(g) n γ`` and the all-reduce of h ranks. Each host's network port carries one rank's data only. The leaders use
halving-doubling if their number is a power of two, else the ring. Both move the same number of bytes. Halving-doubling
has fewer rounds for a power of two, and needs two additional rounds with the whole vector for other sizes. Good if
links within a host are much faster than links between hosts.

Source: Karonis et al. 2000 "Exploiting hierarchy in parallel computer networks to optimize collective operation
performance" (the sections on multilevel trees).
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.collectives.schedules import binomial_tree, halving_doubling, ring
from paceline.collectives.schedules.base import Schedule, renamed, widened
from paceline.errors import UsageError


def all_reduce(rank: int, size: int, *, hosts: Sequence[int]) -> Schedule:
    """Run an all-reduce; ``hosts[r]`` is the number of rank r's host."""
    if len(hosts) != size:
        raise UsageError(f"{len(hosts)} host numbers for {size} ranks: expected one for each rank.")
    neighbours = [peer for peer in range(size) if hosts[peer] == hosts[rank]]
    first_ranks: dict[int, int] = {}
    for peer, host in enumerate(hosts):
        first_ranks.setdefault(host, peer)
    leaders = list(first_ranks.values())
    position = neighbours.index(rank)
    between = ring.all_reduce if len(leaders) & (len(leaders) - 1) else halving_doubling.all_reduce
    middle = between(leaders.index(neighbours[0]), len(leaders))
    vector = ((0, middle.num_blocks),)
    up = binomial_tree.reduce(position, len(neighbours)).rounds
    down = binomial_tree.broadcast(position, len(neighbours)).rounds
    return Schedule(
        middle.num_blocks,
        (
            *renamed(widened(up, vector), neighbours),
            *(renamed(middle.rounds, leaders) if position == 0 else ()),
            *renamed(widened(down, vector), neighbours),
        ),
    )
