"""Hierarchical: reduce within each host, run an all-reduce between the hosts, then broadcast within each host.

The leader of a host is its lowest rank. A binomial tree reduces the data of each host to its leader, the leaders run an
all-reduce, and each leader broadcasts the result within its host. For hosts of g ranks, vectors of n bytes and links
within a host that cost α' and β', the reduce and the broadcast take ``2 log2(g) (α' + n β') + log2(g) n γ`` (the α-β-γ
model of ``evaluator``). The network port of each host carries one rank's data only.

If the number of leaders is a power of two, the leaders use halving-doubling, which has fewer rounds than the ring.
Otherwise the leaders use the ring, because halving-doubling would send the whole vector in two additional rounds. The
algorithm is good if links within a host are much faster than links between hosts.

Source: Karonis et al. 2000 "Exploiting hierarchy in parallel computer networks to optimize collective operation
performance" (the sections on multilevel trees).
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.collectives.schedules import binomial_tree, halving_doubling, ring
from paceline.collectives.schedules.base import Schedule, renamed, widened
from paceline.errors import UsageError


def all_reduce(rank: int, size: int, *, hosts: Sequence[int]) -> Schedule:
    """Return the all-reduce schedule of ``rank``. ``hosts[r]`` is the number of rank r's host."""
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
