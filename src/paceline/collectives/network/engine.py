"""The engine that runs collectives over sockets.

It serves groups on several hosts, and calls for which the user selects an algorithm.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Final

from typing_extensions import override

from paceline.collectives.arrays import view_bytes
from paceline.collectives.engine import Area, Engine, Order, Reduction, copy
from paceline.collectives.network.blocks import Blocks
from paceline.collectives.network.executor import ScheduleExecutor
from paceline.collectives.network.mesh import Mesh
from paceline.collectives.network.receiving import Combine
from paceline.collectives.schedules import ALGORITHMS, Schedule
from paceline.collectives.schedules.base import renamed
from paceline.collectives.shared.engine import SharedMemory

_PIECE_BYTES: Final = 1 << 18
_MAX_PIECES: Final = 64
COMBINER: Final = ctypes.CFUNCTYPE(
    None, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_double
)

Choose = Callable[[str, int], str]


class Layered:
    """The hierarchical all-reduce, for groups on several hosts with several ranks each.

    Each host reduces its data in shared memory to its leader (the first rank of the host). The leaders run an
    all-reduce over the network, and each leader broadcasts the result in shared memory.
    """

    def __init__(
        self, executor: ScheduleExecutor, shared: SharedMemory | None, hosts: Sequence[int], rank: int
    ) -> None:
        """`shared` is the shared-memory engine of this host's ranks; None if the host has only this rank."""
        self._executor, self._shared = executor, shared
        self._leaders = [hosts.index(host) for host in sorted(set(hosts))]
        self._is_leader = rank in self._leaders
        number = len(self._leaders)
        self._barrier = ALGORITHMS["barrier"]["dissemination"].schedule(rank, len(hosts))
        self._schedule: Schedule | None = None
        if self._is_leader:
            name = "halving-doubling" if number & (number - 1) == 0 else "ring"
            plain = ALGORITHMS["all_reduce"][name].schedule(self._leaders.index(rank), number)
            self._schedule = Schedule(plain.num_blocks, renamed(plain.rounds, self._leaders))

    def all_reduce(self, order: Order, source: Area, target: Area, reduction: Reduction) -> None:
        sums = reduction._replace(scale=1.0)
        try:
            # This barrier connects the links between hosts. If the calls of one host's ranks differ, the ranks report
            # the error over these links.
            execute(self._executor, order, self._barrier, Blocks([]), None)
            if self._shared is not None:
                self._shared.reduce(order, source, target if self._is_leader else None, sums, 0)
            else:
                copy(source, target)
            if self._schedule is not None:
                blocks = Blocks.even(view_bytes(*target), self._schedule.num_blocks, reduction.item_bytes)
                execute(self._executor, order, self._schedule, blocks, sums)
                scale(target, reduction)
            if self._shared is not None:
                self._shared.broadcast(order, target, 0)
        except BaseException as error:  # the other ranks of all hosts must raise the error too
            if self._shared is not None:
                self._shared.abort(error)
            self._executor.abort(order.call, order.sequence, error)
            raise


