"""A parameter server: frames in, tables updated, answers out. One asyncio loop, one thread, no locks.

Whom it talks to: workers' clients (data frames, and control by CALL), through a transport's :class:`Handler`; the
scheduler's news (who died) comes by :meth:`Server.worker_left`. The rules are :mod:`paceline.protocol`'s; the tables
and their kernels do the arithmetic.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

import msgspec
import numpy as np
import psutil

from paceline.errors import DeadlineError, PacelineError, PeerError, ProtocolError, UsageError
from paceline.protocol import (
    NUM_BUCKETS,
    Consistency,
    DelayCompensate,
    Delivery,
    DropStale,
    Gate,
    Sequential,
    StalePolicy,
    clocks,
    delivery,
    place,
)
from paceline.ps import messages
from paceline.ps.aggregation import IterationBuffer, apply_sum
from paceline.ps.messages import (
    ACK,
    CALL,
    DROPPED,
    PULL,
    PUSH,
    PUSH_PULL,
    RANGE,
    RESULT,
    TICK,
    TICKS,
    VALUES,
    TableSpec,
    TableStatistics,
)
from paceline.ps.rules import RULES, from_fields
from paceline.ps.sparse_store import Floats
from paceline.ps.staleness import DelayCompensation, StalenessRecord
from paceline.ps.tables import Selection, TablePart, make_part
from paceline.transport import HEADER, HEADER_BYTES, MAGIC, PROTOCOL_VERSION, Handler, Header, Limits, Peer, padded

_EXPIRY_PERIOD_S = 0.25
_HEADER_FLOATS = HEADER_BYTES // 4
_MAX_ANSWER_BYTES = Limits().max_frame_bytes
_DROPPED_KEPT = 256  # as many pushes as a client has in flight at most


class _Table:
    """A table's part, and what happened to it here."""

    __slots__ = ("dropped", "part", "pulls", "pushes", "spec", "staleness")

    def __init__(self, spec: TableSpec, part: TablePart) -> None:
        self.spec = spec
        self.part = part
        self.staleness = StalenessRecord()
        self.pushes = self.pulls = self.dropped = 0


