"""Calls to a server: create, read and write tables, join as a worker, request statistics."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.protocol.bounds import Natural
from paceline.tables.bounds import Bucket, Clock, NumPasses, PassNumber, TableNumber
from paceline.tables.spec import TableSpec


class CreateTable(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Create the server's part of a table. Answered by None; idempotent."""

    number: TableNumber
    spec: TableSpec


class FilterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The filters of a table's requests and answers on one connection (:meth:`paceline.filters.Filter.describe`)."""

    requests: list[dict[str, Any]]
    answers: list[dict[str, Any]]


class CheckFilters(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Check that the server has these filters. Answered by None, or an error that names the missing one."""

    filters: FilterInfo


class JoinClock(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker joins the iterations, at `clock` or later; answered by its clock."""

    rank: Natural
    clock: Clock


class Retire(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker has no work now: iterations do not wait for it until it joins again."""


class ReadBucket(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Read all rows of a bucket. Answered by the number of rows; the body is keys, then records."""

    table: TableNumber
    bucket: Bucket


class WriteRecords(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write whole records: the body is `rows` keys, then their records."""

    table: TableNumber
    rows: Natural


class SetUpdate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Change a table's hyperparameters (the rule itself must be the same).

    A server ignores it if the table has this revision or a later one, so that all servers end with the same one.
    """

    table: TableNumber
    update: dict[str, Any]
    revision: Natural
    """The scheduler's answer to NoteUpdate."""


class Erase(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Erase rows: the body is their keys. Answered by the number of erased rows."""

    table: TableNumber


class BeginPass(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Record pushes to a sparse table as part of pass `number` over the data from now on.

    If the table has no record of passes yet, its rows count as last pushed in pass `rows_of`.
    """

    table: TableNumber
    number: PassNumber
    rows_of: PassNumber


class EraseUnseen(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Erase a bucket's rows without a push in this pass or the `passes` - 1 passes before it.

    The rows of the same keys in the tables `also` are erased too. Answered by the number of erased rows of `table`.
    """

    table: TableNumber
    bucket: Bucket
    passes: NumPasses
    also: tuple[TableNumber, ...] = ()


class GetStatistics(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answered by ServerStatistics."""


class TableStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One table on one server."""

    rows: int
    num_bytes: int
    pushes: int
    pulls: int
    dropped: int
    non_finite: int
    """The number of pushes, sums, writes and loads with infinities or NaN, rejected or accepted."""
    staleness: tuple[int, ...]
    """The number of gradients applied or dropped at staleness 0, 1, …; the last number includes all above."""


class ServerStatistics(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One server."""

    tables: dict[str, TableStatistics]
    bytes_in: int
    bytes_out: int
    resident_bytes: int
    held: int
    """The number of requests that wait now, at the gate or for a replica."""
    num_compared: int
    """The number of comparisons of a bucket with the server before this one."""
    num_unordered: int
    """The number of buckets with another result because the same pushes were applied in another order."""
    differences: tuple[str, ...]
    """A line for each bucket and table that differs (:mod:`paceline.ps.server.replica_checks`)."""