class NetworkEngine(Engine):
    """The engine for ranks that are connected by links (sockets)."""

    def __init__(
        self,
        links: Mesh,
        executor: ScheduleExecutor,
        hosts: Sequence[int],
        choose: Choose,
        layered: Layered | None = None,
    ) -> None:
        """`hosts` has the number of each rank's host. `choose` returns the algorithm for a collective and a size in
        bytes. `layered` runs hierarchical all-reduces. If it is None, ordinary schedules run them.
        """
        self.rank, self.size = links.rank, links.size
        self._links = links
        self._executor = executor
        self._hosts = tuple(hosts)
        self._choose = choose
        self._layered = layered
        self._schedules: dict[tuple[str, str, int, int], Schedule] = {}

    @override
    def barrier(self, order: Order) -> None:
        self.run(order, "barrier", Blocks([]), 0)

    @override
    def all_reduce(self, order: Order, source: Area, target: Area, reduction: Reduction) -> None:
        if self._layered is not None and self.algorithm(order, "all_reduce", source.num_bytes) == "hierarchical":
            self._layered.all_reduce(order, source, target, reduction)
            return
        copy(source, target)
        self._run_even(order, "all_reduce", target, reduction=reduction)
        scale(target, reduction)

    @override
    def reduce(self, order: Order, source: Area, target: Area | None, reduction: Reduction, root: int) -> None:
        self._agree(order)
        scratch = ctypes.create_string_buffer(source.num_bytes) if target is None else None
        area = target or Area(ctypes.addressof(scratch), source.num_bytes)  # type: ignore[arg-type]
        copy(source, area)
        self._run_even(order, "reduce", area, root=root, reduction=reduction)
        if target is not None:
            scale(target, reduction)

    @override
    def reduce_scatter(self, order: Order, sources: Sequence[Area], target: Area, reduction: Reduction) -> None:
        sizes = [source.num_bytes for source in sources]
        start, total = sources[0].address, sum(sizes)
        work = bytearray(view_bytes(start, total))  # a copy, because the schedule overwrites its input
        blocks = Blocks([(memoryview(work), sizes)])
        self.run(order, "reduce_scatter", blocks, total, reduction=reduction)
        own = sum(sizes[: self.rank])
        view_bytes(*target)[:] = memoryview(work)[own : own + sizes[self.rank]]
        scale(target, reduction)

    @override
    def broadcast(self, order: Order, area: Area, root: int) -> None:
        self._agree(order)
        self._run_even(order, "broadcast", area, root=root)

    @override
    def all_gather(self, order: Order, source: Area, targets: Sequence[Area]) -> None:
        copy(source, targets[self.rank])
        self._run_areas(order, "all_gather", targets)

    @override
    def gather(self, order: Order, source: Area, targets: Sequence[Area], root: int) -> None:
        self._agree(order)
        if self.rank == root:
            copy(source, targets[root])
            self._run_areas(order, "gather", targets, root, "central")
        else:
            self._run_areas(order, "gather", self._only(source), root, "central")

    @override
    def scatter(self, order: Order, sources: Sequence[Area], target: Area, root: int) -> None:
        self._agree(order)
        if self.rank == root:
            self._run_areas(order, "scatter", sources, root, "central")
            copy(sources[root], target)
        else:
            self._run_areas(order, "scatter", self._only(target), root, "central")

    @override
    def all_to_all(self, order: Order, sources: Sequence[Area], targets: Sequence[Area], *, equal: bool) -> None:
        parts = [(view_bytes(*area), [area.num_bytes]) for area in (*sources, *targets)]
        total = sum(area.num_bytes for area in sources)
        name = self.algorithm(order, "all_to_all", total) if equal else "pairwise"
        scratch = [area.num_bytes for area in sources] if name == "bruck" else [0] * self.size
        parts.append((memoryview(bytearray(sum(scratch))), scratch))
        self.run(order, "all_to_all", Blocks(parts), total, algorithm=name)

    @override
    def close(self) -> None:
        self._links.close()

    def algorithm(self, order: Order, collective: str, num_bytes: int) -> str:
        """Return the user's algorithm if it supports the collective and the group's size, else the tuner's choice."""
        known = ALGORITHMS[collective].get(order.algorithm)
        if known is not None and known.supports(self.size):
            return order.algorithm
        return self._choose(collective, num_bytes)

    def run(
        self,
        order: Order,
        collective: str,
        blocks: Blocks,
        num_bytes: int,
        *,
        root: int = 0,
        reduction: Reduction | None = None,
        algorithm: str = "",
    ) -> None:
        name = algorithm or self.algorithm(order, collective, num_bytes)
        self.execute(order, self._schedule(collective, name, root, 1), blocks, reduction)

    def execute(self, order: Order, schedule: Schedule, blocks: Blocks, reduction: Reduction | None) -> None:
        execute(self._executor, order, schedule, blocks, reduction)

    def _run_even(
        self, order: Order, collective: str, area: Area, *, root: int = 0, reduction: Reduction | None = None
    ) -> None:
        name = self.algorithm(order, collective, area.num_bytes)
        pieces = num_pieces(collective, name, area.num_bytes)
        schedule = self._schedule(collective, name, root, pieces)
        item_bytes = 1 if reduction is None else reduction.item_bytes
        self.execute(order, schedule, Blocks.even(view_bytes(*area), schedule.num_blocks, item_bytes), reduction)

    def _run_areas(
        self, order: Order, collective: str, areas: Sequence[Area], root: int = 0, algorithm: str = ""
    ) -> None:
        blocks = Blocks([(view_bytes(*area), [area.num_bytes]) for area in areas])
        total = sum(area.num_bytes for area in areas)
        self.run(order, collective, blocks, total, root=root, algorithm=algorithm)

    def _agree(self, order: Order) -> None:
        """Run a barrier, which checks that all ranks make the same call. During the call itself, a rank that only sends
        could not detect that other ranks make a different call, because it receives no message.
        """
        self.execute(order, self._schedule("barrier", "dissemination", 0, 1), Blocks([]), None)

    def _only(self, own: Area) -> list[Area]:
        return [own if rank == self.rank else Area(own.address, 0) for rank in range(self.size)]

    def _schedule(self, collective: str, name: str, root: int, pieces: int) -> Schedule:
        key = (collective, name, root, pieces)
        found = self._schedules.get(key)
        if found is None:
            found = ALGORITHMS[collective][name].schedule(
                self.rank, self.size, root=root, pieces=pieces, hosts=self._hosts
            )
            if len(self._schedules) > 1000:
                self._schedules.clear()
            self._schedules[key] = found
        return found


def num_pieces(collective: str, algorithm: str, num_bytes: int) -> int:
    if not ALGORITHMS[collective][algorithm].pipelined:
        return 1
    return min(_MAX_PIECES, max(1, num_bytes // _PIECE_BYTES))


def execute(
    executor: ScheduleExecutor, order: Order, schedule: Schedule, blocks: Blocks, reduction: Reduction | None
) -> None:
    executor.run(
        schedule,
        blocks,
        call=order.call,
        sequence=order.sequence,
        combine=None if reduction is None else combine_with(reduction),
        item_bytes=1 if reduction is None else reduction.item_bytes,
        timeout_s=order.timeout_s,
    )


def combine_with(reduction: Reduction) -> Combine:
    function = COMBINER(reduction.combiner)
    table = (ctypes.c_uint64 * 2)()
    place = ctypes.addressof(table)

    def combine(target: memoryview, incoming: memoryview, incoming_first: bool) -> None:
        own = address_of(target)
        table[incoming_first], table[not incoming_first] = own, address_of(incoming)
        function(own, place, 2, target.nbytes // reduction.item_bytes, reduction.op, 1.0)

    return combine


def scale(target: Area, reduction: Reduction) -> None:
    if reduction.scale != 1.0:
        table = (ctypes.c_uint64 * 1)(target.address)
        count = target.num_bytes // reduction.item_bytes
        COMBINER(reduction.combiner)(target.address, ctypes.addressof(table), 1, count, reduction.op, reduction.scale)


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if view.nbytes else 0
