"""A server's part of a sparse table: rows by key. It uses no network and no clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from typing_extensions import override

from paceline.protocol.buckets import Buckets, buckets_in
from paceline.tables import passes
from paceline.tables.bucket_arrays import buckets_of_keys, from_flags, to_flags
from paceline.tables.dense_part import DensePart
from paceline.tables.memory.blocks import RowMemory
from paceline.tables.part import Selection, TablePart, sum_of
from paceline.tables.sparse_store import SparseStore
from paceline.tables.spec import TableSpec
from paceline.tables.types import Floats, Keys

_TRIAL_ROWS = 1 << 14


class SparsePart(TablePart):
    """One server's rows of a sparse table, by uint64 key.

    Buckets that the server does not hold have no rows. The caller checks that keys are in held buckets.
    """

    def __init__(self, spec: TableSpec, buckets: Buckets, memory: RowMemory | None = None) -> None:
        super().__init__(spec)
        self.store = SparseStore(
            dim=spec.dim, rule=self.rule, initializer=self.initializer, seed=spec.seed, memory=memory
        )
        self.parameters = self.store.parameters
        self.hold(buckets)
        self.set_primary(buckets)

    @override
    def rows_in(self, buckets: Buckets) -> int:
        return int(self.store.counts[to_flags(buckets & self.held)].sum())

    @property
    @override
    def num_bytes(self) -> int:
        return self.store.num_bytes

    @override
    def hold(self, buckets: Buckets) -> None:
        """Add buckets. They have no rows until rows are written."""
        self._forget_rows(buckets & ~self.held)
        self._held |= buckets

    @override
    def drop(self, buckets: Buckets) -> None:
        self._forget_rows(buckets)
        self._held &= ~buckets
        self._primary &= ~buckets

    def _forget_rows(self, buckets: Buckets) -> None:
        for bucket in buckets_in(buckets & from_flags(self.store.counts > 0)):
            self.store.drop_bucket(bucket)

    @override
    def check_bucket(self, bucket: int, keys: Keys) -> None:
        if buckets_of_keys(keys) & ~(1 << bucket):
            raise self._wrong_bucket(bucket)

    @override
    def load_bucket(self, bucket: int, keys: Keys, records: Floats) -> None:
        self.check_bucket(bucket, keys)
        self.magnitudes.widen(records)
        self.store.load_bucket(bucket, keys, records)
        passes.record_push(self.store, keys)
        self._held |= 1 << bucket

    @override
    def num_values(self, selection: Selection) -> int:
        return len(selection.key_array()) * self.dim

    @override
    def keys_of(self, selection: Selection) -> Keys:
        return selection.key_array()

    @override
    def buckets_of(self, selection: Selection) -> Buckets:
        return buckets_of_keys(selection.key_array())

    @override
    def pull(self, selection: Selection, out: Floats) -> None:
        self.store.pull(selection.key_array(), out)

    @override
    def reserve(self, selection: Selection) -> None:
        assert selection.keys is not None
        self.store.reserve(selection.keys)

    @override
    def push(self, selection: Selection, grads: Floats) -> None:
        keys, store = selection.keys, self.store
        assert keys is not None
        store.push(keys, grads)
        if store.pass_number:
            passes.record_push(store, keys)

    @override
    def push_sum(self, selection: Selection, grads: Sequence[Floats], factor: float) -> None:
        self.push(selection, sum_of(grads, factor))

    @override
    def trial(self, selection: Selection, grads: Floats) -> Iterator[tuple[Keys, Floats]]:
        keys = selection.key_array()
        for first in range(0, len(keys), _TRIAL_ROWS):
            block = keys[first : first + _TRIAL_ROWS]
            copy = SparseStore(dim=self.dim, rule=self.rule, initializer=self.initializer, seed=self.spec.seed)
            copy.reserve(block)
            records, exist = self.store.read_records(block)
            copy.write_records(block[exist], records[exist])
            copy.push(block, grads[self.dim * first : self.dim * (first + len(block))])
            yield block, copy.read_records(block)[0]

    @override
    def read_bucket(self, bucket: int) -> tuple[Keys, Floats]:
        return self.store.bucket(bucket)

    @override
    def write_records(self, keys: Keys, records: Floats) -> None:
        self.magnitudes.widen(records.reshape(len(keys), self.record_words))
        self.store.write_records(keys, records)
        passes.record_push(self.store, keys)

    @override
    def erase(self, keys: Keys) -> int:
        return self.store.erase(keys)

    def begin_pass(self, number: int, rows_of: int) -> None:
        """See :func:`paceline.tables.passes.begin_pass`.

        If the rows have no room for marks, they are first copied to a store with marks. If there is not
        enough memory for this copy, the method raises MemoryError and changes nothing.
        """
        if not passes.has_room_for_marks(self.store):
            self.store = _copy_with_marks(self)
            self.parameters = self.store.parameters
        if not self.pass_number:
            self.rows_of = rows_of
        passes.begin_pass(self.store, number, rows_of)

    @property
    @override
    def pass_number(self) -> int:
        return self.store.pass_number

    @override
    def with_passes(self, bucket: int, keys: Keys, records: Floats) -> Floats:
        if not self.pass_number:
            return records
        return np.column_stack([records, passes.last_passes(self.store, bucket, keys)])

    @override
    def load_with_passes(self, bucket: int, keys: Keys, records: Floats, rows_of: int | None = None) -> None:
        if records.shape[1] == self.record_words:
            self.load_bucket(bucket, keys, records)
            if self.pass_number and rows_of is not None and len(keys):
                passes.record_passes(self.store, keys, np.full(len(keys), rows_of))
            return
        numbers = records[:, -1].astype(np.int64)
        self.load_bucket(bucket, keys, np.ascontiguousarray(records[:, :-1]))
        if len(keys):
            newest = max(1, int(numbers.max()))
            if self.pass_number < newest:
                self.begin_pass(newest, newest)
            passes.record_passes(self.store, keys, numbers)

    def unseen_keys(self, bucket: int, num_passes: int) -> Keys:
        return passes.unseen_keys(self.store, bucket, num_passes)


def _copy_with_marks(part: SparsePart) -> SparseStore:
    store = SparseStore(
        dim=part.dim, rule=part.rule, initializer=part.initializer, seed=part.spec.seed, memory=part.store.memory,
        has_marks=True,
    )  # fmt: skip
    for bucket in buckets_in(part.held):
        store.load_bucket(bucket, *part.store.bucket(bucket))
    return store


def make_part(spec: TableSpec, buckets: Buckets, memory: RowMemory | None = None) -> TablePart:
    return SparsePart(spec, buckets, memory) if spec.kind == "sparse" else DensePart(spec, buckets)
