"""The core's instructions that change a server's tables, except received buckets."""

from __future__ import annotations

from paceline.protocol import replication
from paceline.protocol.replication import AGGREGATE
from paceline.protocol.server import events
from paceline.ps.server.pushes import PUSH, ChainPush, apply, payload_of
from paceline.ps.server.replica_checks import ReplicaChecks
from paceline.ps.server.stale_gradients import StaleGradients
from paceline.ps.server.sums import IterationSums
from paceline.tables.server_tables import ServerTables


class TableChanges:
    """Carries out instructions on the tables of one server; `sums` is None unless consistency is sequential."""

    def __init__(
        self, tables: ServerTables, checks: ReplicaChecks, stale: StaleGradients, sums: IterationSums | None
    ) -> None:
        self._tables = tables
        self._checks = checks
        self._stale = stale
        self._sums = sums

    # Pushes.

    def apply(self, instruction: replication.Apply) -> None:
        """Apply a part of a push."""
        push = payload_of(instruction.token)
        self._checks.orders.applied(push.incarnation, push.sequence, instruction.buckets)
        apply(self._tables, push, instruction.buckets)

    def sum_up(self, token: events.SumUp) -> None:
        """Sum an iteration into a push that goes down the chains."""
        assert self._sums is not None
        pieces = self._sums.pieces(token.iteration, token.workers, token.buckets)
        sequence, buckets = token.iteration + 1, token.buckets
        token.payload = ChainPush(PUSH, AGGREGATE, sequence, pieces, buckets=buckets, is_owned=True)

    def apply_sum(self, instruction: events.ApplySum) -> None:
        """Sum and apply an iteration, without a push."""
        assert self._sums is not None
        self._sums.apply(instruction.iteration, instruction.workers, instruction.buckets)

    def drop_buffered(self, instruction: events.DropBuffered) -> None:
        """Drop a worker's pushes for iterations that it will not finish."""
        assert self._sums is not None
        self._sums.buffer.forget(instruction.worker, instruction.iteration)

    def drop_all_buffered(self, instruction: events.DropAllBuffered) -> None:
        """Drop all pushes of incomplete iterations."""
        if self._sums is not None:
            self._sums.buffer.clear()

    def forget_worker(self, instruction: events.ForgetWorker) -> None:
        """Drop a worker's staleness and pending errors."""
        self._stale.forget(instruction.worker)
        for table in self._tables.by_number.values():
            table.staleness.forget(instruction.worker)
            table.refused.pop(instruction.worker, None)

    # Buckets.

    def drop(self, instruction: replication.Drop) -> None:
        """Delete the data of some buckets."""
        self._checks.drop(instruction.buckets)
        for table in self._tables.by_number.values():
            table.part.drop(instruction.buckets)

    def hold(self, instruction: replication.Hold) -> None:
        """Create some buckets with initial values."""
        for table in self._tables.by_number.values():
            table.part.hold(instruction.buckets)

    def lead(self, instruction: replication.Lead) -> None:
        """Set the buckets that this server leads."""
        for table in self._tables.by_number.values():
            table.part.set_primary(instruction.buckets)
        if self._sums is not None:
            self._sums.restrict(instruction.buckets)
