"""What becomes of gradients that are stale: accepted, dropped or compensated, as the cluster's policy says."""

from __future__ import annotations

from collections import deque

from paceline.kernels.sparse import largest
from paceline.protocol import DelayCompensate, DropStale, StalePolicy
from paceline.ps.messages import DROPPED, EXACT
from paceline.tables.part import Selection
from paceline.tables.server_tables import ServerTable
from paceline.tables.staleness import DelayCompensation
from paceline.tables.types import Floats
from paceline.transport import Header

_DROPPED_KEPT = 256  # as many pushes as a client has in flight at most


class StaleGradients:
    """The policy of one server, and which pushes it has dropped."""

    def __init__(self, policy: StalePolicy | None) -> None:
        self._drop_beyond = policy.beyond if isinstance(policy, DropStale) else None
        self._dropped: dict[int, deque[int]] = {}  # worker → its last pushes that were dropped
        self._compensation = DelayCompensation(policy.strength) if isinstance(policy, DelayCompensate) else None

    @property
    def alters(self) -> bool:
        """Whether what is applied may be other than what was pushed."""
        return self._compensation is not None

    def treat(
        self, worker: int, header: Header, table: ServerTable, selection: Selection, grads: Floats, top: float
    ) -> tuple[bool, Floats, float]:
        """Return whether a gradient is too stale, what it is after compensation, and its greatest magnitude.

        Counts, whose frames are flagged as exact, are applied as they are however stale.
        """
        staleness = table.staleness.observe(worker, header.clock)
        if header.flags & EXACT:
            return False, grads, top
        if self._drop_beyond is not None and staleness > self._drop_beyond:
            table.dropped += 1
            self._dropped.setdefault(worker, deque(maxlen=_DROPPED_KEPT)).append(header.sequence)
            return True, grads, top
        if self._compensation is not None and staleness:
            grads = self._compensation.compensate(worker, header.table, header.clock, table.part, selection, grads)
            top = float(largest(grads))
        return False, grads, top

    def flags_of_duplicate(self, worker: int, header: Header) -> int:
        """Return the flags of the answer to a push that came before."""
        return DROPPED if header.sequence in self._dropped.get(worker, ()) else 0

    def pulled(
        self, worker: int, header: Header, table: ServerTable, clock: int, selection: Selection, values: Floats
    ) -> None:
        """Note what a worker has read for iteration `clock`."""
        table.staleness.pulled(worker, clock)
        if self._compensation is not None:
            self._compensation.pulled(worker, header.table, clock, selection, values)

    def forget(self, worker: int) -> None:
        """Forget a worker that is gone."""
        self._dropped.pop(worker, None)
        if self._compensation is not None:
            self._compensation.forget(worker)
