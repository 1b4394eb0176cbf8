"""A parameter server: frames in, tables updated, answers out. One asyncio loop, one thread, no locks.

Whom it talks to: workers' clients, through a transport's :class:`Handler`; the scheduler's news (who died) comes by
:meth:`Server.members_changed`. Data frames are served here, reads that must wait are held by the
:class:`~paceline.ps.gatekeeper.Gatekeeper`, control is :class:`~paceline.ps.server_control.ServerControl`'s. The rules
are :mod:`paceline.protocol`'s; the tables and their kernels do the arithmetic.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from paceline.errors import ProtocolError, UsageError
from paceline.protocol import (
    NUM_BUCKETS,
    Consistency,
    DelayCompensate,
    Delivery,
    DropStale,
    StalePolicy,
    delivery,
)
from paceline.ps import messages
from paceline.ps.gatekeeper import Gatekeeper, HeldRead, name_of
from paceline.ps.messages import ACK, CALL, DROPPED, PULL, PUSH, PUSH_PULL, RANGE, TICK, TICKS, VALUES
from paceline.ps.server_control import ServerControl, Traffic
from paceline.ps.server_tables import ServerTable, ServerTables
from paceline.ps.sparse_store import Floats
from paceline.ps.staleness import DelayCompensation
from paceline.ps.tables import Selection, check_finite
from paceline.transport import HEADER, HEADER_BYTES, MAGIC, PROTOCOL_VERSION, Handler, Header, Limits, Peer, padded

_HEADER_FLOATS = HEADER_BYTES // 4
_MAX_ANSWER_BYTES = Limits().max_frame_bytes
_DROPPED_KEPT = 256  # as many pushes as a client has in flight at most


class Server(Handler):
    """The tables of one server and the gate in front of them.

    Arguments: `rank` of the server; `consistency` and `stale`, the cluster's; `expected_workers`, how many must have
    joined before the first iteration can complete.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        consistency: Consistency,
        stale: StalePolicy | None = None,
        expected_workers: int = 1,
    ) -> None:
        self._tables = ServerTables(rank)
        self._gatekeeper = Gatekeeper(self._tables, consistency, expected_workers, self._answer_held)
        self._gate = self._gatekeeper.gate
        self._counted = self._gatekeeper.counted
        self._ranks = self._gatekeeper.ranks
        self._buffer = self._gatekeeper.buffer
        self._traffic = Traffic()
        self._delivery = Delivery(range(NUM_BUCKETS))
        self._on_map: set[int] = set()
        self._epoch = -1
        self._replies: dict[Peer, np.ndarray[Any, np.dtype[np.float32]]] = {}
        self._drop_beyond: int | None = None
        self._dropped: dict[int, deque[int]] = {}  # worker → its last pushes that were dropped
        self._compensation: DelayCompensation | None = None
        if isinstance(stale, DropStale):
            self._drop_beyond = stale.beyond
        if isinstance(stale, DelayCompensate):
            self._compensation = DelayCompensation(stale.strength)
        control = ServerControl(self._tables, self._gatekeeper, self._traffic)
        self._kinds = {PULL: self._pull, PUSH: self._push, PUSH_PULL: self._push, TICK: self._tick, CALL: control.call}

    @property
    def rank(self) -> int:
        """The server's rank; the scheduler's welcome tells it."""
        return self._tables.rank

    @rank.setter
    def rank(self, rank: int) -> None:
        self._tables.rank = rank

    # What the transport and the scheduler's link tell.

    def connected(self, peer: Peer) -> None:
        """See :meth:`Handler.connected`."""
        self._traffic.connected(peer)

    def disconnected(self, peer: Peer, reason: Exception | None) -> None:
        """See :meth:`Handler.disconnected`. A cut is not a death: who is dead, the scheduler says."""
        self._replies.pop(peer, None)
        self._traffic.disconnected(peer)
        self._gatekeeper.disconnected(peer)

    def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        """See :meth:`Handler.frame_received`."""
        handle = self._kinds.get(header.kind)
        if handle is None:
            raise ProtocolError(
                f"server {self.rank} knows no frame of kind {header.kind}; is the peer of this version?"
            )
        handle(peer, header, meta, body)

    def members_changed(self, cluster: messages.ClusterMap) -> None:
        """Take the scheduler's new map: workers that are on it no more have left or are dead."""
        if cluster.epoch < self._epoch:
            return  # overtaken by a newer one: a newcomer that is not on it has not left
        self._epoch = cluster.epoch
        there = {member.incarnation for member in cluster.members}
        for gone in self._on_map - there:
            self.worker_left(gone)
        self._on_map = {member.incarnation for member in cluster.members if member.role == "worker"}

    def worker_left(self, incarnation: int) -> None:
        """Stop counting a worker that left or is dead; what it pushed for an unfinished iteration is dropped."""
        self._delivery.forget(incarnation)
        if not self._gatekeeper.leave(incarnation):
            return
        self._dropped.pop(incarnation, None)
        for table in self._tables.by_number.values():
            table.staleness.forget(incarnation)
        if self._compensation is not None:
            self._compensation.forget(incarnation)

    def close(self) -> None:
        """Stop the timer."""
        self._gatekeeper.close()

    # Data frames.

    def _pull(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        table = self._tables.find(header.table)
        if header.flags & RANGE:
            selection = _range(table, body)
            if len(body) != 16:
                raise ProtocolError(f"a range pull has a body of 16 bytes, {len(body)} were got")
        else:
            if len(body) & 7:
                raise ProtocolError(f"a pull's body is keys of 8 bytes each, {len(body)} bytes were got")
            selection = Selection(np.frombuffer(body, np.uint64))
        self._read(peer, header, table, selection, header.clock, 0)

    def _read(
        self, peer: Peer, header: Header, table: ServerTable, selection: Selection, clock: int, flags: int
    ) -> None:
        """Answer with values as of iteration `clock`, now or when the gate opens."""
        worker = peer.hello.incarnation
        if worker not in self._counted:
            self._gatekeeper.check_member(peer)
        elif not self._gate.is_open(clock):
            table.part.num_values(selection)  # what is wrong with it is said now, and to the one who asked
            self._gatekeeper.hold(peer, header, selection, clock, flags)
            return
        self._answer(peer, header, table, selection, clock, flags)

    def _answer_held(self, held: HeldRead) -> None:
        table = self._tables.find(held.header.table)
        self._answer(held.peer, held.header, table, held.selection, held.clock, held.flags)

    def _answer(
        self, peer: Peer, header: Header, table: ServerTable, selection: Selection, clock: int, flags: int
    ) -> None:
        count = table.part.num_values(selection)
        size = HEADER_BYTES + padded(4 * count)
        reply = self._replies.get(peer)
        if reply is None or reply.nbytes < size or peer.write_backlog_bytes:
            if size > _MAX_ANSWER_BYTES:
                raise UsageError(
                    f"{count} values of table {table.spec.name!r} were asked for at once, which take {size} bytes: at "
                    f"most {_MAX_ANSWER_BYTES} go into one answer; ask for fewer keys at a time"
                )
            reply = self._replies[peer] = np.empty(max(size, 4096) // 4, np.float32)
        values = reply[_HEADER_FLOATS : _HEADER_FLOATS + count]
        table.part.pull(selection, values)
        table.pulls += 1
        worker = peer.hello.incarnation
        if worker in self._counted:
            table.staleness.pulled(worker, clock)
            if self._compensation is not None:
                self._compensation.pulled(worker, header.table, clock, selection, values)
        frame = memoryview(reply).cast("B")  # type: ignore[arg-type]
        HEADER.pack_into(
            frame, 0, MAGIC, PROTOCOL_VERSION, VALUES, flags, header.table, header.request, header.epoch, clock,
            header.sequence, 0, 4 * count,
        )  # fmt: skip
        peer.send(frame[:size])

    def _push(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        table, flags, worker = self._tables.find(header.table), 0, peer.hello.incarnation
        selection, grads = self._split_push(table, header, body)
        check_finite(grads, name_of(peer), table.spec.name)
        if type(self._delivery.admit(worker, header.sequence)) is not delivery.Duplicate:
            flags = self._apply(worker, header, table, selection, grads)
        else:
            flags = self._flags_of_duplicate(peer, header)
        clock = header.clock
        if header.flags & TICKS:
            clock += 1
            self._gatekeeper.tick(worker, clock)
        if header.kind == PUSH:
            self._acknowledge(peer, header, flags)
        else:
            self._read(peer, header, table, selection, clock, flags)

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

    def _apply(self, worker: int, header: Header, table: ServerTable, selection: Selection, grads: Floats) -> int:
        """Apply a new push, or keep it for the end of its iteration; return the flags of the answer."""
        table.pushes += 1
        in_iterations = worker in self._counted
        if self._buffer is not None and in_iterations:
            self._buffer.add(header.clock, worker, self._ranks[worker], header.table, selection, grads)
            return 0
        if in_iterations:
            staleness = table.staleness.observe(worker, header.clock)
            if self._drop_beyond is not None and staleness > self._drop_beyond:
                table.dropped += 1
                self._dropped.setdefault(worker, deque(maxlen=_DROPPED_KEPT)).append(header.sequence)
                return DROPPED
            if self._compensation is not None and staleness:
                grads = self._compensation.compensate(worker, header.table, header.clock, table.part, selection, grads)
        table.part.push(selection, grads)
        table.staleness.applied(worker, header.clock)
        return 0

    def _flags_of_duplicate(self, peer: Peer, header: Header) -> int:
        """Return the flags of the answer to a push that was applied, or dropped, when it came first."""
        self._gatekeeper.check_member(peer)
        return DROPPED if header.sequence in self._dropped.get(peer.hello.incarnation, ()) else 0

    def _tick(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        self._gatekeeper.tick(peer.hello.incarnation, header.clock + 1)
        self._acknowledge(peer, header, 0)

    def _acknowledge(self, peer: Peer, header: Header, flags: int) -> None:
        peer.send(
            HEADER.pack(
                MAGIC, PROTOCOL_VERSION, ACK, flags, header.table, header.request, header.epoch, header.clock,
                header.sequence, 0, 0,
            )
        )  # fmt: skip


def _range(table: ServerTable, body: memoryview) -> Selection:
    if table.spec.kind != "dense" or len(body) < 16:
        raise ProtocolError(
            f"a request for a range of table {table.spec.name!r} ({table.spec}) has a body of {len(body)} bytes: a "
            "range is two numbers of 8 bytes, and of a dense table"
        )
    start, stop = np.frombuffer(body, np.uint64, 2).tolist()
    if not start <= stop <= table.spec.size:
        raise UsageError(
            f"range [{start}, {stop}) of dense table {table.spec.name!r}: expected one within [0, {table.spec.size})"
        )
    return Selection(None, start, stop)
