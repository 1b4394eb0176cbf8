"""Hierarchical: ranks of one host meet first, then one leader of each host meets the others.

Reduce by a binomial tree within each host to its leader (its lowest rank), all-reduce among the leaders, broadcast
within the host. Among h hosts of g ranks, with links inside that cost α', β':
``2 log2(g) (α' + n β') + log2(g) n γ`` and the all-reduce of h ranks. Each host's network port carries that of one
rank only. The leaders use halving-doubling if they are a power of two, the ring if not: these move the same bytes,
and the first has fewer rounds, but must fold at other sizes. Good where links within a host are much faster.

Source: Karonis et al. 2000 "Exploiting hierarchy in parallel computer networks to optimize collective operation
performance" (the sections on multilevel trees).
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.collectives.schedules import binomial_tree, halving_doubling, ring
from paceline.collectives.schedules.base import Action, Copy, Round, Schedule, Spans, renamed
from paceline.errors import UsageError


def all_reduce(rank: int, size: int, *, hosts: Sequence[int]) -> Schedule:
    """``hosts[r]`` is the number of the host that rank r runs on; any numbers will do.

    Raises:
        UsageError: ``hosts`` has not one number for each rank.
    """
    if len(hosts) != size:
        raise UsageError(f"{len(hosts)} host numbers for {size} ranks: expected one for each rank.")
    neighbours = [other for other in range(size) if hosts[other] == hosts[rank]]
    first_ranks: dict[int, int] = {}
    for other, host in enumerate(hosts):
        first_ranks.setdefault(host, other)
    leaders = list(first_ranks.values())
    place = neighbours.index(rank)
    between = ring.all_reduce if len(leaders) & (len(leaders) - 1) else halving_doubling.all_reduce
    middle = between(leaders.index(neighbours[0]), len(leaders))
    whole = ((0, middle.num_blocks),)
    up = binomial_tree.reduce(place, len(neighbours)).rounds
    down = binomial_tree.broadcast(place, len(neighbours)).rounds
    return Schedule(
        middle.num_blocks,
        (
            *renamed(_widened(up, whole), neighbours),
            *(renamed(middle.rounds, leaders) if place == 0 else ()),
            *renamed(_widened(down, whole), neighbours),
        ),
    )


def _widened(rounds: tuple[Round, ...], whole: Spans) -> tuple[Round, ...]:
    """The same messages in one block, as messages of the whole vector."""
    return tuple(tuple(_with_spans(action, whole) for action in actions) for actions in rounds)


def _with_spans(action: Action, spans: Spans) -> Action:
    assert not isinstance(action, Copy)
    return action._replace(spans=spans)
