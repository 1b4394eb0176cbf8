"""Pushes on their way down a chain: their pieces in memory and on the wire."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct

from paceline.errors import ProtocolError, UsageError
from paceline.kernels.sparse import largest
from paceline.protocol.buckets import ALL, Buckets, from_bytes, to_bytes
from paceline.protocol.server.events import SumUp
from paceline.ps.messages import FORWARD, PieceInfo, TableSpec
from paceline.tables.part import Selection
from paceline.tables.server_tables import Piece, ServerTables
from paceline.transport import Header, Peer, padded

Frame: TypeAlias = tuple[Peer, Header, bytes, bytearray]
"""A postponed frame, with copies of its parts."""

GRADIENTS = "push"
RECORDS = "write"
ERASURE = "erase"
"""The operations of a ChainPush are GRADIENTS, RECORDS and ERASURE."""


class ChainPush(Struct, eq=False):
    """A push, write or erasure that the chain has not acknowledged; used as a token of the core."""

    operation: str
    incarnation: int
    sequence: int
    pieces: Sequence[Piece]
    peer: Peer | None = None
    """The receiver of the answer: a client or the predecessor; None for the sum of an iteration."""
    header: Header | None = None
    flags: int = 0
    requested: Selection | None = None
    """The keys whose values the client requests; None: the keys of the push's only piece."""
    buckets: Buckets = ALL
    """The buckets of the push's keys, or a larger set. No other buckets are searched for the keys."""
    is_owned: bool = False

    def own(self) -> None:
        """Copy the pieces, because the receive buffer that contains them will be reused. Idempotent."""
        if self.is_owned:
            return
        self.is_owned = True
        self.pieces = [Piece(piece.table, piece.selection.copy(), piece.floats.copy()) for piece in self.pieces]
        if self.requested is not None:
            self.requested = self.requested.copy()

    @property
    def num_bytes(self) -> int:
        size = 0
        for piece in self.pieces:
            keys = piece.selection.keys
            size += piece.floats.nbytes + (0 if keys is None else keys.nbytes)
        return size

    def part(self, tables: ServerTables, buckets: Buckets) -> Sequence[Piece]:
        if not self.buckets & ~buckets:
            return self.pieces
        pieces = (tables.restrict(piece, buckets) for piece in self.pieces)
        return [piece for piece in pieces if piece is not None]


class ReceivedBucket(Struct, eq=False):
    """A received bucket: the token of :class:`paceline.protocol.replication.StateReceived`."""

    peer: Peer
    number: int
    order: int
    pieces: list[Piece]


def payload_of(token: object) -> ChainPush:
    payload = token.payload if isinstance(token, SumUp) else token
    assert isinstance(payload, ChainPush)
    return payload


def check_push(tables: ServerTables, operation: str, pieces: Sequence[Piece], buckets: Buckets) -> None:
    """Raise UsageError or ProtocolError unless all pieces from another server can be applied to the tables.

    The check finds every possible error before any piece is applied. `buckets` are the announced buckets of the push.
    """
    for piece in pieces:
        part, selection = tables.find(piece.table).part, piece.selection
        if selection.keys is None:
            check_range(part.spec, selection.start, selection.stop)
        if operation == GRADIENTS:
            expected = part.num_values(selection)
        else:
            keys = selection.key_array()
            expected = len(keys) * part.record_words if operation == RECORDS else 0
            if operation == ERASURE and part.spec.kind == "dense":
                raise ProtocolError(f"table {part.spec.name!r} is dense: its elements cannot be erased")
            if part.spec.kind == "dense":
                part.num_values(selection)
        if len(piece.floats) != expected:
            raise ProtocolError(
                f"a {operation} to table {part.spec.name!r} ({part.spec}) has {len(piece.floats)} float32: expected "
                f"{expected} for its keys"
            )
        if part.buckets_of(selection) & ~buckets:
            raise ProtocolError(f"a {operation} to table {part.spec.name!r} has keys outside its announced buckets")


