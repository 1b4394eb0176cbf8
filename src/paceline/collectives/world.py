"""What the groups of one program share: where every rank is, and how a group's ranks get hold of one another."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec
from numba import config

from paceline.collectives.calls import Call, name_ranks
from paceline.collectives.engine import Order
from paceline.collectives.group_names import EndedError, GroupNames, absent
from paceline.collectives.network import verdicts as _verdicts
from paceline.collectives.network.engine import Choose, NetworkEngine
from paceline.collectives.network.executor import ScheduleExecutor, Status
from paceline.collectives.network.frames import Abort
from paceline.collectives.network.layered import Layered
from paceline.collectives.network.mesh import Mesh
from paceline.collectives.p2p.point_to_point import PointToPoint
from paceline.collectives.rendezvous.node import Node, NodeInfo
from paceline.collectives.rendezvous.store import PrefixStore, Store, await_all, exchange
from paceline.collectives.shared.engine import SharedMemory
from paceline.collectives.shared.segment import Segment, SegmentError
from paceline.collectives.shared.watching import is_alive
from paceline.environment import usable_cores
from paceline.errors import (
    AddressError,
    CollectiveError,
    ConnectionLostError,
    DeadlineError,
    GroupClosedError,
    MismatchError,
    RankLostError,
    UsageError,
)
from paceline.kernels import steps
from paceline.transport import TLS, read_meta

_ASK_S = 1.0
_MAX_LOOKED_AT = 16


class JoinedGroup(Protocol):
    """A group, as the world knows it."""

    def close(self) -> None:
        """Leave it. Idempotent."""

    def disown(self) -> None:
        """Use it no more, and leave everything to the parent of this forked process."""


class _Attached(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says once it has opened the segment."""

    failure: str
    cores: tuple[int, ...]


