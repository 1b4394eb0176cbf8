"""What workers send: pushes, reads, ticks, and their word for where they stand. Frames in, events to the core.

A push that need not be sent on nor kept is applied here at once: the core says so, and keeps the filter.
"""

from __future__ import annotations

import math

import numpy as np

from paceline.errors import ProtocolError
from paceline.kernels.sparse import largest
from paceline.protocol.server import Route, Verdict, events
from paceline.ps.fail_stop import Fail, must_succeed
from paceline.ps.messages import DROPPED, PUSH, RANGE, TICKS
from paceline.ps.server.answers import name_of
from paceline.ps.server.back_pressure import BackPressure
from paceline.ps.server.pushes import PUSH as PUSH_DOWN
from paceline.ps.server.pushes import ChainPush, Piece, check_range, payload_of
from paceline.ps.server.runtime import Runtime
from paceline.tables.aggregation import Push
from paceline.tables.non_finite import NonFinite
from paceline.tables.part import Selection, not_finite
from paceline.tables.server_tables import ServerTable
from paceline.tables.types import Floats
from paceline.transport import Header, Peer

_KEEP, _CHAIN, _, _STALE, _EXPELLED = Route


class Requests:
    """The requests of one server's clients."""

    def __init__(self, runtime: Runtime, pressure: BackPressure, non_finite: NonFinite, *, fail: Fail) -> None:
        self._runtime = runtime
        self._core = runtime.core
        self._tables = runtime.tables
        self._answers = runtime.answers
        self._stale = runtime.stale
        self._pressure = pressure
        self._non_finite = non_finite
        self._fail = fail

    def pull(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        """Take a PULL frame."""
        table = self._tables.find(header.table)
        if header.flags & RANGE:
            selection = _range(table, body)
            if len(body) != 16:
                raise ProtocolError(f"a range pull has a body of 16 bytes, {len(body)} were got")
        else:
            if len(body) & 7:
                raise ProtocolError(f"a pull's body is keys of 8 bytes each, {len(body)} bytes were got")
            selection = Selection(np.frombuffer(body, np.uint64))
        self._runtime.read(peer, header, table, selection, header.clock, 0)

    def push(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        """Take a PUSH or PUSH_PULL frame."""
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
        if not verdict.fresh:  # it was applied, or dropped, when it came first
            flags = self._stale.flags_of_duplicate(verdict.worker, header)
        else:
            new = selection, grads
            if verdict.fresh != verdict.buckets:
                new = table.part.restrict(selection, grads, verdict.fresh)
            if verdict.route is _KEEP:
                self._keep_for_iteration(peer, header, table, new, top, verdict)
            else:
                flags = self._apply(peer, header, table, new, top, verdict)
        clock = header.clock if not header.flags & TICKS else self._tick_of(peer, header)
        if header.kind == PUSH:
            self._answers.acknowledge(peer, header, flags)
        else:
            self._runtime.read(peer, header, table, selection, clock, flags)

    def tick(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        """Take a TICK frame."""
        self.count_tick(peer, header)
        self._answers.acknowledge(peer, header, 0)

    def count_tick(self, peer: Peer, header: Header) -> None:
        """Take note that a worker has ended the iteration of a frame."""
        self._runtime.tick(peer.hello.incarnation, header.clock + 1)

    def synced(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        """Take a SYNCED frame."""
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
        """Tick, if the push ends its iteration; return the clock of what may be read behind it."""
        if not header.flags & TICKS:
            return header.clock
        self.count_tick(peer, header)
        return header.clock + 1

    def _keep_for_iteration(
        self, peer: Peer, header: Header, table: ServerTable, new: Push, top: float, verdict: Verdict
    ) -> None:
        """Keep a new push for the end of its iteration."""
        assert self._runtime.sums is not None
        kept = self._runtime.sums.buffer.copy(*new)
        self._keep(header, table, kept, top, verdict)
        self._pressure.note(peer, new[1].nbytes)

    @must_succeed
    def _keep(self, header: Header, table: ServerTable, kept: Push, top: float, verdict: Verdict) -> None:
        assert self._runtime.sums is not None
        self._core.admit(verdict)
        table.pushes += 1
        worker = verdict.worker
        self._runtime.sums.buffer.add(header.clock, worker, self._core.rank_of(worker), header.table, kept, top)

    def _push_down(
        self, peer: Peer, header: Header, table: ServerTable, whole: Push, top: float, verdict: Verdict
    ) -> None:
        """Apply a push here and forward it; the answer waits for all successors."""
        worker, (selection, grads), fresh = verdict.worker, whole, verdict.fresh
        if fresh:
            if verdict.takes_part:
                dropped, grads, top = self._stale.treat(worker, header, table, selection, grads, top)
                if dropped:
                    clock = self._tick_of(peer, header)
                    self._runtime.answer_push(peer, header, selection, clock, DROPPED)
                    return
            new = selection, grads
            if fresh != verdict.buckets:
                new = table.part.restrict(selection, grads, fresh)
                top = float(largest(new[1]))
            if not table.part.magnitudes.take(top):
                self._try_push(peer, table, new, top)
        table.pushes += 1
        is_new = fresh == verdict.buckets
        flags = 0 if is_new else self._stale.flags_of_duplicate(worker, header)
        pieces = [Piece(header.table, selection, grads)]
        push = ChainPush(PUSH_DOWN, worker, header.sequence, pieces, peer, header, flags, buckets=verdict.buckets)
        if not is_new and self._stale.alters:
            self._say_the_same(push, selection)
        push.own()
        table.part.reserve(selection)
        self._admit(verdict, push)
        self._pressure.note(peer, push.num_bytes)
        if fresh:
            table.staleness.applied(worker, header.clock)
        self._tick_of(peer, header)

    def _say_the_same(self, push: ChainPush, selection: Selection) -> None:
        """Have a repeat carry the gradients that were applied here, and not those that the client has sent again."""
        pieces: list[Piece] = []
        rest = push.buckets
        for token, buckets in self._core.forwarded(push.incarnation, push.sequence):
            pieces += payload_of(token).part(self._tables, buckets & rest)
            rest &= ~buckets
        push.pieces, push.asked = [*pieces, *push.part(self._tables, rest)], selection

    def push_own(self, push: ChainPush) -> None:
        """Apply what this server itself pushes, for a client, and send it on."""
        self._admit(self._core.push(push.incarnation, push.sequence, 0, push.buckets), push)

    @must_succeed
    def _admit(self, verdict: Verdict, push: ChainPush) -> None:
        self._runtime.carry_out(self._core.admit(verdict, push))

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
                f"a push to table {table.spec.name!r} ({table.spec}) has a body of {len(body)} bytes, which is no "
                "whole number of keys with their gradients"
            )
        return selection, np.frombuffer(body, np.float32, offset=at)

    def _apply(self, peer: Peer, header: Header, table: ServerTable, new: Push, top: float, verdict: Verdict) -> int:
        """Apply a new push; return the flags of the answer."""
        (selection, grads), dropped = new, False
        if verdict.takes_part:
            dropped, grads, top = self._stale.treat(verdict.worker, header, table, selection, grads, top)
        if not dropped:
            if not table.part.magnitudes.take(top):
                self._try_push(peer, table, (selection, grads), top)
            table.part.reserve(selection)  # what may fail does before the filter takes the push for applied
        table.pushes += 1
        try:
            self._core.admit(verdict)
            if not dropped:
                table.part.push(selection, grads)
                table.staleness.applied(verdict.worker, header.clock)
        except Exception as error:
            self._fail(error)
            raise
        return DROPPED if dropped else 0


def _range(table: ServerTable, body: memoryview) -> Selection:
    if table.spec.kind != "dense" or len(body) < 16:
        raise ProtocolError(
            f"a request for a range of table {table.spec.name!r} ({table.spec}) has a body of {len(body)} bytes: a "
            "range is two numbers of 8 bytes, and of a dense table"
        )
    start, stop = np.frombuffer(body, np.uint64, 2).tolist()
    check_range(table.spec, start, stop)
    return Selection(None, start, stop)
