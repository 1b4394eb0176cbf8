"""Which servers hold a bucket, and in what order: the scheduler's planner of chains.

For every bucket the planner keeps a :class:`Chain`: the servers that have all its data, the primary first, and at
most one server behind them that is being filled. The scheduler's runtime feeds a :class:`Planner` who lives and what
was filled, and publishes the chains when they have changed. A server is known by its incarnation: one that comes back
is another one, with nothing in it. Its rank is only what :func:`~paceline.protocol.placement.place` hashes.

Source: van Renesse and Schneider 2004 "Chain Replication for Supporting High Throughput and Availability" (a server
that fails leaves its chain, a new one is appended behind the tail); Lin et al. 2008 "PacificA: Replication in
Log-Based Distributed Storage Systems" (one configuration manager with a version, apart from the data).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from msgspec import Struct

from paceline.errors import UsageError
from paceline.protocol.bounds import BucketMask, Number
from paceline.protocol.buckets import Buckets, buckets_in, to_bytes
from paceline.protocol.placement import NUM_BUCKETS, place
from paceline.protocol.transitions import OUTSIDE, StateTable, Transition


@dataclass(frozen=True, slots=True)
class Chain:
    """The servers of one bucket, by incarnation. Without members its data is lost."""

    members: tuple[int, ...]
    """Those that have all its data: the primary, then the replicas in order."""

    filling: int | None = None
    """The server behind the tail that is being filled, if any; never a member."""


class ChainGroup(Struct, frozen=True, array_like=True):
    """Buckets with equal chains (:class:`Chain`), the form in which chains are sent. See :func:`chain_group`."""

    members: tuple[Number, ...]
    filling: Number | None
    mask: BucketMask

    def __post_init__(self) -> None:
        chain = in_chain(self.members, self.filling)
        if len(set(chain)) != len(chain):
            raise UsageError(f"a chain of servers {chain} has one of them twice")

    @property
    def buckets(self) -> Buckets:
        """The buckets as a set."""
        return int.from_bytes(self.mask, "little")


def chain_group(members: tuple[int, ...], filling: int | None, buckets: Buckets) -> ChainGroup:
    """Return the group of these buckets."""
    return ChainGroup(members, filling, to_bytes(buckets))


@dataclass(frozen=True, slots=True)
class Changed:
    """Send everybody the new chains, which have this version."""

    version: int


@dataclass(frozen=True, slots=True)
class BucketsLost:
    """The last server with these buckets (a mask) has ended: their data is gone, for good."""

    buckets: int


Instruction: TypeAlias = Changed | BucketsLost

SERVER: Final = StateTable(
    "a server in a bucket's chain",
    ("primary", "replica", "filling"),
    (
        Transition(OUTSIDE, "start", "primary"),
        Transition(OUTSIDE, "start", "replica"),
        Transition(OUTSIDE, "servers_changed", "filling", when="missing"),
        Transition(OUTSIDE, "filled", "filling", when="missing next"),
        Transition("filling", "filled", "replica"),
        Transition("filling", "filled", "primary", when="wanted first"),
        Transition("filling", "servers_changed", OUTSIDE, when="dead, silent or not wanted"),
        Transition("filling", "servers_changed", OUTSIDE, "BucketsLost", when="no member lives"),
        Transition("replica", "servers_changed", "primary", when="next of the living or wanted first"),
        Transition("replica", "filled", "primary", when="wanted first and all filled"),
        Transition("primary", "servers_changed", "replica", when="wanted later"),
        Transition("primary", "filled", "replica", when="wanted later and all filled"),
        Transition("primary", "servers_changed", OUTSIDE, when="dead, silent or not wanted"),
        Transition("primary", "servers_changed", OUTSIDE, "BucketsLost", when="the last member dies"),
        Transition("primary", "filled", OUTSIDE, when="not wanted and all filled"),
        Transition("replica", "servers_changed", OUTSIDE, when="dead, silent or not wanted"),
        Transition("replica", "servers_changed", OUTSIDE, "BucketsLost", when="no member lives"),
        Transition("replica", "filled", OUTSIDE, when="not wanted and all filled"),
    ),
)


def in_chain(members: tuple[int, ...], filling: int | None) -> tuple[int, ...]:
    """All servers of a chain, in its order: the one that is being filled is behind the tail."""
    return members if filling is None else (*members, filling)


def leads_of(groups: Iterable[ChainGroup]) -> tuple[dict[int, int], int]:
    """The buckets that each server in a chain leads (most lead none, or some), and those that nobody has."""
    leads: dict[int, int] = {}
    lost = 0
    for group in groups:
        for server in in_chain(group.members, group.filling):
            leads.setdefault(server, 0)
        if group.members:
            leads[group.members[0]] |= group.buckets
        else:
            lost |= group.buckets
    return leads, lost


VERSION_GAP: Final = 1000
"""How much a restarted scheduler adds to the newest version that is known: only the dead may have known a later one."""

_LOST: Final = Chain(())


def groups_of(chains: Iterable[Chain]) -> tuple[ChainGroup, ...]:
    """The chains of buckets 0, 1, … in groups of equal ones, in order of their first buckets."""
    masks: dict[tuple[tuple[int, ...], int | None], int] = {}
    bit = 1
    for chain in chains:
        key = chain.members, chain.filling
        masks[key] = masks.get(key, 0) | bit
        bit <<= 1
    return tuple(chain_group(members, filling, buckets) for (members, filling), buckets in masks.items())


def chains_of(groups: Iterable[ChainGroup]) -> tuple[Chain, ...]:
    """The chains of buckets 0, 1, … that :func:`groups_of` put into groups; equal ones are one object.

    Raises:
        UsageError: a bucket is in two groups, or one below the highest is in none.
    """
    chains: dict[int, Chain] = {}
    num_named = 0
    for group in groups:
        num_named += group.buckets.bit_count()
        chain = Chain(group.members, group.filling)
        chains.update(dict.fromkeys(buckets_in(group.buckets), chain))
    if num_named != len(chains) or (chains and max(chains) + 1 != num_named):
        raise UsageError(
            f"Groups of chains name {num_named} buckets, {len(chains)} of them distinct, up to number "
            f"{max(chains, default=-1)}: expected each bucket from 0 on in one group."
        )
    return tuple(chains[bucket] for bucket in range(num_named))


def has_followers(groups: Iterable[ChainGroup]) -> bool:
    """Whether any server is behind a primary, as a member or being filled."""
    return any(group.filling is not None or len(group.members) > 1 for group in groups)


def lost_buckets(groups: Iterable[ChainGroup]) -> int:
    """The buckets that nobody has."""
    return sum(group.buckets for group in groups if not group.members)


class Planner:
    """The chains of all buckets, and the version that rises when any of them changes.

    Arguments: `num_buckets`; `replicas`, how many servers hold a bucket besides its primary, if there are so many.

    A primary is always a server that had the bucket when tables were empty, or was filled since. A change moves what
    placement says and no more. A bucket is lost only when all its members died; one that is filling does not count.
    """

    def __init__(self, num_buckets: int = NUM_BUCKETS, replicas: int = 0) -> None:
        self._num_buckets = num_buckets
        self._replicas = replicas
        self._version = 0
        self._chains: list[Chain] = []
        self._living: frozenset[int] = frozenset()
        self._silent: frozenset[int] = frozenset()
        self._wanted_of: dict[int, int] = {}  # the servers, incarnation → rank, that `_wanted` was made for
        self._wanted: tuple[Chain, ...] = ()  # what placement says; empty if nobody is left to hold anything

    @classmethod
    def rebuild(
        cls,
        groups: Iterable[ChainGroup],
        version: int,
        servers: Mapping[int, int],
        replicas: int,
        leaving: Collection[int] = (),
        silent: Collection[int] = (),
    ) -> tuple[Planner, list[Instruction]]:
        """Go on after a restart of the scheduler, from the newest view that any node knows and the servers that live.

        The chains get the next version, changed or not, since a newer one may have gone to nodes that are dead. A
        fill that was under way goes on; its server reports again what it was filled with. Who is not among
        ``servers`` is dead: wait for those in the view before.

        Raises:
            UsageError: the groups are empty or no map, the version is below 1, or two servers have one rank.
        """
        chains = chains_of(groups)
        if not chains or version < 1:
            raise UsageError("There is no map of chains to go on from: make a new planner and start it.")
        self = cls(len(chains), replicas)
        self._chains = list(chains)
        self._version = version
        instructions = self.servers_changed(servers, leaving, silent)
        if self._version == version:
            self._version += 1
            instructions.append(Changed(self._version))
        return self, instructions

    @property
    def version(self) -> int:
        """The number of the current chains; 0 before the first placement."""
        return self._version

    @property
    def chains(self) -> tuple[Chain, ...]:
        """The chain of each bucket; empty before the first placement."""
        return tuple(self._chains)

    @property
    def groups(self) -> tuple[ChainGroup, ...]:
        """The chains in groups of equal ones."""
        return groups_of(self._chains)

    @property
    def is_stable(self) -> bool:
        """Whether buckets were placed, nobody is being filled, and all that is not lost is where it is wanted."""
        if any(chain.filling is not None for chain in self._chains):
            return False
        pairs = zip(self._chains, self._wanted, strict=False)  # nothing is wanted while everybody leaves
        return self._version > 0 and all(chain in (wanted, _LOST) for chain, wanted in pairs)

    @property
    def lost(self) -> int:
        """The buckets whose data is gone."""
        return lost_buckets(self.groups)

    def member_of(self, server: int) -> int:
        """The buckets of whose chain a server is a member."""
        return sum(group.buckets for group in self.groups if server in group.members)

    def start(self, servers: Mapping[int, int]) -> None:
        """Place all buckets on these servers (incarnation → rank): their tables are empty, nobody needs filling.

        Raises:
            UsageError: it was started before, there is no server, or two have one rank.
        """
        if self._version:
            raise UsageError("The buckets are placed already: a planner is started once.")
        if not servers:
            raise UsageError("No servers: there is nowhere to place the buckets. Start at least one server.")
        self._want(servers)
        self._living = frozenset(servers)
        self._chains = list(self._wanted)
        self._version = 1

    def servers_changed(
        self, servers: Mapping[int, int], leaving: Collection[int] = (), silent: Collection[int] = ()
    ) -> list[Instruction]:
        """Take who lives now (incarnation → rank); return what to do, a Changed at most once and last.

        Those that are leaving live, and shall hold nothing as soon as others do. Those that are silent may live: they
        stay in chains of which nobody else is left. Before the start nothing changes.

        Raises:
            UsageError: two servers have one rank; nothing has changed.
        """
        if not self._version:
            return []
        self._want({server: rank for server, rank in servers.items() if server not in leaving and server not in silent})
        self._living = frozenset(servers)
        self._silent = frozenset(silent)
        return self._settle(range(self._num_buckets))

    def filled(self, server: int, buckets: int) -> list[Instruction]:
        """Take the word that a server has all of these buckets now; return what to do.

        A bucket that it is not being filled with (any more) is left aside.
        """
        news = self._append(server, buckets)
        return self._settle(news, changed=bool(news))

    def restore(self, groups: Iterable[ChainGroup], filled: Iterable[tuple[int, int]] = ()) -> None:
        """Go back to these chains: what was planned since is not to be, but for the fills that have ended.

        `filled` are servers and the buckets that each was filled with. Who lives now is said next. The version does
        not go back, as it may be known.
        """
        self._chains = list(chains_of(groups))
        news = [self._append(server, buckets) for server, buckets in filled]
        self._version += any(news)

    def _append(self, server: int, buckets: int) -> list[int]:
        """Have a server that is filled be the tail; return the buckets where it was being filled."""
        news = []
        for bucket in buckets_in(buckets & (1 << len(self._chains)) - 1):
            chain = self._chains[bucket]
            if chain.filling == server:
                self._chains[bucket] = Chain((*chain.members, server))
                news.append(bucket)
        return news

    def _want(self, servers: Mapping[int, int]) -> None:
        """Compute the chains that are wanted of these servers, unless they are the same as before."""
        if servers == self._wanted_of:
            return
        by_rank = {rank: server for server, rank in servers.items()}
        wanted: tuple[Chain, ...] = ()
        if servers:
            chains = place(self._num_buckets, list(servers.values()), self._replicas).chains
            wanted = tuple(Chain(tuple([by_rank[rank] for rank in chain])) for chain in chains)
        self._wanted_of, self._wanted = dict(servers), wanted

    def _settle(self, buckets: Iterable[int], changed: bool = False) -> list[Instruction]:
        """Bring the chains of some buckets as near to what is wanted as may be without a fill."""
        lost = 0
        for bucket in buckets:
            before = self._chains[bucket]
            after = self._next_chain(bucket, before)
            if after == before:
                continue
            changed = True
            self._chains[bucket] = after
            if not after.members:
                lost |= 1 << bucket
        instructions: list[Instruction] = [BucketsLost(lost)] if lost else []
        if changed:
            self._version += 1
            instructions.append(Changed(self._version))
        return instructions

    def _next_chain(self, bucket: int, chain: Chain) -> Chain:
        # Rule 1: a dead server leaves its chain at once; without a member there is nobody to fill from.
        living = tuple([server for server in chain.members if server in self._living])
        if not living:
            return _LOST
        # Rule 4: so does a silent one, unless all are silent that have the bucket: nothing is gained without it.
        members = tuple([server for server in living if server not in self._silent]) or living
        filling = chain.filling if chain.filling in self._living - self._silent else None
        if not self._wanted:
            return Chain(members, filling)  # everybody leaves: there is nowhere to go
        # Rule 2: when all that are wanted are members, the chain is what placement says, and others drop out.
        wanted = self._wanted[bucket]
        missing = [server for server in wanted.members if server not in members]
        if not missing:
            return wanted
        # Rule 3: until then members stay as they are, and those that are missing are filled one by one.
        return Chain(members, filling if filling in missing else missing[0])

    def validate(self) -> None:
        """Assert the invariants."""
        assert len(self._chains) == (self._num_buckets if self._version else 0)
        assert len(self._wanted) == (self._num_buckets if self._wanted_of else 0)
        for bucket, chain in enumerate(self._chains):
            servers = in_chain(chain.members, chain.filling)
            assert len(set(servers)) == len(servers), "a server twice in one chain"
            assert self._living.issuperset(servers), "a dead server in a chain"
            assert chain.members or chain.filling is None, "a server is filled from nowhere"
            assert chain == self._next_chain(bucket, chain), "a rule was not applied"
