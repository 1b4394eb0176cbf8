"""The calls that a server answers: tables made, read and written, workers that join, what it has to tell."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.protocol.bounds import Natural
from paceline.tables.bounds import Bucket, Clock, NumPasses, PassNumber, TableNumber
from paceline.tables.spec import TableSpec


class CreateTable(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Hold your part of a table. Answered by None; idempotent."""

    number: TableNumber
    spec: TableSpec


class FilterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The filters of a table's requests and answers on one connection (:meth:`paceline.filters.Filter.describe`)."""

    requests: list[dict[str, Any]]
    answers: list[dict[str, Any]]


class CheckFilters(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Say whether there are such filters. Answered by None, or an error that says what is missing."""

    filters: FilterInfo


class JoinClock(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker takes part in the iterations, from `clock` or later; answered by its clock."""

    rank: Natural
    clock: Clock


class Retire(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker has no more work for now: nobody waits for it until it joins again."""


class ReadBucket(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Read a bucket whole. Answered by the number of rows; the body is keys, then records."""

    table: TableNumber
    bucket: Bucket


class WriteRecords(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Set whole records: the body is `rows` keys, then their records."""

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
    """Erase rows: the body is their keys. Answered by how many there were."""

    table: TableNumber


class BeginPass(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Have pushes to a sparse table from now on count as of pass `number` over the data.

    If its passes were not noted so far, the rows there count as last pushed in pass `rows_of`.
    """

    table: TableNumber
    number: PassNumber
    rows_of: PassNumber


class EraseUnseen(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Erase a bucket's rows that were pushed neither in this pass nor in the `passes` - 1 before it.

    What the tables `also` have of the same keys is erased with them. Answered by how many rows of `table` there were.
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
    """How many pushes, sums, writes and loads were refused for infinities or NaN, or let in with them."""
    staleness: tuple[int, ...]
    """How many gradients were applied (or dropped) at staleness 0, 1, …; the last also counts all above."""


class ServerStatistics(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One server."""

    tables: dict[str, TableStatistics]
    bytes_in: int
    bytes_out: int
    resident_bytes: int
    held: int
    """Requests that wait now, at the gate or for a replica."""
    num_compared: int
    """Buckets that were compared with those of the servers before this one, as often as they were."""
    num_unordered: int
    """Buckets of which the same pushes were applied in another order than there, with another result."""
    differences: tuple[str, ...]
    """What is not as it is there, in a line for each bucket and table; see :mod:`paceline.ps.server.replica_checks`."""
