"""A server's place in every bucket's chain, by one map."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.protocol.buckets import Buckets, buckets_in
from paceline.protocol.chains import ChainGroup, in_chain


@dataclass(slots=True)
class Place:
    """Where one server is: sets of buckets, and for other servers the buckets in whose chains they are there."""

    primary: Buckets = 0
    """Those that it leads."""
    members: Buckets = 0
    filling: Buckets = 0
    """Those that it is being filled with."""
    short: Buckets = 0
    """Those that it leads and whose chains have too few replicas for an acknowledgement."""
    shortages: dict[int, Buckets] = field(default_factory=dict)
    """Number of replicas → those of them that have so many."""
    before: dict[int, Buckets] = field(default_factory=dict)
    """The servers right before it."""
    behind: dict[int, Buckets] = field(default_factory=dict)
    """The servers right behind it."""
    fills: dict[int, Buckets] = field(default_factory=dict)
    """Of those, the ones that it has to fill."""
    ahead: dict[int, Buckets] = field(default_factory=dict)
    """The servers anywhere ahead of it."""
    leaders: dict[int, Buckets] = field(default_factory=dict)
    """The primaries of buckets of which it is a member."""
    after: dict[int, Buckets] = field(default_factory=dict)
    """The members of the chains that it leads."""

    @classmethod
    def of(cls, me: int, groups: Iterable[ChainGroup], min_replicas: int) -> Place:
        """Return the place of the server `me`."""
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
            _add(self.ahead, other, buckets)
        if at == 0:
            self.primary |= buckets
            num_replicas = len(group.members) - 1
            if num_replicas < min_replicas:
                self.short |= buckets
                _add(self.shortages, num_replicas, buckets)
            for other in group.members[1:]:
                _add(self.after, other, buckets)
        else:
            if not is_filled:
                _add(self.leaders, chain[0], buckets)
            _add(self.before, chain[at - 1], buckets)
        if at + 1 < len(chain):
            _add(self.behind, chain[at + 1], buckets)
            if chain[at + 1] == group.filling:
                _add(self.fills, chain[at + 1], buckets)

    def shortage(self, buckets: Buckets) -> tuple[int, int] | None:
        """Return one of `buckets` whose chain is too short, and how many replicas it has; None if there is none."""
        for num_replicas, short in sorted(self.shortages.items()):
            if short & buckets:
                return next(buckets_in(short & buckets)), num_replicas
        return None


def _add(table: dict[int, Buckets], key: int, buckets: Buckets) -> None:
    table[key] = table.get(key, 0) | buckets
