"""Fills: sending complete buckets to successors, and loading buckets from the predecessor."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import numpy as np

from paceline.protocol import ServerCore
from paceline.protocol.buckets import to_bytes
from paceline.ps import messages
from paceline.ps.messages import STATE, STATE_TAKEN
from paceline.ps.server.pushes import ReceivedBucket, pack
from paceline.ps.server.replica_checks import ReplicaChecks
from paceline.ps.server.replicator import ChainLinks
from paceline.tables.non_finite import NonFinite
from paceline.tables.part import Selection
from paceline.tables.server_tables import Piece, ServerTables
from paceline.transport import Header, frame_parts

_FILL_PAUSE = 4.0  # the pause after a bucket, in units of the bucket's cost (see `taken`)
_SLOW_LINK = 12.5e6  # bytes per second: the slowest link on which fills leave room for other messages


@dataclass(slots=True)
class _Sent:
    number: int
    began_s: float
    size: int
    busy_s: float = 0.0


class FillTransfers:
    """The buckets that one server sends and receives."""

    def __init__(
        self,
        core: ServerCore,
        tables: ServerTables,
        links: ChainLinks | None,
        checks: ReplicaChecks,
        non_finite: NonFinite,
    ) -> None:
        self._core = core
        self._tables = tables
        self._links = links
        self._checks = checks
        self._non_finite = non_finite
        self._soon: set[int] = set()  # the servers for which the next bucket is scheduled
        self._sent: dict[int, _Sent] = {}  # server → the last bucket that was sent to this server

    def send_soon(self) -> None:
        for target in self._core.filling:
            if target not in self._soon:
                self._soon.add(target)
                asyncio.get_running_loop().call_soon(self.send_next, target)

    def send_next(self, target: int) -> None:
        self._soon.discard(target)
        peer = None if self._links is None else self._links.peer(target)
        if peer is None:
            return
        fill = self._core.next_fill(target)
        if fill is None:
            return
        began_s, busy_s = time.monotonic(), time.thread_time()
        number, bucket, state = fill
        pieces = []
        for table_number, table in self._tables.by_number.items():
            keys, records = table.part.read_bucket(bucket)
            if len(keys):
                records = table.part.with_passes(bucket, keys, records)
                pieces.append(Piece(table_number, Selection(keys), records.reshape(-1)))
        infos, body = pack(pieces)
        entries = tuple((incarnation, sequence, to_bytes(mask)) for incarnation, sequence, mask in state)
        info = messages.StateInfo(bucket, self._checks.orders.of(bucket), entries, infos)
        self._sent[target] = sent = _Sent(number, began_s, size=sum(part.nbytes for part in body))
        peer.send(*frame_parts(STATE, request=number, epoch=self._core.version, meta=messages.encode(info), body=body))
        sent.busy_s = time.thread_time() - busy_s

    def taken(self, target: int, header: Header) -> None:
        """Schedule the next bucket for a successor that has loaded the last bucket.

        The pause is four times the cost of the last bucket, so that other messages have time. The cost is the CPU time
        at both ends and the time on the link. Time in queues does not count, because it should not delay the fill.
        """
        sent = self._sent.get(target)
        if target not in self._soon:
            self._soon.add(target)
            took_s = 0.0
            if sent is not None and sent.number == header.request:
                passed_s = time.monotonic() - sent.began_s
                took_s = min(sent.busy_s + header.clock / 1e6 + sent.size / _SLOW_LINK, passed_s)
            asyncio.get_running_loop().call_later(_FILL_PAUSE * took_s, self.send_next, target)

    def load(self, received: ReceivedBucket, bucket: int) -> None:
        busy_s = time.thread_time()
        self._checks.load(bucket, received.order)
        pieces = {piece.table: piece for piece in received.pieces}
        for number, table in self._tables.by_number.items():
            piece = pieces.get(number)
            if piece is None:
                table.part.load_bucket(bucket, _NO_KEYS, _NO_FLOATS.reshape(0, table.part.record_words))
            else:
                keys = piece.selection.key_array()
                records = piece.floats.reshape(len(keys), -1)
                self._non_finite.count_received(table, keys, records, f"the fill of server {self._tables.rank}")
                table.part.load_with_passes(bucket, keys, records, table.part.rows_of)
        busy_us = int((time.thread_time() - busy_s) * 1e6)
        received.peer.send(*frame_parts(STATE_TAKEN, request=received.number, clock=busy_us))


_NO_KEYS = np.empty(0, np.uint64)
_NO_FLOATS = np.empty(0, np.float32)