class _Held:
    """A read that waits at the gate."""

    __slots__ = ("clock", "deadline", "expired", "flags", "header", "peer", "selection")

    def __init__(
        self, peer: Peer, header: Header, selection: Selection, clock: int, flags: int, deadline: float
    ) -> None:
        self.peer = peer
        self.header = header
        self.selection = selection
        self.clock = clock
        self.flags = flags
        self.deadline = deadline
        self.expired = False


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
        self.rank = rank
        self._gate = Gate(consistency, expected_workers)
        self._delivery = Delivery(range(NUM_BUCKETS))
        self._tables: dict[int, _Table] = {}
        self._ranks: dict[int, int] = {}  # incarnation → rank of workers that have joined the iterations
        self._counted: set[int] = set()  # those of them that take part now
        self._gone: set[int] = set()  # incarnations that left or are dead: they never come back
        self._on_map: set[int] = set()
        self._epoch = -1
        self._peers: set[Peer] = set()
        self._held: set[_Held] = set()
        self._replies: dict[Peer, np.ndarray[Any, np.dtype[np.float32]]] = {}
        self._bytes_gone = [0, 0]
        self._buffer: IterationBuffer | None = None
        self._drop_beyond: int | None = None
        self._dropped: dict[int, deque[int]] = {}  # worker → its last pushes that were dropped
        self._compensation: DelayCompensation | None = None
        if isinstance(consistency, Sequential):
            self._buffer = IterationBuffer(consistency.aggregate == "mean")
        if isinstance(stale, DropStale):
            self._drop_beyond = stale.beyond
        if isinstance(stale, DelayCompensate):
            self._compensation = DelayCompensation(stale.strength)
        self._expiry: asyncio.TimerHandle | None = None
        self._kinds = {PULL: self._pull, PUSH: self._push, PUSH_PULL: self._push, TICK: self._tick, CALL: self._call}
        self._calls: dict[type, Any] = {
            messages.CreateTable: self._create_table,
            messages.JoinClock: self._join_clock,
            messages.Retire: self._retire,
            messages.ReadBucket: self._read_bucket,
            messages.WriteRecords: self._write_records,
            messages.SetUpdate: self._set_update,
            messages.Erase: self._erase,
            messages.GetStatistics: self._get_statistics,
        }

    # What the transport and the scheduler's link tell.

    def connected(self, peer: Peer) -> None:
        """See :meth:`Handler.connected`."""
        self._peers.add(peer)

    def disconnected(self, peer: Peer, reason: Exception | None) -> None:
        """See :meth:`Handler.disconnected`. A cut is not a death: who is dead, the scheduler says."""
        self._peers.discard(peer)
        self._replies.pop(peer, None)
        statistics = peer.statistics()
        self._bytes_gone[0] += statistics.bytes_received
        self._bytes_gone[1] += statistics.bytes_sent
        for held in [held for held in self._held if held.peer is peer]:
            held.expired = True
            self._held.discard(held)

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
        self._gone.add(incarnation)
        self._delivery.forget(incarnation)
        if incarnation not in self._ranks:
            return
        self._counted.discard(incarnation)
        self._dropped.pop(incarnation, None)
        if self._buffer is not None:
            self._buffer.forget(incarnation, self._gate.clocks.get(incarnation, 0))
        for held in [held for held in self._held if held.peer.hello.incarnation == incarnation]:
            held.expired = True
            self._held.discard(held)
            held.peer.send_error(held.header, self._not_a_member(held.peer))
        self._obey(self._gate.handle(clocks.Leave(incarnation)))
        del self._ranks[incarnation]
        for table in self._tables.values():
            table.staleness.forget(incarnation)
        if self._compensation is not None:
            self._compensation.forget(incarnation)

    def close(self) -> None:
        """Stop the timer."""
        if self._expiry is not None:
            self._expiry.cancel()

    # Data frames.

    def _table(self, number: int) -> _Table:
        table = self._tables.get(number)
        if table is None:
            raise UsageError(f"server {self.rank} has no table number {number}: declare it first")
        return table

    def _pull(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        table = self._table(header.table)
        if header.flags & RANGE:
            selection = _range(table, body)
            if len(body) != 16:
                raise ProtocolError(f"a range pull has a body of 16 bytes, {len(body)} were got")
        else:
            if len(body) & 7:
                raise ProtocolError(f"a pull's body is keys of 8 bytes each, {len(body)} bytes were got")
            selection = Selection(np.frombuffer(body, np.uint64))
        self._read(peer, header, table, selection, header.clock, 0)

    def _read(self, peer: Peer, header: Header, table: _Table, selection: Selection, clock: int, flags: int) -> None:
        """Answer with values as of iteration `clock`, now or when the gate opens."""
        worker = peer.hello.incarnation
        if worker not in self._counted:
            self._check_member(peer)
        elif not self._gate.is_open(clock):
            self._hold(peer, header, table, selection, clock, flags)
            return
        self._answer(peer, header, table, selection, clock, flags)

    def _hold(self, peer: Peer, header: Header, table: _Table, selection: Selection, clock: int, flags: int) -> None:
        table.part.num_values(selection)  # what is wrong with it is said now, and to the one who asked
        worker = peer.hello.incarnation
        held = _Held(peer, header, selection.copy(), clock, flags, time.monotonic() + _timeout_s(peer))
        self._held.add(held)
        self._obey(self._gate.handle(clocks.Ask(worker, clock, held)))
        if self._expiry is None:
            self._expiry = asyncio.get_running_loop().call_later(_EXPIRY_PERIOD_S, self._expire)

    def _answer(self, peer: Peer, header: Header, table: _Table, selection: Selection, clock: int, flags: int) -> None:
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
        table, flags, worker = self._table(header.table), 0, peer.hello.incarnation
        selection, grads = self._split_push(table, header, body)
        table.part.check_finite(grads, _name(peer))
        if type(self._delivery.admit(worker, header.sequence)) is not delivery.Duplicate:
            flags = self._apply(worker, header, table, selection, grads)
        else:
            flags = self._flags_of_duplicate(peer, header)
        clock = header.clock
        if header.flags & TICKS:
            clock += 1
            self._ticked(worker, clock)
        if header.kind == PUSH:
            self._acknowledge(peer, header, flags)
        else:
            self._read(peer, header, table, selection, clock, flags)

    def _split_push(self, table: _Table, header: Header, body: memoryview) -> tuple[Selection, Floats]:
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

    def _apply(self, worker: int, header: Header, table: _Table, selection: Selection, grads: Floats) -> int:
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
        self._check_member(peer)
        return DROPPED if header.sequence in self._dropped.get(peer.hello.incarnation, ()) else 0

    def _check_member(self, peer: Peer) -> None:
        if peer.hello.incarnation in self._gone:
            raise self._not_a_member(peer)

    def _not_a_member(self, peer: Peer) -> PeerError:
        return PeerError(
            f"{_name(peer)} (incarnation {peer.hello.incarnation}) left the cluster or was declared dead: server "
            f"{self.rank} takes nothing more from it; connect again"
        )

    def _tick(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        self._ticked(peer.hello.incarnation, header.clock + 1)
        self._acknowledge(peer, header, 0)

    def _acknowledge(self, peer: Peer, header: Header, flags: int) -> None:
        peer.send(
            HEADER.pack(
                MAGIC, PROTOCOL_VERSION, ACK, flags, header.table, header.request, header.epoch, header.clock,
                header.sequence, 0, 0,
            )
        )  # fmt: skip

    # The gate.

    def _ticked(self, worker: int, clock: int) -> None:
        if worker in self._counted:
            self._obey(self._gate.handle(clocks.Tick(worker, clock)))

    def _obey(self, instructions: list[Any]) -> None:
        for instruction in instructions:
            if isinstance(instruction, clocks.Complete):
                self._complete(instruction)
            elif isinstance(instruction, clocks.Release):
                held = instruction.ticket
                assert isinstance(held, _Held)
                if not held.expired:
                    self._release(held)

    def _release(self, held: _Held) -> None:
        self._held.discard(held)
        try:
            table = self._table(held.header.table)
            self._answer(held.peer, held.header, table, held.selection, held.clock, held.flags)
        except Exception as error:  # its own: the one whose tick has opened the gate has nothing to do with it
            held.peer.send_error(held.header, error)

    def _complete(self, instruction: clocks.Complete) -> None:
        assert self._buffer is not None
        tables, factor = self._buffer.complete(instruction.iteration, instruction.workers)
        for number, pushes in sorted(tables.items()):
            table = self._tables[number]
            table.staleness.histogram[0] += len(pushes)  # by construction: nothing was applied since it began
            apply_sum(table.part, pushes, factor)

    def _expire(self) -> None:
        """Answer held reads whose deadline has passed with the reason."""
        self._expiry = None
        now = time.monotonic()
        for held in [held for held in self._held if held.deadline <= now]:
            held.expired = True
            self._held.discard(held)
            late = [f"worker {self._ranks.get(worker, worker)}" for worker in self._gate.lagging(held.clock)]
            missing = self._gate.num_missing
            if missing:
                late.append(f"{missing} {'worker that has' if missing == 1 else 'workers that have'} not joined yet")
            held.peer.send_error(
                held.header,
                DeadlineError(
                    f"{_name(held.peer)} waited {_timeout_s(held.peer):g} s to begin iteration {held.clock} under "
                    f"{self._gate.consistency} consistency: server {self.rank} still awaits {' and '.join(late)}"
                ),
            )
        if self._held:
            self._expiry = asyncio.get_running_loop().call_later(_EXPIRY_PERIOD_S, self._expire)

    # Control.

    def _call(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        try:
            request = messages.decode_to_server(meta)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"server {self.rank} got a control message that it cannot read: {error}") from None
        result = self._calls[type(request)](peer, request, body)
        answer, parts = result if isinstance(result, tuple) else (result, ())
        peer.send_frame(RESULT, request=header.request, meta=messages.encode(answer), body=parts)

    def _create_table(self, peer: Peer, request: messages.CreateTable, body: memoryview) -> None:
        table = self._tables.get(request.number)
        if table is not None:
            if table.spec != request.spec:
                raise PacelineError(
                    f"server {self.rank} holds {table.spec} as table {request.number}, not {request.spec}"
                )
            return
        owned = place(NUM_BUCKETS, request.servers).owned(self.rank) if request.spec.kind == "dense" else ()
        try:
            self._tables[request.number] = _Table(request.spec, make_part(request.spec, owned))
        except MemoryError:
            raise PeerError(f"server {self.rank} has no memory for its part of {request.spec}") from None

    def _join_clock(self, peer: Peer, request: messages.JoinClock, body: memoryview) -> int:
        self._check_member(peer)
        worker = peer.hello.incarnation
        self._ranks[worker] = request.rank
        self._counted.add(worker)
        self._obey(self._gate.handle(clocks.Resume(worker)))
        self._obey(self._gate.handle(clocks.Join(worker, request.clock)))
        return int(self._gate.clocks[worker])

    def _retire(self, peer: Peer, request: messages.Retire, body: memoryview) -> None:
        worker = peer.hello.incarnation
        if worker not in self._counted:
            return
        self._counted.discard(worker)
        if self._buffer is not None:
            self._buffer.forget(worker, self._gate.clocks[worker])
        self._obey(self._gate.handle(clocks.Finish(worker)))

    def _read_bucket(
        self, peer: Peer, request: messages.ReadBucket, body: memoryview
    ) -> tuple[int, tuple[np.ndarray[Any, Any], ...]]:
        if not 0 <= request.bucket < NUM_BUCKETS:
            raise UsageError(f"bucket {request.bucket}: they go from 0 to {NUM_BUCKETS - 1}")
        keys, records = self._table(request.table).part.read_bucket(request.bucket)
        return len(keys), (keys, records)

    def _write_records(self, peer: Peer, request: messages.WriteRecords, body: memoryview) -> None:
        part = self._table(request.table).part
        if request.rows < 0 or len(body) != request.rows * (8 + 4 * part.record_words):
            raise ProtocolError(
                f"{request.rows} records of table {part.spec.name!r} ({part.spec}) came as {len(body)} bytes, expected "
                f"8 and 4 * {part.record_words} for each"
            )
        keys = np.frombuffer(body, np.uint64, request.rows)
        part.write_records(keys, np.frombuffer(body, np.float32, offset=8 * request.rows))

    def _set_update(self, peer: Peer, request: messages.SetUpdate, body: memoryview) -> None:
        self._table(request.table).part.set_update(from_fields(RULES, request.update))

    def _erase(self, peer: Peer, request: messages.Erase, body: memoryview) -> int:
        if len(body) & 7:
            raise ProtocolError(f"keys to erase are 8 bytes each, {len(body)} bytes were got")
        return self._table(request.table).part.erase(np.frombuffer(body, np.uint64))

    def _get_statistics(
        self, peer: Peer, request: messages.GetStatistics, body: memoryview
    ) -> messages.ServerStatistics:
        counters = [each.statistics() for each in self._peers]
        return messages.ServerStatistics(
            tables={
                table.spec.name: TableStatistics(
                    rows=table.part.num_rows,
                    num_bytes=table.part.num_bytes,
                    pushes=table.pushes,
                    pulls=table.pulls,
                    dropped=table.dropped,
                    staleness=tuple(table.staleness.histogram),
                )
                for table in self._tables.values()
            },
            bytes_in=self._bytes_gone[0] + sum(each.bytes_received for each in counters),
            bytes_out=self._bytes_gone[1] + sum(each.bytes_sent for each in counters),
            resident_bytes=psutil.Process().memory_info().rss,
            held=len(self._held),
        )


def _range(table: _Table, body: memoryview) -> Selection:
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


def _name(peer: Peer) -> str:
    return f"{peer.hello.role} {peer.hello.rank}"


def _timeout_s(peer: Peer) -> float:
    return int(peer.hello.extra.get("timeout_ms", 60_000)) / 1000.0
