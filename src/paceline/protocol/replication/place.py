"""A server's place in every bucket's chain, in one view."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.protocol.buckets import Buckets, buckets_in
from paceline.protocol.chains import ChainGroup, in_chain


@dataclass(slots=True)
class Place:
    """One server's position in all chains: the buckets at each position, and its neighbours with their buckets."""

    primary: Buckets = 0
    members: Buckets = 0
    filling: Buckets = 0
    """The buckets that other servers are copying to this server."""
    short: Buckets = 0
    """The buckets that the server leads, but with too few replicas to acknowledge a push."""
    shortages: dict[int, Buckets] = field(default_factory=dict)  # number of replicas → short buckets with this number
    predecessors: dict[int, Buckets] = field(default_factory=dict)
    """The servers directly before this server."""
    successors: dict[int, Buckets] = field(default_factory=dict)
    """The servers directly after this server."""
    fills: dict[int, Buckets] = field(default_factory=dict)
    """The successors that this server must fill."""
    upstream: dict[int, Buckets] = field(default_factory=dict)  # all members before this server
    leaders: dict[int, Buckets] = field(default_factory=dict)
    """The primaries of buckets in which this server is a replica."""
    followers: dict[int, Buckets] = field(default_factory=dict)
    """The replicas in the chains that this server leads."""

    @classmethod
    def of(cls, me: int, groups: Iterable[ChainGroup], min_replicas: int) -> Place:
        place = cls()
        for group in groups:
            chain = in_chain(group.members, group.filling)
            if me in chain:
                place._enter(chain.index(me), chain, group, min_replicas)
        return place

    def _enter(self, at: int, chain: tuple[int, ...], group: ChainGroup, min_replicas: int) -> None:
        buckets, is_filled = group.buckets, group.filling == chain[at]
        if is_filled:
            self.filling |= buckets
        else:
            self.members |= buckets
        for other in group.members[:at]:
            _add(self.upstream, other, buckets)
        if at == 0:
            self.primary |= buckets
            num_replicas = len(group.members) - 1
            if num_replicas < min_replicas:
                self.short |= buckets
                _add(self.shortages, num_replicas, buckets)
            for other in group.members[1:]:
                _add(self.followers, other, buckets)
        else:
            if not is_filled:
                _add(self.leaders, chain[0], buckets)
            _add(self.predecessors, chain[at - 1], buckets)
        if at + 1 < len(chain):
            _add(self.successors, chain[at + 1], buckets)
            if chain[at + 1] == group.filling:
                _add(self.fills, chain[at + 1], buckets)

    def shortage(self, buckets: Buckets) -> tuple[int, int] | None:
        """Return one of `buckets` with a chain that is too short, and its number of replicas; else None."""
        for num_replicas, short in sorted(self.shortages.items()):
            if short & buckets:
                return next(buckets_in(short & buckets)), num_replicas
        return None


def _add(table: dict[int, Buckets], key: int, buckets: Buckets) -> None:
    table[key] = table.get(key, 0) | buckets