class World:
    """All ranks of a program, as one of them sees them."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        token: str,
        host: str = "127.0.0.1",
        tls: TLS | None = None,
        name: str,
        timeout_s: float,
        algorithm: str | None = None,
    ) -> None:
        """Meet all ranks. Raises RankLostError that names those that did not come.

        `algorithm` is what this rank demands; MismatchError on all ranks if they differ in that.
        """
        if not 0 <= rank < size:
            raise UsageError(f"got rank {rank} of {size}, expected one from 0 to {size - 1}")
        self.store, self.rank, self.size, self.name = store, rank, size, name
        self.group_names = GroupNames(store, rank, name, self.look_after)
        self._groups: set[JoinedGroup] = set()
        self.is_closed = False
        self.node = Node(token, host=host, tls=tls)
        try:
            own = msgspec.structs.replace(self.node.info, algorithm=algorithm or "").encode()
            told = exchange(store, rank, size, own, time.monotonic() + timeout_s, what="the rendezvous")
            self.infos: tuple[NodeInfo, ...] = tuple(NodeInfo.decode(info) for info in told)
            self._check_algorithms()
        except BaseException:
            self.node.close()
            raise
        _open_worlds.add(self)

    def _check_algorithms(self) -> None:
        """Ranks that go different ways would wait for one another, or take one another's data for their own."""
        sides: dict[str, list[int]] = {}
        for rank, info in enumerate(self.infos):
            sides.setdefault(info.algorithm, []).append(rank)
        if len(sides) > 1:
            told = "; ".join(
                f"{name_ranks(ranks)} demanded {repr(algorithm) if algorithm else 'none'}"
                for algorithm, ranks in sides.items()
            )
            raise MismatchError(
                f"the ranks disagree about the algorithm: {told}; set PACELINE_ALGORITHM alike on all ranks"
            )

    def look_after(self, ranks: Sequence[int]) -> None:
        """Raise EndedError if some of these ranks have died or left: nobody listens any more where they did."""
        ended = tuple(rank for rank in ranks[:_MAX_LOOKED_AT] if not self.node.is_there(self.infos[rank]))
        if ended:
            raise EndedError(f"{name_ranks(ended)} died or left before a group was made of it", ended)

    @contextlib.contextmanager
    def in_ranks(self, what: str) -> Iterator[None]:
        """Say of errors of the store which rank is lost with it."""
        try:
            yield
        except (ConnectionLostError, AddressError, DeadlineError) as error:
            server = self.store.server_rank
            if server is None:
                self.look_after(range(self.size))
                raise CollectiveError(f"{what} could not be made: {error}") from error
            raise EndedError(
                f"rank {server} died, left or stopped before {what} was made: it serves the store ({error})", (server,)
            ) from error

    def enter(self, group: JoinedGroup) -> None:
        """Take note of a group, which is closed with the world."""
        self._groups.add(group)

    def leave(self, group: JoinedGroup) -> None:
        """Forget a group, which is closed."""
        self._groups.discard(group)

    def close(self) -> None:
        """Leave: the other ranks notice. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        _open_worlds.discard(self)
        for group in list(self._groups):
            group.close()
        self.node.close()
        self._clean_up_after_the_dead()
        self.store.close()

    def disown(self) -> None:
        """Leave everything to the parent of this process, which has been forked: it has no threads to serve it."""
        self.is_closed = True
        for group in self._groups:
            group.disown()

    def _clean_up_after_the_dead(self) -> None:
        """Remove the sockets of processes on this host that were killed."""
        for info in self.infos:
            there = info.memory_domain == self.node.info.memory_domain and info.endpoint.unix is not None
            if there and info.pid != os.getpid() and not is_alive(info.pid):
                assert info.endpoint.unix is not None
                folder = os.path.dirname(info.endpoint.unix.path)
                if os.path.basename(folder).startswith("paceline-"):  # as bind_unix names them where they are files
                    with contextlib.suppress(OSError):
                        os.unlink(info.endpoint.unix.path)
                        os.rmdir(folder)


_open_worlds: weakref.WeakSet[World] = weakref.WeakSet()


@atexit.register
def _close_worlds() -> None:
    for world in list(_open_worlds):
        with contextlib.suppress(Exception):
            world.close()


def _disown_worlds() -> None:
    for world in list(_open_worlds):
        world.disown()
    _open_worlds.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_worlds)


class Connections:
    """How the ranks of one group reach one another; what is not needed is not made."""

    def __init__(
        self,
        world: World,
        ranks: Sequence[int],
        name: str,
        timeout_s: float,
        on_failure: Callable[[CollectiveError, bool], None] | None = None,
    ) -> None:
        """`ranks`: their numbers in the world, in the order of the group; this process's is among them.

        `on_failure`: see :class:`PointToPoint`.
        """
        self.world, self.name = world, name
        self._timeout_s, self._on_failure = timeout_s, on_failure
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(world.rank)
        self.size = len(self.ranks)
        self.infos = tuple(world.infos[rank] for rank in self.ranks)
        domains = [info.memory_domain for info in self.infos]
        self.hosts = tuple(sorted(set(domains), key=domains.index).index(domain) for domain in domains)
        """The number of every rank's host; ranks of one host can share memory."""
        self.local_ranks = tuple(rank for rank in range(self.size) if self.hosts[rank] == self.hosts[self.rank])
        self._store = PrefixStore(world.store, f"group {name}")
        self.at: tuple[int, Call | None] = (-1, None)
        """The number of the call that is under way and what it is; between calls, that of the last one and None."""
        self._executor: ScheduleExecutor | None = None
        self._network: NetworkEngine | None = None
        self._point_to_point: PointToPoint | None = None
        self._making = threading.Lock()
        self._is_over = False
        self._given_up: Abort | None = None
        deadline = time.monotonic() + timeout_s
        self.shared = self._share(deadline)
        try:
            self._has_layers = self._agree_on_layers(deadline)
        except BaseException:
            if self.shared is not None:
                self.shared.close()
            raise
        world.node.answer(self._identity, self._status)

    @property
    def _identity(self) -> str:
        return f"{self.world.name}/{self.name}"

    @property
    def is_on_one_host(self) -> bool:
        """Whether all ranks can share memory."""
        return len(self.local_ranks) == self.size

    def network(self, choose: Choose) -> NetworkEngine:
        """Return the engine that runs schedules, made when it is first asked for."""
        if self._network is None:
            with self._making:
                self._check_open()
                mesh = Mesh(self.world.node, self._identity, self.rank, self.infos)
                self._executor = ScheduleExecutor(mesh, group=self.name, ask=self._ask)
                layered = None
                if self._has_layers:
                    layered = Layered(self._executor, self.shared, self.hosts, self.rank)
                self._network = NetworkEngine(mesh, self._executor, self.hosts, choose, layered)
        return self._network

    def point_to_point(self) -> PointToPoint:
        """Return send and receive, made when first asked for."""
        if self._point_to_point is None:
            with self._making:
                self._check_open()
                if self._point_to_point is None:
                    self._point_to_point = PointToPoint(
                        self.world.node,
                        self._identity,
                        self.rank,
                        self.infos,
                        connect_timeout_s=self._timeout_s,
                        ask=self._ask,
                        on_failure=self._on_failure,
                    )
        return self._point_to_point

    def _check_open(self) -> None:
        if self._is_over:
            raise GroupClosedError(f"group {self.name!r} was closed or aborted")

    def abort(self, error: BaseException, sequence: int) -> None:
        """Make the other ranks, in this call or their next one, raise what this one raises; in the thread of calls."""
        if not isinstance(error, GroupClosedError):
            told = self._told(error)
            self._given_up = self._given_up or _verdicts.abort_of(told)
            if self._point_to_point is not None:
                self._point_to_point.fail(told)
        if self.shared is not None:
            self.shared.abort(error)
        if self._executor is not None:
            self._executor.abort(_GIVEN_UP, sequence, error)

    def interrupt(self, error: CollectiveError) -> None:
        """End the call that is under way in another thread, here and on the other ranks; :meth:`abort` follows."""
        self._given_up = self._given_up or _verdicts.abort_of(error)
        if self.shared is not None:
            self.shared.abort(error)
        if self._executor is not None:
            self._executor.interrupt(error)

    def _told(self, error: BaseException) -> CollectiveError:
        """Return an error as the ranks hear of it that await or send messages."""
        if isinstance(error, CollectiveError):
            return error
        place = _verdicts.CurrentCall(self.name, self.rank, self.at[1] or _GIVEN_UP, self.at[0])
        return CollectiveError(_verdicts.failed(place, error).message)

    def cut(self) -> None:
        """End what is under way in other threads, here and on the other ranks, which are told that this one aborted."""
        with self._making:
            self._is_over = True
        if self.shared is not None:
            self.shared.abort(RankLostError(f"rank {self.rank} aborted group {self.name!r}", (self.rank,)))
        if self._network is not None:
            self._network.close()
        if self._point_to_point is not None:
            self._point_to_point.close("aborted")

    def close(self) -> None:
        """Let go of everything; the others notice. Idempotent."""
        with self._making:
            self._is_over = True
        for part in (self.shared, self._network, self._point_to_point):
            if part is not None:
                part.close()
        self.world.node.forget(self._identity)

    # who is where

    def _status(self) -> bytes:
        waiting_for = () if self._executor is None or self.at[1] is None else self._executor.status().waiting_for
        if self.at[1] is None and self._point_to_point is not None:
            waiting_for = self._point_to_point.awaited()
        return msgspec.msgpack.encode(Status(*self.at, waiting_for, self._given_up))

    def _ask(self, rank: int) -> Status | None:
        answer = self.world.node.ask(self.infos[rank], self._identity, _ASK_S)
        if answer is None:
            return None
        return read_meta(answer, Status, f"an answer of rank {rank}") if answer else Status(-1, None, ())

    # shared memory

    def _share(self, deadline: float) -> SharedMemory | None:
        """Share memory with the ranks of this host; None if that is not possible, or there are none."""
        local = self.local_ranks
        if len(local) < 2 or config.DISABLE_JIT:  # type: ignore[attr-defined]
            return None
        segment, failure = self._open_segment(deadline)
        try:
            return self._attach(segment, failure, deadline)
        except BaseException:
            if segment is not None:
                segment.close()
            raise

    def _attach(self, segment: Segment | None, failure: str, deadline: float) -> SharedMemory | None:
        """Go on together if every rank of this host has opened the segment."""
        local = self.local_ranks
        own = _Attached(failure, tuple(usable_cores()))
        values = self._exchange(local, msgspec.msgpack.encode(own), deadline, "share memory")
        attached = [read_meta(value, _Attached, "what a rank says of its memory") for value in values]
        if segment is None or any(other.failure for other in attached):
            if segment is not None:
                segment.close()
            return None
        segment.hide()
        engine = SharedMemory(
            segment,
            local.index(self.rank),
            [self.infos[rank].pid for rank in local],
            name=self.name,
            num_cores=len({core for other in attached for core in other.cores}),
            members=local,
        )
        try:
            engine.find_out_about_peers(Order(_MEET, _MEET.signature, 0, max(deadline - time.monotonic(), 1.0)))
        except BaseException as error:
            engine.close()
            if isinstance(error, RankLostError):
                raise EndedError(str(error), tuple(self.ranks[rank] for rank in error.ranks)) from None
            raise
        return engine

    def _agree_on_layers(self, deadline: float) -> bool:
        """Return whether there are several hosts, some of several ranks, and memory is shared on all of these."""
        num_hosts = len(set(self.hosts))
        if num_hosts in (1, self.size):
            return False
        alone = len(self.local_ranks) == 1
        own = b"yes" if alone or self.shared is not None else b"no"
        return b"no" not in self._exchange(range(self.size), own, deadline, "agree on layers")

    def _exchange(self, members: Sequence[int], value: bytes, deadline: float, what: str) -> list[bytes]:
        """Leave a value for these ranks of the group and return all of theirs."""
        store = PrefixStore(self._store, f"from rank {members[0]}")
        own = members.index(self.rank)
        try:
            return exchange(
                store,
                own,
                len(members),
                value,
                deadline,
                what=what,
                look=lambda missing: self._look_after([members[other] for other in missing]),
            )
        except EndedError:
            raise
        except RankLostError as error:
            raise self._absent([members[number] for number in error.ranks]) from None

    def _look_after(self, members: Sequence[int]) -> None:
        self.world.look_after([self.ranks[rank] for rank in members])

    def _absent(self, members: Sequence[int]) -> RankLostError:
        """Return the error for ranks of the group, which are called by their numbers in the world."""
        return absent(tuple(self.ranks[rank] for rank in members), self.name)

    def _open_segment(self, deadline: float) -> tuple[Segment | None, str]:
        leader = self.local_ranks[0]
        num_bytes = steps.segment_bytes(len(self.local_ranks))
        key = f"segment of rank {leader}"
        try:
            if self.rank == leader:
                segment = Segment.create(num_bytes)
                self._store.set(key, segment.path.encode())
                return segment, ""
            path = self._path_of(key, leader, deadline)
            if not path:
                return None, "the leader has no shared memory"
            return Segment.open(path, num_bytes, pid=self.infos[leader].pid), ""
        except SegmentError as error:
            if self.rank == leader:
                self._store.set(key, b"")
            return None, str(error)

    def _path_of(self, key: str, leader: int, deadline: float) -> str:
        found, missing = await_all(self._store, {leader: key}, deadline, self._look_after)
        if missing:
            raise self._absent(missing)
        return found[leader].decode()


_MEET = Call("meet")
_GIVEN_UP = Call("a call")
