"""A server's part of a dense table. Its array is as long as the whole table, but only the held buckets use memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from typing_extensions import override

from paceline.errors import UsageError
from paceline.kernels.dense import dense_pull
from paceline.kernels.parameters import INITIAL_A, INITIAL_B, NUM_PARAMETERS
from paceline.protocol.buckets import ALL, Buckets, buckets_in
from paceline.tables.bucket_arrays import (
    bucket_bounds,
    bucket_width,
    clip_runs,
    from_flags,
    owned_runs,
    range_buckets,
    runs_in,
    to_flags,
)
from paceline.tables.memory.pages import PAGE_BYTES, LazyFloats
from paceline.tables.part import Positions, Selection, TablePart, sum_of
from paceline.tables.rules import kernels
from paceline.tables.spec import TableSpec
from paceline.tables.types import Floats, Keys

_BLOCK = 1 << 14  # elements that are updated in one step: 64 KiB of gradients stay in the L2 cache
_PAGE = PAGE_BYTES // 4  # the number of elements in a page of memory


class DensePart(TablePart):
    """The buckets of a dense table that one server holds.

    One array contains all values of the table, then one *state plane* (an array of equal length) for each number of the
    update rule's state.
    """

    def __init__(self, spec: TableSpec, buckets: Buckets) -> None:
        super().__init__(spec)
        self._size = spec.size
        self._width = bucket_width(spec.size)
        self._flags = to_flags(0)  # for each bucket of the table, whether this server holds it
        planes = self.record_words
        self._memory = LazyFloats(planes * spec.size, used=planes * self._num_elements(buckets))
        self._record = self._memory.array
        self.parameters = np.zeros(NUM_PARAMETERS, np.float64)
        self.parameters[: len(self.rule.hyper)] = self.rule.hyper
        self.parameters[INITIAL_A], self.parameters[INITIAL_B] = self.initializer.arguments
        self.hold(buckets)
        self.set_primary(buckets)

    @override
    def rows_in(self, buckets: Buckets) -> int:
        return self._num_elements(buckets & self.held)

    @property
    @override
    def num_bytes(self) -> int:
        return 4 * self.record_words * self.num_rows

    def _num_elements(self, buckets: Buckets) -> int:
        return sum(stop - start for start, stop in runs_in(self._size, buckets))

    @override
    def hold(self, buckets: Buckets) -> None:
        code, seed = self.initializer.code, np.uint64(self.spec.seed & (2**64 - 1))
        for start, stop in self._add(buckets):
            kernels.dense_start(
                self.rule.code, self._record, self._size, start, stop, start, code, seed, self.parameters
            )

    def _add(self, buckets: Buckets) -> list[tuple[int, int]]:
        """Mark buckets as held. Return the ranges of the newly held elements, whose content is undefined."""
        runs = owned_runs(self._size, buckets_in(buckets & ~self.held))
        for start, stop in runs:
            for plane in range(0, len(self._record), self._size):
                self._memory.expect(plane + start, plane + stop)
        self._held |= buckets
        self._flags = to_flags(self.held)
        return runs

    @override
    def drop(self, buckets: Buckets) -> None:
        dropped = owned_runs(self._size, buckets_in(buckets & self.held))
        self._held &= ~buckets
        self._primary &= ~buckets
        self._flags = to_flags(self.held)
        free = owned_runs(self._size, buckets_in(ALL & ~self.held))
        for start, stop in dropped:
            # A page may extend into a neighbouring bucket. Such a page is freed only if that bucket is not held either.
            for a, b in clip_runs(free, start - _PAGE, stop + _PAGE):
                for plane in range(0, len(self._record), self._size):
                    self._memory.forget(plane + a, plane + b)

    @override
    def check_bucket(self, bucket: int, keys: Keys) -> None:
        start, stop = bucket_bounds(self._size, bucket)
        if len(keys) and not start <= int(keys.min()) <= int(keys.max()) < stop:
            raise self._wrong_bucket(bucket)

    @override
    def load_bucket(self, bucket: int, keys: Keys, records: Floats) -> None:
        """Load the records (values and state) of a bucket. Elements without a record get initial values."""
        start, stop = bucket_bounds(self._size, bucket)
        is_complete = len(keys) == stop - start and bool((keys == np.arange(start, stop, dtype=np.uint64)).all())
        self._check_records(keys, records)
        if not is_complete:
            self.check_bucket(bucket, keys)
        if is_complete:
            self._add(1 << bucket)
            self.magnitudes.widen(records.reshape(len(keys), self.record_words))
            self._planes()[:, start:stop] = records.reshape(len(keys), self.record_words).T
        else:
            primary = self._primary
            self.drop(1 << bucket)
            self.hold(1 << bucket)
            self._primary = primary
            self.write_records(keys, records)

    @override
    def num_values(self, selection: Selection) -> int:
        if selection.keys is not None:
            selection.places = self._positions(selection.keys)
            return len(selection.keys)
        if selection.buckets is None:
            selection.buckets = self.primary
        return sum(b - a for a, b in self._runs(selection))

    def _runs(self, selection: Selection) -> list[tuple[int, int]]:
        buckets, start, stop = self._buckets(selection), selection.start, selection.stop
        if strange := buckets & ~self.held & range_buckets(self._size, start, stop):
            raise UsageError(
                f"range [{start}, {stop}) of dense table {self.spec.name!r} includes bucket "
                f"{next(buckets_in(strange))}, which this server does not hold"
            )
        return clip_runs(runs_in(self._size, buckets), start, stop)

    def _buckets(self, selection: Selection) -> Buckets:
        return self.primary if selection.buckets is None else selection.buckets

    def _positions(self, keys: Keys, *, is_held: bool = True) -> Positions:
        if len(keys) and keys.max() >= self._size:
            raise UsageError(
                f"keys of dense table {self.spec.name!r} include {keys.max()}: expected 0 to {self._size - 1}"
            )
        positions = keys.view(np.int64)
        if is_held and self.held != ALL:
            is_here = self._flags[positions // self._width]
            if not is_here.all():
                raise UsageError(
                    f"key {keys[is_here.argmin()]} of dense table {self.spec.name!r} was sent to a server that does "
                    "not hold it"
                )
        return positions

    def _places(self, selection: Selection) -> Positions:
        return self._positions(selection.key_array()) if selection.places is None else selection.places

    @override
    def keys_of(self, selection: Selection) -> Keys:
        if selection.keys is not None:
            return selection.keys
        runs = [np.arange(a, b, dtype=np.uint64) for a, b in self._runs(selection)]
        return np.concatenate(runs) if runs else np.empty(0, np.uint64)

    @override
    def buckets_of(self, selection: Selection) -> Buckets:
        if selection.keys is None:
            return self._buckets(selection) & range_buckets(self._size, selection.start, selection.stop)
        flags = to_flags(0)
        positions = self._positions(selection.keys, is_held=False) if selection.places is None else selection.places
        flags[positions // self._width] = True
        return from_flags(flags)

    @override
    def restrict(self, selection: Selection, grads: Floats, buckets: Buckets) -> tuple[Selection, Floats]:
        if selection.keys is not None:
            return super().restrict(selection, grads, buckets)
        if not self.buckets_of(selection) & ~buckets:
            return selection, grads
        start, stop = selection.start, selection.stop
        covered = self._buckets(selection)
        chosen = covered & buckets
        runs, pieces = iter(clip_runs(runs_in(self._size, covered), start, stop)), []
        at = first = last = 0  # the range [first, last) of the selection begins at `at` in `grads`
        for a, b in clip_runs(runs_in(self._size, chosen), start, stop):  # [a, b) lies in a single range
            while last < b:
                at += last - first
                first, last = next(runs)
            pieces.append(grads[at + a - first : at + b - first])
        values = pieces[0] if len(pieces) == 1 else np.concatenate([grads[:0], *pieces])
        return Selection(None, start, stop, chosen), values

    @override
    def pull(self, selection: Selection, out: Floats) -> None:
        if selection.keys is not None:
            # All indices are valid, but the default mode="raise" would check them and buffer the result.
            np.take(self._record, self._places(selection), out=out, mode="clip")
            return
        runs, at = self._runs(selection), 0
        self._check_count("values", out, sum(stop - start for start, stop in runs))
        for start, stop in runs:
            dense_pull(self._record, start, stop, out, at)
            at += stop - start

    @override
    def reserve(self, selection: Selection) -> None:
        """Do nothing, because held elements always have memory."""

    @override
    def push(self, selection: Selection, grads: Floats) -> None:
        code, size = self.rule.code, self._size
        if selection.keys is not None:
            places = self._places(selection)
            self._check_count("gradients", grads, len(places))
            kernels.dense_push_at(code, self._record, size, places, grads, self.parameters)
            return
        runs, at = self._runs(selection), 0
        self._check_count("gradients", grads, sum(stop - start for start, stop in runs))
        for start, stop in runs:
            kernels.dense_push(code, self._record, size, start, stop, grads, at, self.parameters)
            at += stop - start

    @override
    def push_sum(self, selection: Selection, grads: Sequence[Floats], factor: float) -> None:
        """Sum the gradients and apply the sum block by block, so that each block stays in the processor's cache."""
        if selection.keys is not None or (len(grads) == 1 and factor == 1.0):
            self.push(selection, sum_of(grads, factor))
            return
        code, size = self.rule.code, self._size
        total = np.empty(_BLOCK, np.float32)
        runs, at = self._runs(selection), 0
        for part in grads:
            self._check_count("gradients", part, sum(stop - start for start, stop in runs))
        for start, end in runs:
            for first in range(start, end, _BLOCK):
                length = min(_BLOCK, end - first)
                block = total[:length]
                _sum_scaled([part[at : at + length] for part in grads], factor, block)
                kernels.dense_push(code, self._record, size, first, first + length, block, 0, self.parameters)
                at += length

    @override
    def trial(self, selection: Selection, grads: Floats) -> Iterator[tuple[Keys, Floats]]:
        code = self.rule.code
        if selection.keys is not None:
            places, which = np.unique(self._places(selection), return_inverse=True)
            record = np.ascontiguousarray(self._planes()[:, places])
            kernels.dense_push_at(code, record.reshape(-1), len(places), which, grads, self.parameters)
            yield places.view(np.uint64), record.T
            return
        at = 0
        for start, end in self._runs(selection):
            for first in range(start, end, _BLOCK):
                stop = min(first + _BLOCK, end)
                record, length = self._planes()[:, first:stop].copy(), stop - first
                kernels.dense_push(code, record.reshape(-1), length, 0, length, grads, at, self.parameters)
                yield np.arange(first, stop, dtype=np.uint64), record.T
                at += length

    def _check_count(self, unit: str, floats: Floats, expected: int) -> None:
        if len(floats) != expected:
            raise UsageError(f"{len(floats)} {unit} for {expected} elements of dense table {self.spec.name!r}")

    def _check_records(self, keys: Keys, records: Floats) -> None:
        self._check_count("words of records", records.reshape(-1), len(keys) * self.record_words)

    def _planes(self) -> Floats:
        return self._record.reshape(self.record_words, self._size)

    @override
    def read_bucket(self, bucket: int) -> tuple[Keys, Floats]:
        start, stop = bucket_bounds(self._size, bucket)
        if start < stop and not self.held >> bucket & 1:
            raise UsageError(f"bucket {bucket} of dense table {self.spec.name!r} is not on this server")
        # The copy is explicit, because with one word per record the transposed array would be a view of the table.
        return np.arange(start, stop, dtype=np.uint64), np.array(self._planes()[:, start:stop].T, order="C", copy=True)

    @override
    def write_records(self, keys: Keys, records: Floats) -> None:
        self._check_records(keys, records)
        self.magnitudes.widen(records.reshape(len(keys), self.record_words))
        self._planes()[:, self._positions(keys)] = records.reshape(len(keys), self.record_words).T

    @override
    def erase(self, keys: Keys) -> int:
        raise UsageError(f"table {self.spec.name!r} is dense: its elements cannot be erased")


def _sum_scaled(parts: Sequence[Floats], factor: float, out: Floats) -> None:
    if len(parts) == 1:
        np.multiply(parts[0], np.float32(factor), out=out)
        return
    np.add(parts[0], parts[1], out=out)
    for more in parts[2:]:
        out += more
    if factor != 1.0:
        out *= np.float32(factor)
