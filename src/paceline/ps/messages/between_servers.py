"""The meta of frames between the servers of a chain: FORWARD, STATE, CHECK and CLOCKS."""

from __future__ import annotations

import msgspec

from paceline.errors import UsageError
from paceline.protocol.bounds import BucketMask, Natural
from paceline.tables.bounds import Bucket, Clock, Operation, PassNumber, TableNumber, Word
from paceline.tables.spec import TableSpec


class PieceInfo(msgspec.Struct, frozen=True, array_like=True):
    """The part of one table in a frame between servers: keys, or a range of buckets; then float32, padded."""

    table: TableNumber
    num_keys: Natural
    num_floats: Natural
    range: tuple[Natural, Natural, BucketMask] | None = None

    def __post_init__(self) -> None:
        if self.range is not None and (self.num_keys or self.range[0] > self.range[1]):
            raise UsageError(f"a piece has keys or one range: got {self.num_keys} keys and {self.range[:2]}")


class ForwardInfo(msgspec.Struct, frozen=True, array_like=True):
    """A push, a write or an erasure for the next server of a chain. Sequence, version and number are in the header."""

    incarnation: Natural
    operation: Operation
    buckets: BucketMask
    pieces: tuple[PieceInfo, ...]


class StateInfo(msgspec.Struct, frozen=True, array_like=True):
    """A bucket: its filter, and a piece per table, whose floats are whole records."""

    bucket: Bucket
    order: Word
    """The order in which pushes were applied to it, hashed (:mod:`paceline.ps.server.replica_checks`)."""
    filter: tuple[tuple[Natural, Natural, BucketMask], ...]
    pieces: tuple[PieceInfo, ...]

    def __post_init__(self) -> None:
        tables = {piece.table for piece in self.pieces}
        if len(tables) != len(self.pieces) or any(piece.range is not None for piece in self.pieces):
            raise UsageError("a bucket has at most one piece of each table, with its keys")


class CheckInfo(msgspec.Struct, frozen=True, array_like=True):
    """The state of a bucket on a server, which its successor compares (:mod:`paceline.ps.server.replica_checks`)."""

    bucket: Bucket
    order: Word
    applied: tuple[tuple[Natural, Natural], ...]
    """The last push of each incarnation."""
    tables: tuple[tuple[TableNumber, Natural, Word], ...]
    """The number of rows of each table in the bucket, and their digest."""


class ClocksInfo(msgspec.Struct, frozen=True, array_like=True):
    """The tables and the workers.

    A table has its number, its declared and its current spec, and the revision; a worker its incarnation, its rank, its
    clock, and whether it counts.
    """

    tables: tuple[tuple[TableNumber, TableSpec, TableSpec, Natural], ...]
    workers: tuple[tuple[Natural, Natural, Clock, bool], ...]
    num_missing: Natural
    """The number of expected workers that have not joined yet."""
    minimum: Clock
    """The iteration that all workers have reached."""
    passes: tuple[tuple[TableNumber, PassNumber, PassNumber], ...] = ()
    """The current pass over the data, and the pass of rows older than the record, for tables that record passes."""
