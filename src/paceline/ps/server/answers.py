"""The answers of a server: values, acknowledgements and rejections."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.errors import DeadlineError, NonFiniteError, NoRoomError, PeerError, StaleEpochError, UsageError
from paceline.filters.base import Bytes
from paceline.protocol import Sequential, ServerCore
from paceline.protocol.buckets import Buckets
from paceline.protocol.server import events
from paceline.ps import messages
from paceline.ps.messages import ACK, FILTERED, FORWARDED, RESULT, VALUES
from paceline.ps.server.filtered import PeerFilters
from paceline.ps.server.pushes import ChainPush, payload_of
from paceline.ps.server.stale_gradients import StaleGradients
from paceline.tables.memory.blocks import SpillError
from paceline.tables.part import Selection
from paceline.tables.server_tables import ServerTable, ServerTables
from paceline.transport import HEADER, HEADER_BYTES, MAGIC, PROTOCOL_VERSION, Header, Limits, Peer, frame_parts, padded
from paceline.transport.frames import Buffer

_MAX_TIMEOUT_MS = 30 * 24 * 3600 * 1000
_HEADER_FLOATS = HEADER_BYTES // 4
_MAX_ANSWER_BYTES = Limits().max_frame_bytes


class BlockedRead:
    """A waiting read. This object is the token of a :class:`paceline.protocol.server.events.Read`."""

    __slots__ = ("clock", "flags", "header", "peer", "selection")

    def __init__(self, peer: Peer, header: Header, selection: Selection, clock: int, flags: int) -> None:
        self.peer = peer
        self.header = header
        self.selection = selection
        self.clock = clock
        self.flags = flags


class Answers:
    """The answers of one server."""

    def __init__(
        self, tables: ServerTables, core: ServerCore, stale: StaleGradients, min_replicas: int, filters: PeerFilters
    ) -> None:
        self._filters = filters
        self._tables = tables
        self._core = core
        self._stale = stale
        self._min_replicas = min_replicas
        self._is_sequential = isinstance(core.consistency, Sequential)
        self._replies: dict[Peer, np.ndarray[Any, np.dtype[np.float32]]] = {}

    def disconnected(self, peer: Peer) -> None:
        self._replies.pop(peer, None)

    def values(
        self, peer: Peer, header: Header, table: ServerTable, selection: Selection, clock: int, flags: int
    ) -> None:
        if table.refused and (refusal := table.refused.pop(peer.hello.incarnation, None)):
            raise NonFiniteError(refusal)
        count = table.part.num_values(selection)
        size = HEADER_BYTES + padded(4 * count)
        reply = self._replies.get(peer)
        if reply is None or reply.nbytes < size or peer.write_backlog_bytes:
            if size > _MAX_ANSWER_BYTES:
                raise UsageError(
                    f"a pull of {count} values of table {table.spec.name!r} needs {size} bytes: an answer has at most "
                    f"{_MAX_ANSWER_BYTES}; pull fewer keys at a time"
                )
            reply = self._replies[peer] = np.empty(max(size, 4096) // 4, np.float32)
        values = reply[_HEADER_FLOATS : _HEADER_FLOATS + count]
        table.part.pull(selection, values)
        table.pulls += 1
        worker = peer.hello.incarnation
        if self._core.takes_part(worker):
            self._stale.pulled(worker, header, table, clock, selection, values)
        if header.flags & FILTERED and (body := self._filters.encode(peer, header, values)) is not None:
            peer.send(*self._frame(VALUES, flags | FILTERED, header, clock, body))
            return
        frame = memoryview(reply).cast("B")  # type: ignore[arg-type]
        HEADER.pack_into(
            frame, 0, MAGIC, PROTOCOL_VERSION, VALUES, flags, header.table, header.request, header.epoch,
            self._clock(clock), header.sequence, 0, 4 * count,
        )  # fmt: skip
        peer.send(frame[:size])

    def _frame(self, kind: int, flags: int, header: Header, clock: int, body: Bytes) -> list[Buffer]:
        return frame_parts(
            kind,
            flags=flags,
            table=header.table,
            request=header.request,
            epoch=header.epoch,
            clock=self._clock(clock),
            sequence=header.sequence,
            body=body,
        )

    def acknowledge(self, peer: Peer, header: Header, flags: int) -> None:
        peer.send(
            HEADER.pack(
                MAGIC, PROTOCOL_VERSION, ACK, flags, header.table, header.request, header.epoch,
                self._core.durable if self._is_sequential else header.clock, header.sequence, 0, 0,
            )
        )  # fmt: skip

    def forwarded(self, peer: Peer, header: Header) -> None:
        """Acknowledge a forwarded push to the predecessor, because this server and its successors have the push."""
        peer.send(HEADER.pack(MAGIC, PROTOCOL_VERSION, FORWARDED, 0, 0, header.request, 0, 0, 0, 0, 0))

    def _clock(self, clock: int) -> int:
        """Return the clock of an answer: under sequential consistency, the number of durable iterations."""
        return self._core.durable if self._is_sequential else clock

    def joined(self, instruction: events.ConfirmJoin) -> None:
        peer, header = _call(instruction.token)
        peer.send(*frame_parts(RESULT, request=header.request, meta=messages.encode(instruction.clock)))

    def refuse(self, token: Any) -> None:
        """Reject a request, so that the client retries in the newer view. Forwarded pushes get no answer."""
        if not isinstance(token, ChainPush | BlockedRead) or token.peer is None or token.header is None:
            return
        if token.peer.hello.role != "server":
            token.peer.send_error(token.header, self.stale())

    def expel(self, instruction: events.RejectExpelled) -> None:
        token = instruction.token
        peer, header = (token.peer, token.header) if isinstance(token, ChainPush | BlockedRead) else _call(token)
        assert peer is not None
        assert header is not None
        peer.send_error(header, self.expelled(peer))

    def deadline_passed(self, instruction: events.DeadlinePassed) -> None:
        token = instruction.token
        if isinstance(token, BlockedRead):
            token.peer.send_error(token.header, self.late_read(token))
            return
        push = payload_of(token)
        if push.peer is not None and push.header is not None:
            push.peer.send_error(push.header, self.late_push(push, push.peer))

    def check_member(self, peer: Peer) -> None:
        if self._core.is_excluded(peer.hello.incarnation):
            raise self.expelled(peer)

    def expelled(self, peer: Peer) -> PeerError:
        incarnation, rank = peer.hello.incarnation, self._tables.rank
        if incarnation < 1:
            return PeerError(
                f"{name_of(peer)} is not a member of the cluster (incarnation {incarnation}): server {rank} rejects "
                "its requests; connect to the scheduler first"
            )
        return PeerError(
            f"{name_of(peer)} (incarnation {incarnation}) left the cluster or was declared dead: server {rank} rejects "
            "its requests; connect again"
        )

    def stale(self) -> StaleEpochError:
        return StaleEpochError(
            f"the view of the cluster has changed (server {self._tables.rank} has version "
            f"{self._core.version}): the request was rejected; retry it in the new view"
        )

    def no_memory(self, error: MemoryError) -> NoRoomError:
        rank = self._tables.rank
        if isinstance(error, SpillError):
            return NoRoomError(
                f"server {rank} has no room for this request: {error}. It was rejected without changes: free disk "
                "space, choose another folder with --spill-dir, or start more servers"
            )
        return NoRoomError(
            f"server {rank} has no memory for this request. It was rejected without changes: send smaller requests, or "
            "start more servers"
        )

    def late_read(self, read: BlockedRead) -> DeadlineError:
        core = self._core
        ranks, missing, by_chain = core.wait_reasons(read.clock)
        late = [f"worker {rank}" for rank in ranks]
        if by_chain:
            shortage = self.shortage(core.primary)
            late.append(f"enough replicas ({shortage})" if shortage else "its replicas")
        if missing:
            late.append(f"{missing} {'worker that has' if missing == 1 else 'workers that have'} not joined yet")
        return DeadlineError(
            f"{name_of(read.peer)} waited {timeout_s(read.peer):g} s to begin iteration {read.clock} under "
            f"{core.consistency} consistency: server {self._tables.rank} still waits for {' and '.join(late)}"
        )

    def late_push(self, push: ChainPush, peer: Peer) -> DeadlineError:
        """Return the error for a push that too few replicas have (compare Kafka's ``min.insync.replicas``)."""
        table = self._tables.find(push.pieces[0].table).spec.name
        return DeadlineError(
            f"{name_of(peer)} waited {timeout_s(peer):g} s for the acknowledgement of a push to table {table!r}: "
            f"{self.shortage(push.buckets)}. The push is applied, but lost if server {self._tables.rank} fails before "
            "it has enough replicas"
        )

    def shortage(self, buckets: Buckets) -> str:
        """Return a message about a bucket with too few replicas for acknowledgements; empty without such a bucket."""
        found = self._core.shortage(buckets)
        if found is None:
            return ""
        bucket, count = found
        has = {0: "no replica", 1: "1 replica"}.get(count, f"{count} replicas")
        return f"bucket {bucket} has {has}, and the cluster acknowledges with {self._min_replicas} (--min-replicas)"


def _call(token: Any) -> tuple[Peer, Header]:
    assert isinstance(token, tuple)
    return token[0], token[1]


def name_of(peer: Peer) -> str:
    return f"{peer.hello.role} {peer.hello.rank}"


def timeout_s(peer: Peer) -> float:
    """Return the time for which a peer waits for an answer: the time in the peer's Hello, or else a minute."""
    timeout_ms = peer.hello.extra.get("timeout_ms")
    return min(max(timeout_ms, 0), _MAX_TIMEOUT_MS) / 1000.0 if isinstance(timeout_ms, int) else 60.0
