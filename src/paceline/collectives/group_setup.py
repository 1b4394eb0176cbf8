"""Prepare a new group: find the host of each rank, and create shared memory for the ranks of each host."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from numba import config

from paceline.collectives.calls import CollectiveCall
from paceline.collectives.engine import Order
from paceline.collectives.shared.engine import SharedMemory
from paceline.collectives.shared.segment import Segment, SegmentError
from paceline.environment import usable_cores
from paceline.errors import RankLostError
from paceline.kernels import steps
from paceline.meeting.group_names import EndedError, absent
from paceline.meeting.node import NodeInfo
from paceline.meeting.store import PrefixStore, await_all, exchange
from paceline.meeting.world import World
from paceline.transport import read_meta

_MEET = CollectiveCall("meet")


class _Attached(msgspec.Struct, frozen=True, array_like=True):
    """A rank's report to the other ranks of its host, after it has tried to open their segment of shared memory."""

    is_open: bool
    cores: tuple[int, ...]


class GroupLayout:
    """The ranks and hosts of a group. `ranks` are ranks in the group of all ranks; `rank` is this process's rank in
    the new group.
    """

    def __init__(self, name: str, ranks: Sequence[int], world_rank: int, world_infos: Sequence[NodeInfo]) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(world_rank)
        self.size = len(self.ranks)
        self.infos = tuple(world_infos[rank] for rank in self.ranks)
        domains = [info.memory_domain for info in self.infos]
        self.hosts = tuple(sorted(set(domains), key=domains.index).index(domain) for domain in domains)
        """The number of each rank's host. Ranks with the same number can share memory."""
        self.local_ranks = tuple(rank for rank in range(self.size) if self.hosts[rank] == self.hosts[self.rank])

    @property
    def is_on_one_host(self) -> bool:
        return len(self.local_ranks) == self.size


class GroupSetup:
    """Prepares a new group by exchanging values between its ranks through the rendezvous store.

    The methods raise RankLostError if ranks are missing at the deadline.
    """

    def __init__(self, world: World, layout: GroupLayout) -> None:
        self._world, self._layout = world, layout
        self._store = PrefixStore(world.store, f"group {layout.name}")

    def share(self, deadline: float) -> SharedMemory | None:
        """Create or open the shared memory of this host's ranks.

        Return None if this rank is alone, or after a failure.
        """
        local = self._layout.local_ranks
        if len(local) < 2 or config.DISABLE_JIT:  # type: ignore[attr-defined]
            return None
        segment = self._open_segment(deadline)
        try:
            return self._attach(segment, deadline)
        except BaseException:
            if segment is not None:
                segment.close()
            raise

    def _attach(self, segment: Segment | None, deadline: float) -> SharedMemory | None:
        local = self._layout.local_ranks
        own = _Attached(segment is not None, tuple(usable_cores()))
        values = self._exchange(local, msgspec.msgpack.encode(own), deadline, "share memory")
        attached = [read_meta(value, _Attached, "a rank's report on its shared memory") for value in values]
        if segment is None or not all(rank.is_open for rank in attached):
            if segment is not None:
                segment.close()
            return None
        segment.hide()
        engine = SharedMemory(
            segment,
            local.index(self._layout.rank),
            [self._layout.infos[rank].pid for rank in local],
            name=self._layout.name,
            num_cores=len({core for rank in attached for core in rank.cores}),
            members=local,
        )
        try:
            engine.test_peer_reads(Order(_MEET, _MEET.signature, 0, max(deadline - time.monotonic(), 1.0)))
        except BaseException as error:
            engine.close()
            if isinstance(error, RankLostError):
                raise EndedError(str(error), tuple(self._layout.ranks[rank] for rank in error.ranks)) from None
            raise
        return engine

    def agree_on_layers(self, shared: SharedMemory | None, deadline: float) -> bool:
        """Return whether hierarchical all-reduces are possible.

        They need several hosts, and shared memory between the ranks of each host.
        """
        if len(set(self._layout.hosts)) in (1, self._layout.size):
            return False
        alone = len(self._layout.local_ranks) == 1
        own = b"yes" if alone or shared is not None else b"no"
        return b"no" not in self._exchange(range(self._layout.size), own, deadline, "agree on layers")

    def _exchange(self, members: Sequence[int], value: bytes, deadline: float, description: str) -> list[bytes]:
        store = PrefixStore(self._store, f"from rank {members[0]}")
        own = members.index(self._layout.rank)
        try:
            return exchange(
                store,
                own,
                len(members),
                value,
                deadline,
                description=description,
                check=lambda missing: self._check_alive([members[rank] for rank in missing]),
            )
        except EndedError:
            raise
        except RankLostError as error:
            raise self._absent([members[number] for number in error.ranks]) from None

    def _check_alive(self, members: Sequence[int]) -> None:
        self._world.check_alive([self._layout.ranks[rank] for rank in members])

    def _absent(self, members: Sequence[int]) -> RankLostError:
        return absent(tuple(self._layout.ranks[rank] for rank in members), self._layout.name)

    def _open_segment(self, deadline: float) -> Segment | None:
        leader = self._layout.local_ranks[0]
        num_bytes = steps.segment_bytes(len(self._layout.local_ranks))
        key = f"segment of rank {leader}"
        try:
            if self._layout.rank == leader:
                segment = Segment.create(num_bytes)
                self._store.set(key, segment.path.encode())
                return segment
            path = self._path_of(key, leader, deadline)  # empty if the host's first rank could not create the segment
            return Segment.open(path, num_bytes, pid=self._layout.infos[leader].pid) if path else None
        except SegmentError:
            if self._layout.rank == leader:
                self._store.set(key, b"")
            return None

    def _path_of(self, key: str, leader: int, deadline: float) -> str:
        found, missing = await_all(self._store, {leader: key}, deadline, self._check_alive)
        if missing:
            raise self._absent(missing)
        return found[leader].decode()
