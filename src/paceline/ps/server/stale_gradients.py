"""The cluster's policy for stale gradients: accept, drop or compensate."""

from __future__ import annotations

from collections import deque

from paceline.kernels.sparse import largest
from paceline.protocol import DelayCompensate, DropStale, StalePolicy
from paceline.tables.aggregation import Push
from paceline.tables.part import Selection
from paceline.tables.server_tables import ServerTable
from paceline.tables.staleness import DelayCompensation
from paceline.tables.types import Floats
from paceline.transport import Header

_DROPPED_KEPT = 256  # dropped pushes to remember: the maximum number of pushes of one client in flight


class StaleGradients:
    """The policy of one server, and its dropped pushes."""

    def __init__(self, policy: StalePolicy | None) -> None:
        self._drop_beyond = policy.beyond if isinstance(policy, DropStale) else None
        self._dropped: dict[int, deque[int]] = {}  # worker → numbers of its last dropped pushes
        self._compensation = DelayCompensation(policy.strength) if isinstance(policy, DelayCompensate) else None

    @property
    def alters(self) -> bool:
        """Whether applied gradients may differ from the pushed gradients."""
        return self._compensation is not None

    def apply_policy(
        self, worker: int, header: Header, table: ServerTable, push: Push, top: float, staleness: int
    ) -> tuple[bool, Floats, float]:
        """Return whether a push is dropped as too stale, the gradients to apply, and their greatest magnitude."""
        selection, grads = push
        if self._drop_beyond is not None and staleness > self._drop_beyond:
            table.dropped += 1
            self._dropped.setdefault(worker, deque(maxlen=_DROPPED_KEPT)).append(header.sequence)
            return True, grads, top
        if self._compensation is not None:
            grads = self._compensation.compensate(worker, header.table, header.clock, table.part, selection, grads)
            top = float(largest(grads))
        return False, grads, top

    def was_dropped(self, worker: int, header: Header) -> bool:
        return header.sequence in self._dropped.get(worker, ())

    def pulled(
        self, worker: int, header: Header, table: ServerTable, clock: int, selection: Selection, values: Floats
    ) -> None:
        table.staleness.pulled(worker, clock)
        if self._compensation is not None:
            self._compensation.pulled(worker, header.table, clock, selection, values)

    def forget(self, worker: int) -> None:
        self._dropped.pop(worker, None)
        if self._compensation is not None:
            self._compensation.forget(worker)