def check_range(spec: TableSpec, start: int, stop: int) -> None:
    if spec.kind != "dense":
        raise UsageError(f"range [{start}, {stop}) of sparse table {spec.name!r}: only dense tables have ranges")
    if not 0 <= start <= stop <= spec.size:
        raise UsageError(f"range [{start}, {stop}) of dense table {spec.name!r}: expected a range in [0, {spec.size})")


def check_bucket(tables: ServerTables, bucket: int, pieces: Sequence[Piece]) -> None:
    """Raise UsageError or ProtocolError unless the pieces are valid records of a bucket."""
    for piece in pieces:
        part, keys = tables.find(piece.table).part, piece.selection.key_array()
        part.check_bucket(bucket, keys)
        most_words = part.record_words + (part.spec.kind == "sparse")  # plus one word for the row's last pass
        if len(piece.floats) not in (len(keys) * part.record_words, len(keys) * most_words):
            raise ProtocolError(
                f"bucket {bucket} of table {part.spec.name!r} ({part.spec}) has {len(piece.floats)} float32 for "
                f"{len(keys)} records of {part.record_words}"
            )


def apply(tables: ServerTables, push: ChainPush, buckets: Buckets) -> None:
    # the primary has checked a forwarded push; this server records its magnitude here
    is_seen = push.header is None or push.header.kind != FORWARD
    for piece in push.part(tables, buckets):
        part = tables.find(piece.table).part
        if push.operation == GRADIENTS:
            # In a dense part, num_values checks that the keys exist, and stores their positions in the selection.
            part.num_values(piece.selection)
            if not is_seen:
                part.magnitudes.take_unseen(float(largest(piece.floats)))
            part.push(piece.selection, piece.floats)
        elif push.operation == RECORDS:
            part.write_records(piece.selection.key_array(), piece.floats)
        elif push.operation == ERASURE:
            num_erased = part.erase(piece.selection.key_array())
            if piece.table == push.pieces[0].table:
                tables.record_erased(push.incarnation, push.sequence, buckets, num_erased)
        else:
            raise ProtocolError(f"unknown operation {push.operation!r} of a push: run the same version on all servers")


def pack(pieces: Sequence[Piece]) -> tuple[tuple[PieceInfo, ...], list[Any]]:
    """Return the description of pieces for a frame's meta, and the parts of its body, padded to 8 bytes."""
    infos: list[PieceInfo] = []
    body: list[Any] = []
    for piece in pieces:
        selection = piece.selection
        span = None
        if selection.keys is None:
            assert selection.buckets is not None  # set by the earlier call of num_values()
            span = (selection.start, selection.stop, to_bytes(selection.buckets))
        num_keys = 0 if selection.keys is None else len(selection.keys)
        infos.append(PieceInfo(piece.table, num_keys, len(piece.floats), span))
        if selection.keys is not None:
            body.append(selection.keys)
        if len(piece.floats):
            body.append(piece.floats)
            if len(piece.floats) % 2:
                body.append(_PAD)
    return tuple(infos), body


_PAD = np.zeros(1, np.float32)


def unpack(infos: Sequence[PieceInfo], body: memoryview) -> Iterator[Piece]:
    """Yield the pieces of a frame as views of its body. Raises ProtocolError for a body of another length."""
    expected = 0
    for info in infos:
        expected += 8 * info.num_keys + padded(4 * info.num_floats)
    if len(body) != expected:
        raise ProtocolError(f"a frame between servers has a body of {len(body)} bytes: expected {expected}")
    at = 0
    for info in infos:
        if info.range is not None and (info.num_keys or info.range[0] > info.range[1]):
            raise ProtocolError(f"a piece has keys or one range: got {info.num_keys} keys and {info.range[:2]}")
        if info.range is None:
            selection = Selection(np.frombuffer(body, np.uint64, info.num_keys, at))
            at += 8 * info.num_keys
        else:
            selection = Selection(None, info.range[0], info.range[1], from_bytes(info.range[2]))
        yield Piece(info.table, selection, np.frombuffer(body, np.float32, info.num_floats, at))
        at += padded(4 * info.num_floats)
