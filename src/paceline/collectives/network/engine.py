"""Run schedules over connections, for groups on several hosts or with a requested algorithm."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Final

from typing_extensions import override

from paceline.collectives.arrays import view_bytes
from paceline.collectives.engine import Area, Engine, Order, Reduction, copy
from paceline.collectives.network.executing import execute, scale
from paceline.collectives.network.executor import Blocks, ScheduleExecutor
from paceline.collectives.network.layered import Layered
from paceline.collectives.network.mesh import Mesh
from paceline.collectives.schedules import ALGORITHMS, Schedule

_PIECE_BYTES: Final = 1 << 18
_MAX_PIECES: Final = 64

Choose = Callable[[str, int], str]


class NetworkEngine(Engine):
    """The engine for ranks connected by links."""

    def __init__(
        self,
        links: Mesh,
        executor: ScheduleExecutor,
        hosts: Sequence[int],
        choose: Choose,
        layered: Layered | None = None,
    ) -> None:
        """`hosts` are the host numbers of the ranks. `layered`, if given, runs hierarchical all-reduces."""
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
        work = bytearray(view_bytes(start, total))  # the input must not change
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
        """Return the requested algorithm if it supports the collective, else the tuner's choice."""
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
        """Run a barrier before the call, because a rank that only sends would not detect a mismatch."""
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
