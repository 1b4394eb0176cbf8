"""The control calls of a server: creating, reading, writing and describing tables.

A call is a CALL frame with a message of :mod:`paceline.ps.messages`; the answer is a RESULT frame.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import psutil

from paceline.errors import ProtocolError, StaleEpochError, TableMismatchError, UsageError
from paceline.protocol.buckets import Buckets
from paceline.protocol.replication import CALLS
from paceline.ps import messages, snapshot_messages
from paceline.ps.messages import RESULT, TableStatistics
from paceline.ps.server.answers import name_of
from paceline.ps.server.filtered import check
from paceline.ps.server.pushes import ERASURE, RECORDS, ChainPush
from paceline.ps.server.runtime import Runtime
from paceline.ps.server.snapshots import ServerSnapshots
from paceline.tables.non_finite import NonFinite
from paceline.tables.part import Selection
from paceline.tables.server_tables import Piece
from paceline.tables.sparse_part import SparsePart
from paceline.transport import Header, Peer, frame_parts

_CHANGES = (
    messages.WriteRecords,
    messages.Erase,
    messages.EraseUnseen,
    messages.BeginPass,
    messages.SetUpdate,
    snapshot_messages.LoadParts,
)
"""Calls that change state: a server rejects such calls from members that left or died, and applies each call once."""


class Traffic:
    """Counts the bytes sent and received on all connections of a server, including closed connections."""

    def __init__(self) -> None:
        self._peers: set[Peer] = set()
        self._bytes_in = self._bytes_out = 0

    def connected(self, peer: Peer) -> None:
        self._peers.add(peer)

    def disconnected(self, peer: Peer) -> None:
        self._peers.discard(peer)
        statistics = peer.statistics()
        self._bytes_in += statistics.bytes_received
        self._bytes_out += statistics.bytes_sent

    def totals(self) -> tuple[int, int]:
        counters = [peer.statistics() for peer in self._peers]
        bytes_in = self._bytes_in + sum(counter.bytes_received for counter in counters)
        return bytes_in, self._bytes_out + sum(counter.bytes_sent for counter in counters)


class ServerControl:
    """Answers the control calls to one server."""

    def __init__(self, runtime: Runtime, traffic: Traffic, non_finite: NonFinite, snapshots: ServerSnapshots) -> None:
        self._core = runtime.core
        self._tables = runtime.tables
        self._answers = runtime.answers
        self._replicator = runtime.replicator
        self._traffic = traffic
        self._non_finite = non_finite
        self._last_changes: dict[int, int] = {}  # incarnation → number of its last call in _CHANGES
        self._calls: dict[type, Any] = {
            messages.CheckFilters: self._check_filters,
            messages.CreateTable: self._create_table,
            messages.ReadBucket: self._read_bucket,
            messages.SetUpdate: self._set_update,
            messages.BeginPass: self._begin_pass,
            messages.GetStatistics: self._get_statistics,
            **snapshots.calls,
        }

    def call(self, peer: Peer, header: Header, request: Any) -> None:
        is_change = isinstance(request, _CHANGES)
        if is_change:
            self._check_change(peer, header)
        is_repeat = is_change and header.sequence <= self._last_changes.get(peer.hello.incarnation, 0)
        result = None if is_repeat else self._calls[type(request)](request)
        if is_change and not is_repeat:  # a late repeat must not lower the number
            self._last_changes[peer.hello.incarnation] = header.sequence
        answer, parts = result if isinstance(result, tuple) else (result, ())
        peer.send(*frame_parts(RESULT, request=header.request, meta=messages.encode(answer), body=parts))

    def _check_change(self, peer: Peer, header: Header) -> None:
        self._answers.check_member(peer)
        if not header.sequence:
            raise ProtocolError(f"a call of {name_of(peer)} that changes state has the number 0: expected 1 or more")

    def _check_filters(self, request: messages.CheckFilters) -> None:
        try:
            check(request.filters)
        except UsageError as error:
            raise UsageError(f"server {self._tables.rank} does not support these filters: {error}") from None

    def _create_table(self, request: messages.CreateTable) -> None:
        known = request.table
        table = self._tables.by_number.get(known.number)
        if table is None:
            table = self._tables.by_number[known.number] = self._replicator.new_table(known.declared)
        elif known.declared != table.declared:
            raise TableMismatchError(
                f"server {self._tables.rank} already has {table.declared} as table {known.number}, not "
                f"{known.declared}: the declarations come from different schedulers; connect again"
            )
        elif known.revision <= table.revision:
            return
        self._replicator.set_update(known.number, known.spec.update, known.revision)

    def _read_bucket(self, request: messages.ReadBucket) -> tuple[int, tuple[np.ndarray[Any, Any], ...]]:
        self._check_led(1 << request.bucket)
        keys, records = self._tables.find(request.table).part.read_bucket(request.bucket)
        return len(keys), (keys, records)

    def _check_led(self, buckets: Buckets) -> None:
        if buckets & ~self._core.primary:
            raise StaleEpochError(
                f"server {self._tables.rank} does not lead all buckets of the request: retry it in the new view"
            )

    def write_or_erase(
        self, peer: Peer, header: Header, request: messages.WriteRecords | messages.Erase, body: memoryview
    ) -> ChainPush:
        """Return the push that writes or erases records here and on the successors.

        The answer waits for all successors.
        """
        self._check_change(peer, header)
        table = self._tables.find(request.table)
        part = table.part
        if isinstance(request, messages.WriteRecords):
            operation, rows = RECORDS, request.rows
            if len(body) != rows * (8 + 4 * part.record_words):
                raise ProtocolError(
                    f"{rows} records of table {part.spec.name!r} ({part.spec}) have {len(body)} bytes: expected 8 and "
                    f"4 * {part.record_words} for each"
                )
        else:
            operation, rows = ERASURE, len(body) // 8
            if len(body) & 7:
                raise ProtocolError(f"keys to erase have 8 bytes each, got {len(body)} bytes")
            if part.spec.kind == "dense":
                part.erase(np.empty(0, np.uint64))  # raises UsageError
        selection = Selection(np.frombuffer(body, np.uint64, rows).copy())
        buckets = part.buckets_of(selection)
        self._check_led(buckets)  # check before any change, because the client resends a call that was rejected
        part.num_values(selection)
        floats = np.frombuffer(body, np.float32, offset=8 * rows).copy()
        if operation == RECORDS:
            keys = selection.key_array()
            source = f"a write of {name_of(peer)} to server {self._tables.rank}"
            self._non_finite.check_records(table, keys, floats.reshape(rows, part.record_words), source)
            part.reserve(selection)
        return _push_of_call(operation, [Piece(request.table, selection, floats)], buckets, peer, header)

    def erase_unseen(self, peer: Peer, header: Header, request: messages.EraseUnseen) -> ChainPush:
        """Return the push that erases a bucket's unseen rows here and on the successors, even if no rows are unseen.

        The push stores the number of the call, so that a repeat in a later pass erases nothing.
        """
        self._check_change(peer, header)
        self._check_led(1 << request.bucket)
        for number in request.also:
            self._sparse_part(number)  # raises UsageError for a dense table
        keys = self._sparse_part(request.table).unseen_keys(request.bucket, request.passes).copy()
        if not self._core.push(peer.hello.incarnation | CALLS, header.sequence, 0, 1 << request.bucket).fresh:
            keys = keys[:0]  # a repeat erases nothing, but its answer waits for the successors
        numbers = (request.table, *(number for number in request.also if number != request.table))
        pieces = [Piece(number, Selection(keys), np.empty(0, np.float32)) for number in numbers]
        return _push_of_call(ERASURE, pieces, 1 << request.bucket, peer, header)

    def _begin_pass(self, request: messages.BeginPass) -> None:
        self._sparse_part(request.table).begin_pass(request.number, request.rows_of)
        self._replicator.tables_changed()  # notify the successors before they receive a bucket of this pass

    def _sparse_part(self, number: int) -> SparsePart:
        part = self._tables.find(number).part
        if part.spec.kind != "sparse":
            raise UsageError(f"table {part.spec.name!r} is dense: only rows of sparse tables have passes")
        return cast(SparsePart, part)  # a SparsePart, or its wrapper during a snapshot

    def _set_update(self, request: messages.SetUpdate) -> None:
        self._replicator.set_update(request.table, request.update, request.revision)

    def _get_statistics(self, request: messages.GetStatistics) -> messages.ServerStatistics:
        bytes_in, bytes_out = self._traffic.totals()
        return messages.ServerStatistics(
            tables={
                table.spec.name: TableStatistics(
                    rows=table.part.rows_in(table.part.primary),
                    num_bytes=table.part.num_bytes,
                    pushes=table.pushes,
                    pulls=table.pulls,
                    dropped=table.dropped,
                    non_finite=table.non_finite,
                    staleness=tuple(table.staleness.histogram),
                )
                for table in self._tables.by_number.values()
            },
            bytes_in=bytes_in,
            bytes_out=bytes_out,
            resident_bytes=psutil.Process().memory_info().rss,
            held=self._core.num_waiting,
            num_compared=self._replicator.checks.num_compared,
            num_unordered=self._replicator.checks.num_unordered,
            differences=self._replicator.checks.differences,
        )


def _push_of_call(operation: str, pieces: list[Piece], buckets: Buckets, peer: Peer, header: Header) -> ChainPush:
    return ChainPush(
        operation, peer.hello.incarnation | CALLS, header.sequence, pieces, peer, header, buckets=buckets, is_owned=True
    )
