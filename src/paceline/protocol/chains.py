"""The scheduler's planner of chains: the servers of each bucket, and their order.

A bucket's :class:`Chain` lists the servers that have all data of the bucket, the primary first. The last server of a
chain may be *filling*: it is still receiving a copy of the bucket. A server is identified by its incarnation, so a
restarted server is a new server without data. Comments refer to the rules of section "Chains" in
docs/explanation/protocol.md.

Source: van Renesse and Schneider 2004 "Chain Replication for Supporting High Throughput and Availability" (a server
that fails leaves its chain, a new one is appended after the tail); Lin et al. 2008 "PacificA: Replication in Log-Based
Distributed Storage Systems" (one configuration manager with a version, apart from the data).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Annotated, Final

from msgspec import Meta, Struct

from paceline.errors import UsageError
from paceline.protocol.bounds import BucketMask, Natural, Number, Version
from paceline.protocol.buckets import NUM_BYTES, Buckets, buckets_in, from_bytes
from paceline.protocol.placement import NUM_BUCKETS, place
from paceline.protocol.transitions import OUTSIDE, StateTable, Transition


@dataclass(frozen=True, slots=True)
class Chain:
    """The servers that have one bucket, as incarnations. A bucket without members has lost its data."""

    members: tuple[int, ...]
    """The servers with all data of the bucket: the primary, then the replicas in order."""

    filling: int | None = None
    """The server after the tail that is being filled, if any. It is not in `members`."""


class ChainGroup(Struct, frozen=True, array_like=True):
    """Buckets with equal chains (:class:`Chain`). Messages contain chains in this form. See :func:`chain_group`."""

    members: tuple[Number, ...]
    filling: Number | None
    mask: Annotated[bytes, Meta(max_length=NUM_BYTES)]
    """The mask of the buckets, in little-endian order, without zero bytes at its ends."""
    num_zeros: Annotated[int, Meta(ge=0, lt=NUM_BYTES)] = 0
    """The number of zero bytes before `mask`."""

    def __post_init__(self) -> None:
        chain = in_chain(self.members, self.filling)
        if len(set(chain)) != len(chain):
            raise UsageError(f"a chain of servers {chain} has a duplicate")

    @property
    def buckets(self) -> Buckets:
        return int.from_bytes(self.mask, "little") << 8 * self.num_zeros


class Filled(Struct, frozen=True, tag=True):
    """NOTICE to the scheduler from a server: in the view of `version`, its successor `target` has all buckets of
    `mask`.

    From then on, the sender acknowledges a push only if `target` has the push.
    """

    version: Version
    target: Natural
    mask: BucketMask

    @property
    def buckets(self) -> Buckets:
        return from_bytes(self.mask)


def chain_group(members: tuple[int, ...], filling: int | None, buckets: Buckets) -> ChainGroup:
    num_zeros = max((buckets & -buckets).bit_length() - 1, 0) // 8
    mask = buckets >> 8 * num_zeros
    return ChainGroup(members, filling, mask.to_bytes((mask.bit_length() + 7) // 8, "little"), num_zeros)


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
    """Return all servers of a chain in order; the server that is being filled comes last."""
    return members if filling is None else (*members, filling)


def leads_of(groups: Iterable[ChainGroup]) -> tuple[dict[int, int], int]:
    """Return the buckets of which each server in a chain is primary (0 if none), and the lost buckets."""
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
"""A new scheduler adds this number to the newest known version, because dead processes may have had later versions."""

_LOST: Final = Chain(())


def groups_of(chains: Iterable[Chain]) -> tuple[ChainGroup, ...]:
    """Return one group for each distinct chain of buckets 0, 1, …, ordered by the first bucket of the group."""
    masks: dict[tuple[tuple[int, ...], int | None], int] = {}
    bit = 1
    for chain in chains:
        key = chain.members, chain.filling
        masks[key] = masks.get(key, 0) | bit
        bit <<= 1
    return tuple(chain_group(members, filling, buckets) for (members, filling), buckets in masks.items())


def chains_of(groups: Iterable[ChainGroup]) -> tuple[Chain, ...]:
    """Return the chains of buckets 0, 1, … from the groups of :func:`groups_of`; equal chains are one object.

    Raises UsageError if a bucket is in two groups, or if a bucket below the highest is in none.
    """
    chains: dict[int, Chain] = {}
    num_named = 0
    for group in groups:
        num_named += group.buckets.bit_count()
        chain = Chain(group.members, group.filling)
        chains.update(dict.fromkeys(buckets_in(group.buckets), chain))
    if num_named != len(chains) or (chains and max(chains) + 1 != num_named):
        raise UsageError(
            f"Groups of chains name {num_named} buckets, {len(chains)} distinct ones, up to number "
            f"{max(chains, default=-1)}: expected each bucket from 0 on in one group."
        )
    return tuple(chains[bucket] for bucket in range(num_named))


def changed_groups(before: Iterable[ChainGroup], after: Iterable[ChainGroup]) -> tuple[ChainGroup, ...]:
    """Return the buckets whose chains differ, grouped by their chains in `after`.

    :func:`with_changes` applies the result to `before`.
    """
    former = {(group.members, group.filling): group.buckets for group in before}
    changes = []
    for group in after:
        changed = group.buckets & ~former.get((group.members, group.filling), 0)
        if changed:
            changes.append(chain_group(group.members, group.filling, changed))
    return tuple(changes)


def with_changes(groups: tuple[ChainGroup, ...], changes: tuple[ChainGroup, ...]) -> tuple[ChainGroup, ...]:
    """Return the groups after these changes, in the order of :func:`groups_of`."""
    if not changes:
        return groups
    changed = 0
    for group in changes:
        changed |= group.buckets
    masks: dict[tuple[tuple[int, ...], int | None], int] = {}
    for group, mask in (
        *((group, group.buckets & ~changed) for group in groups),
        *((group, group.buckets) for group in changes),
    ):
        key = group.members, group.filling
        masks[key] = masks.get(key, 0) | mask
    ordered = sorted(((mask & -mask, chain, mask) for chain, mask in masks.items() if mask), key=itemgetter(0))
    return tuple(chain_group(members, filling, mask) for _, (members, filling), mask in ordered)


def has_followers(groups: Iterable[ChainGroup]) -> bool:
    """Return whether any primary has a successor: a replica, or a server that is being filled."""
    return any(group.filling is not None or len(group.members) > 1 for group in groups)


def lost_buckets(groups: Iterable[ChainGroup]) -> int:
    return sum(group.buckets for group in groups if not group.members)


class Planner:
    """The chains of all buckets, and their version, which rises with each change.

    `replicas` is the number of replicas per bucket, if enough servers exist. Each primary either had the bucket when
    all tables were empty, or has received it in a fill. If servers join or leave, a bucket moves only if its placement
    has changed. A bucket is lost only when all its members have died.
    """

    def __init__(self, num_buckets: int = NUM_BUCKETS, replicas: int = 0) -> None:
        self._num_buckets = num_buckets
        self._replicas = replicas
        self._version = 0
        self._chains: list[Chain] = []
        self._groups: tuple[ChainGroup, ...] | None = None  # the groups of `_chains`; None until computed
        self._is_planned = False  # the chains follow the rules for the living and silent servers
        self._living: frozenset[int] = frozenset()
        self._silent: frozenset[int] = frozenset()
        self._wanted_of: dict[int, int] = {}  # incarnation → rank of the servers in `_wanted`
        self._wanted: tuple[Chain, ...] = ()  # the chains by placement; empty if no server remains

    @classmethod
    def rebuild(
        cls,
        groups: Iterable[ChainGroup],
        version: int,
        servers: Mapping[int, int],
        replicas: int,
        leaving: Collection[int] = (),
        silent: Collection[int] = (),
    ) -> Planner:
        """Restore the planner after a restart of the scheduler, from the newest known view and the live servers.

        The chains get a new version, because the lost scheduler may have sent a newer version to dead processes. A
        running fill continues. Servers that are not in ``servers`` count as dead, so first wait for the servers of the
        last view.

        Raises UsageError for invalid groups, a version below 1, or two servers with the same rank.
        """
        chains = chains_of(groups)
        if not chains or version < 1:
            raise UsageError("No chains to restore: make a new planner and start it.")
        self = cls(len(chains), replicas)
        self._set_chains(list(chains))
        self._version = version
        self.servers_changed(servers, leaving, silent)
        self._version = version + 1
        return self

    @property
    def version(self) -> int:
        """The version of the chains; 0 before the first placement."""
        return self._version

    @property
    def chains(self) -> tuple[Chain, ...]:
        """The chain of each bucket; empty before the first placement."""
        return tuple(self._chains)

    @property
    def groups(self) -> tuple[ChainGroup, ...]:
        if self._groups is None:
            self._groups = groups_of(self._chains)
        return self._groups

    def _set_chains(self, chains: list[Chain]) -> None:
        self._chains, self._groups, self._is_planned = chains, None, False

    def member_of(self, server: int) -> int:
        return sum(group.buckets for group in self.groups if server in group.members)

    def start(self, servers: Mapping[int, int]) -> None:
        """Place all buckets on these servers (incarnation → rank), whose tables are empty.

        Raises UsageError if the planner has already started, if no servers are given, or if two have the same rank.
        """
        if self._version:
            raise UsageError("The buckets are already placed: start a planner only once.")
        if not servers:
            raise UsageError("No servers to place the buckets on. Start at least one server.")
        self._want(servers)
        self._living = frozenset(servers)
        self._set_chains(list(self._wanted))
        self._version = 1

    def servers_changed(
        self, servers: Mapping[int, int], leaving: Collection[int] = (), silent: Collection[int] = ()
    ) -> None:
        """Set the live servers (incarnation → rank).

        Leaving servers are alive, but lose their buckets as soon as other servers have the buckets. Silent servers may
        be alive: they stay in a chain only if it has no other members. Before :meth:`start` the call has no effect.

        Raises UsageError if two servers have the same rank; nothing is changed.
        """
        if not self._version:
            return
        present = {server: rank for server, rank in servers.items() if server not in leaving and server not in silent}
        living, silent = frozenset(servers), frozenset(silent)
        if self._is_planned and (present, living, silent) == (self._wanted_of, self._living, self._silent):
            return
        self._want(present)
        self._living, self._silent = living, silent
        # A server that lacks the data of a bucket begins with a fill.
        chains = [self._next_chain(bucket, chain) for bucket, chain in enumerate(self._chains)]
        if chains != self._chains:
            self._set_chains(chains)
            self._version += 1
        self._is_planned = True

    def restore(self, groups: Iterable[ChainGroup], filled: Iterable[tuple[int, int]] = ()) -> None:
        """Replace the planned chains by these chains.

        Then apply `filled`: pairs of a server and the buckets that it has received. Call :meth:`servers_changed` next.
        The version does not decrease, because other processes may already have the current version.
        """
        groups = tuple(groups)
        if self.groups != groups:
            self._set_chains(list(chains_of(groups)))
        is_any_new = False
        for server, buckets in filled:
            for bucket in buckets_in(buckets & (1 << len(self._chains)) - 1):
                chain = self._chains[bucket]
                if chain.filling == server:
                    self._chains[bucket] = Chain((*chain.members, server))
                    is_any_new = True
        if is_any_new:
            self._set_chains(self._chains)
            self._version += 1

    def _want(self, servers: Mapping[int, int]) -> None:
        if servers == self._wanted_of:
            return
        by_rank = {rank: server for server, rank in servers.items()}
        wanted: tuple[Chain, ...] = ()
        if servers:
            chains = place(self._num_buckets, list(servers.values()), self._replicas)
            wanted = tuple(Chain(tuple([by_rank[rank] for rank in chain])) for chain in chains)
        self._wanted_of, self._wanted = dict(servers), wanted

    def _next_chain(self, bucket: int, chain: Chain) -> Chain:
        # Rule 1: a dead server leaves its chain immediately. If the chain has no other members, the bucket is lost.
        living = tuple([server for server in chain.members if server in self._living])
        if not living:
            return _LOST
        # Rule 4: a silent server leaves too. If all members are silent, they stay, because the bucket would be lost.
        members = tuple([server for server in living if server not in self._silent]) or living
        filling = chain.filling if chain.filling in self._living - self._silent else None
        if not self._wanted:
            return Chain(members, filling)  # all servers leave, so no other chain is planned
        # Rule 2: when all wanted servers are members, the chain becomes the wanted chain, without any other members.
        wanted = self._wanted[bucket]
        missing = [server for server in wanted.members if server not in members]
        if not missing:
            return wanted
        # Rule 3: until all wanted servers are members, all members stay, and missing servers are filled one by one.
        # A silent server may not see the view that starts a fill from it, so requests would wait for it.
        if filling not in missing:
            filling = None if self._silent.issuperset(members) else missing[0]
        return Chain(members, filling)

    def validate(self) -> None:
        assert len(self._chains) == (self._num_buckets if self._version else 0)
        assert len(self._wanted) == (self._num_buckets if self._wanted_of else 0)
        for bucket, chain in enumerate(self._chains):
            servers = in_chain(chain.members, chain.filling)
            assert len(set(servers)) == len(servers), "a server twice in one chain"
            assert self._living.issuperset(servers), "a dead server in a chain"
            assert chain.members or chain.filling is None, "a fill without a source"
            assert chain == self._next_chain(bucket, chain), "a rule was not applied"
