"""Record changes of a table's part for snapshots: the changed buckets, and the earlier values of changed rows.

When the first snapshot starts, :class:`WatchedPart` wraps the server's part of the table. (So a server without
snapshots has no cost.) Before each write, the wrapper records the buckets that the write changes. If the current
snapshot has not read these buckets yet, the wrapper first copies the rows that will change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from paceline.kernels.dedup import select
from paceline.protocol.buckets import Buckets, buckets_in
from paceline.tables.bucket_arrays import to_words
from paceline.tables.part import Selection, TablePart
from paceline.tables.passes import has_room_for_marks
from paceline.tables.rules import SGD, UpdateRule
from paceline.tables.server_tables import ServerTable
from paceline.tables.sparse_part import SparsePart
from paceline.tables.sparse_store import SparseStore
from paceline.tables.types import Floats, Keys


class EarlierRows:
    """The rows of a sparse table that changed after a snapshot's moment, with their values at that moment."""

    def __init__(self, store: SparseStore, rule: UpdateRule) -> None:
        self._store = store
        self._before = SparseStore(dim=store.dim, rule=rule, memory=store.memory)
        self._seen = SparseStore(dim=1, rule=SGD(lr=1.0))  # for each changed key: 1 if it had a row, otherwise 0

    def copy_before_write(self, keys: Keys) -> None:
        _, known = self._seen.read_records(keys)
        if known.all():
            return
        new = keys[~known]
        records, found = self._store.read_records(new)
        if found.all():
            self._before.write_records(new, records)
        else:
            self._before.write_records(new[found], records[found])
        self._seen.write_records(new, found.astype(np.float32))

    def restore(self, bucket: int, keys: Keys, records: Floats) -> tuple[Keys, Floats]:
        """Return a bucket as it was at the snapshot's moment, given its current `keys` and `records`.

        The method may change `records`, and can be called only once for each bucket.
        """
        count = int(self._seen.counts[bucket])
        if not count:
            return keys, records
        marks, changed = self._seen.read_records(keys)
        existed = changed & (marks[:, 0] == 1.0)
        if changed.sum() == count:  # no changed row was erased
            rows, _ = self._before.read_records(keys[existed])
            records[existed] = rows
            if existed.sum() != count:
                keys, records = keys[existed | ~changed], records[existed | ~changed]
        else:
            before, rows = self._before.bucket(bucket)
            keys, records = np.concatenate([before, keys[~changed]]), np.concatenate([rows, records[~changed]])
        self._before.drop_bucket(bucket)
        self._seen.drop_bucket(bucket)
        return keys, records


class Moment:
    """A view of a table's part at the moment of construction. It is read bucket by bucket while the part changes."""

    def __init__(self, part: TablePart, waiting: Buckets) -> None:
        self._part = part
        self.waiting = waiting
        """The buckets that the snapshot has not read yet."""
        self._rows = EarlierRows(part.store, part.rule) if isinstance(part, SparsePart) else None
        self._copies: dict[int, tuple[Keys, Floats]] = {}

    def copy_before_write(self, touched: Buckets, selection: Selection) -> None:
        """Copy the data that a write will change: rows of a sparse table, or whole buckets of a dense table."""
        touched &= self.waiting
        if not touched:
            return
        if self._rows is None:
            self.copy_buckets(touched)
            return
        assert selection.keys is not None
        chosen: npt.NDArray[np.int64] = np.empty(len(selection.keys), np.int64)
        count = select(selection.keys, to_words(touched), chosen)
        self._rows.copy_before_write(selection.keys[chosen[:count]])

    def copy_buckets(self, buckets: Buckets) -> None:
        for bucket in buckets_in(buckets & self.waiting):
            if bucket not in self._copies:
                self._copies[bucket] = self._read(bucket)

    def read(self, bucket: int) -> tuple[Keys, Floats]:
        self.waiting &= ~(1 << bucket)
        copy = self._copies.pop(bucket, None)
        return self._read(bucket) if copy is None else copy

    def _read(self, bucket: int) -> tuple[Keys, Floats]:
        keys, records = self._part.read_bucket(bucket)
        return (keys, records) if self._rows is None else self._rows.restore(bucket, keys, records)


