"""Faults that only product runs have: of memory and disks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from typing_extensions import override

from simulator.cluster import Cluster
from simulator.faults import WEIGHTS, Faults
from simulator.product.state import SharedState
from simulator.world import VirtualProcess

KINDS: Final = tuple(
    kind
    for kind in WEIGHTS
    if kind not in ("cable", "pause-scheduler", "clock-jump", "second-scheduler", "leave-worker")
)
"""The faults of product runs."""
_LONG_S: Final = 3.0
"""Longest time in which the faults of a phase begin. In such a phase, most faults begin after the end of the work."""


class ProductFaults(Faults):
    """The faults of a product run. `start_snapshot` returns whether it has started a snapshot."""

    def __init__(
        self,
        cluster: Cluster,
        state: SharedState,
        kinds: Sequence[str],
        number: int | None,
        *,
        start_snapshot: Callable[[], bool],
    ) -> None:
        work_s = cluster.settings.iterations * (cluster.settings.think_s / 2 + 0.02)
        super().__init__(cluster, kinds, number, spans_s=(work_s, 2 * work_s, _LONG_S))
        self._state = state
        self._snapshot = start_snapshot

    @override
    def is_doubtful(self, server: VirtualProcess) -> bool:
        return server in self._state.memory.failing or super().is_doubtful(server)

    def _refuse_memory(self) -> bool:
        server, refusing = self.one(self.cluster.live_servers), self._state.memory.refusing
        if server is None or not self._state.may_refuse:
            return False
        refusing[server] = None
        self.end_after(self._world.random.random(), partial(refusing.pop, server, None))
        return True

    def _out_of_memory(self) -> bool:
        server, memory = self.one(self.cluster.live_servers), self._state.memory
        seconds = self._world.random.random() * 2
        if server is None or not self.may_fail([server], seconds):
            return False
        memory.failing[server] = memory.was_failing[server] = None
        self.end_after(seconds, partial(memory.failing.pop, server, None))
        return True

    def _disk(self) -> bool:
        """Let the disk be full or broken for a while, in the middle of a snapshot."""
        disk = self._state.disk
        if disk.is_failing or not self._snapshot():
            return False
        disk.is_failing = True
        self.end_after(self._world.random.random(), partial(setattr, disk, "is_failing", False))
        return True
