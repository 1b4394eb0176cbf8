"""The requests of clients: pushes, reads, ticks and resyncs. Frames become events of the core.

A push that is neither forwarded nor buffered is applied here directly, after the core's verdict.
"""

from __future__ import annotations

import math

import numpy as np

from paceline.errors import ProtocolError
from paceline.kernels.sparse import largest
from paceline.protocol.server import Route, Verdict, events
from paceline.ps.messages import DROPPED, EXACT, RANGE, TICKS
from paceline.ps.server.answers import name_of
from paceline.ps.server.back_pressure import BackPressure
from paceline.ps.server.pushes import GRADIENTS, ChainPush, check_range, payload_of
from paceline.ps.server.runtime import Runtime
from paceline.tables.aggregation import Push
from paceline.tables.non_finite import NonFinite
from paceline.tables.part import Selection, not_finite
from paceline.tables.server_tables import Piece, ServerTable
from paceline.tables.types import Floats
from paceline.transport import Header, Peer

_BUFFER, _CHAIN = Route.BUFFER, Route.CHAIN  # read once, because looking up a member of an Enum is slow
_STALE, _EXPELLED = Route.STALE, Route.EXPELLED


class Requests:
    """The requests of one server's clients."""

    def __init__(self, runtime: Runtime, pressure: BackPressure, non_finite: NonFinite) -> None:
        self._runtime = runtime
        self._core = runtime.core
        self._tables = runtime.tables
        self._answers = runtime.answers
        self._stale = runtime.stale
        self._pressure = pressure
        self._non_finite = non_finite

    def pull(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        table = self._tables.find(header.table)
        if header.flags & RANGE:
            selection = _range(table, body)
            if len(body) != 16:
                raise ProtocolError(f"a range pull has a body of 16 bytes, got {len(body)}")
        else:
            if len(body) & 7:
                raise ProtocolError(f"a pull's body has keys of 8 bytes each, got {len(body)} bytes")
            selection = Selection(np.frombuffer(body, np.uint64))
        self._runtime.read(peer, header, table, selection, header.clock, 0)

    def push(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        core, table = self._core, self._tables.find(header.table)
        selection, grads = self._split_push(table, header, body)
        top = float(largest(grads))
        if not top < math.inf:
            raise not_finite(grads, name_of(peer), table.spec.name)
        buckets = table.part.buckets_of(selection) if core.has_copies else None
        verdict = core.push(peer.hello.incarnation, header.sequence, header.clock, buckets)
        if verdict.route is _CHAIN:
            self._push_down(peer, header, table, (selection, grads), top, verdict)
            return
        if verdict.route is _STALE:
            raise self._answers.stale()
        if verdict.route is _EXPELLED:
            raise self._answers.expelled(peer)
        flags = 0
        if not verdict.fresh:  # a repeat of a push that was applied or dropped
            flags = DROPPED if self._stale.was_dropped(verdict.worker, header) else 0
        else:
            new = selection, grads
            if verdict.fresh != verdict.buckets:
                new = table.part.restrict(selection, grads, verdict.fresh)
            if verdict.route is _BUFFER:
                self._buffer(peer, header, table, new, top, verdict)
            else:
                flags = self._apply(peer, header, table, new, top, verdict)
        self._runtime.answer_push(peer, header, selection, self._tick_of(peer, header), flags)

    def tick(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        self.count_tick(peer, header)
        self._answers.acknowledge(peer, header, 0)

    def count_tick(self, peer: Peer, header: Header) -> None:
        self._runtime.tick(peer.hello.incarnation, header.clock + 1)

    def synced(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        self._answers.check_member(peer)
        counts = bool(header.flags & 1)
        self._runtime.feed(
            events.Synced(
                token=(peer, header),
                worker=peer.hello.incarnation,
                rank=header.sequence,
                version=header.epoch,
                clock=header.clock,
                has_joined=counts,
                counts=counts,
            )
        )

    def _tick_of(self, peer: Peer, header: Header) -> int:
        """Record a tick if the push ends its iteration; return the iteration of a read that follows the push."""
        if not header.flags & TICKS:
            return header.clock
        self.count_tick(peer, header)
        return header.clock + 1

    def _buffer(self, peer: Peer, header: Header, table: ServerTable, new: Push, top: float, verdict: Verdict) -> None:
        sums = self._runtime.sums
        assert sums is not None
        buffer, copy, worker = sums.buffer, sums.buffer.copy(*new), verdict.worker

        def admit() -> list[events.Instruction]:
            instructions = self._core.admit(verdict)
            buffer.add(header.clock, worker, self._core.rank_of(worker), header.table, copy, top)
            return instructions

        table.pushes += 1
        self._runtime.run_or_fail(admit)
        self._pressure.record(peer, new[1].nbytes)

    def _push_down(
        self, peer: Peer, header: Header, table: ServerTable, pushed: Push, top: float, verdict: Verdict
    ) -> None:
        """Apply a push here and forward it; the answer waits for all successors."""
        worker, (selection, grads), fresh = verdict.worker, pushed, verdict.fresh
        if fresh:
            dropped = self._stale.was_dropped(worker, header)  # the core does not record dropped pushes
            if verdict.takes_part and not dropped:
                dropped, grads, top = self._apply_stale_policy(worker, header, table, (selection, grads), top)
            if dropped:
                self._runtime.answer_push(peer, header, selection, self._tick_of(peer, header), DROPPED)
                return
            new = selection, grads
            if fresh != verdict.buckets:
                new = table.part.restrict(selection, grads, fresh)
                top = float(largest(new[1]))
            if not table.part.magnitudes.take(top):
                self._try_push(peer, table, new, top)
        table.pushes += 1
        is_new = fresh == verdict.buckets
        flags = DROPPED if not is_new and self._stale.was_dropped(worker, header) else 0
        pieces = [Piece(header.table, selection, grads)]
        push = ChainPush(GRADIENTS, worker, header.sequence, pieces, peer, header, flags, buckets=verdict.buckets)
        if not is_new and self._stale.alters:
            self._use_applied_gradients(push, selection)
        push.own()
        table.part.reserve(selection)
        self._runtime.run_or_fail(lambda: self._core.admit(verdict, push))
        self._pressure.record(peer, push.num_bytes)
        if fresh:
            table.staleness.applied(worker, header.clock)
        self._tick_of(peer, header)

    def _apply_stale_policy(
        self, worker: int, header: Header, table: ServerTable, push: Push, top: float
    ) -> tuple[bool, Floats, float]:
        """Apply the policy for stale gradients (:class:`StaleGradients`); pushes of counts stay unchanged."""
        staleness = table.staleness.observe(worker, header.clock)
        if staleness and not header.flags & EXACT:
            return self._stale.apply_policy(worker, header, table, push, top, staleness)
        return False, push[1], top

    def _use_applied_gradients(self, push: ChainPush, selection: Selection) -> None:
        """Before a repeated push is forwarded, replace its gradients by the gradients that this server applied."""
        pieces: list[Piece] = []
        remaining = push.buckets
        for token, buckets in self._core.forwarded(push.incarnation, push.sequence):
            pieces += payload_of(token).part(self._tables, buckets & remaining)
            remaining &= ~buckets
        push.pieces, push.requested = [*pieces, *push.part(self._tables, remaining)], selection

    def push_own(self, push: ChainPush) -> None:
        """Apply and forward a push of this server on behalf of a client."""
        verdict = self._core.push(push.incarnation, push.sequence, 0, push.buckets)
        self._runtime.run_or_fail(lambda: self._core.admit(verdict, push))

    def _try_push(self, peer: Peer, table: ServerTable, new: Push, top: float) -> None:
        self._non_finite.try_push(table, *new, top, f"a push of {name_of(peer)} to server {self._tables.rank}")

    def _split_push(self, table: ServerTable, header: Header, body: memoryview) -> tuple[Selection, Floats]:
        part, at = table.part, 16
        if header.flags & RANGE:
            selection = _range(table, body)
        else:
            count = len(body) // (8 + 4 * part.dim)
            selection, at = Selection(np.frombuffer(body, np.uint64, count)), 8 * count
        if len(body) != at + 4 * part.num_values(selection):
            raise ProtocolError(
                f"a push to table {table.spec.name!r} ({table.spec}) has a body of {len(body)} bytes: expected a whole "
                "number of keys with their gradients"
            )
        return selection, np.frombuffer(body, np.float32, offset=at)

    def _apply(self, peer: Peer, header: Header, table: ServerTable, new: Push, top: float, verdict: Verdict) -> int:
        (selection, grads), dropped = new, False
        if verdict.takes_part:
            dropped, grads, top = self._apply_stale_policy(verdict.worker, header, table, new, top)
        if not dropped:
            if not table.part.magnitudes.take(top):
                self._try_push(peer, table, (selection, grads), top)
            table.part.reserve(selection)  # may raise MemoryError, so reserve before the push counts as applied
        table.pushes += 1
        try:  # faster than Runtime.run_or_fail, and a push without a token has no instructions
            self._core.admit(verdict)
            if not dropped:
                table.part.push(selection, grads)
                table.staleness.applied(verdict.worker, header.clock)
        except Exception as error:
            self._runtime.fail(error)
            raise
        return DROPPED if dropped else 0


def _range(table: ServerTable, body: memoryview) -> Selection:
    if table.spec.kind != "dense" or len(body) < 16:
        raise ProtocolError(
            f"a range request to table {table.spec.name!r} ({table.spec}) has a body of {len(body)} bytes: expected a "
            "dense table and two numbers of 8 bytes"
        )
    start, stop = np.frombuffer(body, np.uint64, 2).tolist()
    check_range(table.spec, start, stop)
    return Selection(None, start, stop)