SnapshotId: TypeAlias = tuple[str, int]
"""The directory of snapshots of one coordinator, and the number of a snapshot in this directory."""


class WatchedPart:
    """A wrapper of a table's part that records changes. Attributes that it does not define are those of `part`."""

    def __init__(self, part: TablePart) -> None:
        self.part = part
        self._written: dict[SnapshotId, Buckets] = {}  # for each snapshot, the buckets that have not changed since then
        self.moment: Moment | None = None
        """The earlier state of the table, which the current snapshot reads; None if there is no such snapshot."""

    def unchanged_since(self, snapshot: SnapshotId) -> Buckets:
        return self._written.get(snapshot, 0)

    def record_written(self, snapshot: SnapshotId, buckets: Buckets) -> None:
        """Record that a snapshot contains `buckets`, and forget earlier snapshots of its directory."""
        self._forget([known for known in self._written if known[0] == snapshot[0]], buckets)
        self._written[snapshot] = self._written.get(snapshot, 0) | buckets

    def _record_changed(self, buckets: Buckets) -> None:
        self._forget(list(self._written), buckets)

    def _forget(self, snapshots: list[SnapshotId], buckets: Buckets) -> None:
        for known in snapshots:
            self._written[known] &= ~buckets
            if not self._written[known]:
                del self._written[known]

    def _touch(self, selection: Selection) -> None:
        if not self._written and self.moment is None:
            return
        touched = self.part.buckets_of(selection)
        if self.moment is not None:
            self.moment.copy_before_write(touched, selection)
        self._record_changed(touched)

    def _touch_all(self, buckets: Buckets) -> None:
        if self.moment is not None:
            self.moment.copy_buckets(buckets)
        self._record_changed(buckets)

    def push(self, selection: Selection, grads: Floats) -> None:
        self._touch(selection)
        self.part.push(selection, grads)

    def push_sum(self, selection: Selection, grads: Sequence[Floats], factor: float) -> None:
        self._touch(selection)
        self.part.push_sum(selection, grads, factor)

    def begin_pass(self, number: int, rows_of: int) -> None:
        """May move rows to another store."""
        assert isinstance(self.part, SparsePart)
        if not has_room_for_marks(self.part.store):
            self._touch_all(self.part.held)
        self.part.begin_pass(number, rows_of)

    def write_records(self, keys: Keys, records: Floats) -> None:
        self._touch(Selection(keys))
        self.part.write_records(keys, records)

    def erase(self, keys: Keys) -> int:
        if isinstance(self.part, SparsePart):
            self._touch(Selection(keys))
        return self.part.erase(keys)

    def hold(self, buckets: Buckets) -> None:
        self._record_changed(buckets & ~self.part.held)
        self.part.hold(buckets)

    def drop(self, buckets: Buckets) -> None:
        self._touch_all(buckets)
        self.part.drop(buckets)

    def load_bucket(self, bucket: int, keys: Keys, records: Floats) -> None:
        self._touch_all(1 << bucket)
        self.part.load_bucket(bucket, keys, records)

    def load_with_passes(self, bucket: int, keys: Keys, records: Floats, rows_of: int | None = None) -> None:
        """May move rows to another store."""
        begins = not self.part.pass_number
        self._touch_all(self.part.held if begins and records.shape[1] > self.part.record_words else 1 << bucket)
        self.part.load_with_passes(bucket, keys, records, rows_of)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part, name)


def watch(table: ServerTable) -> WatchedPart:
    if not isinstance(table.part, WatchedPart):
        table.part = cast(TablePart, WatchedPart(table.part))
    return cast(WatchedPart, table.part)
