"""A server's part of a table: values, state and what happened to them, without networks or workers' clocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.errors import NonFiniteError, UsageError
from paceline.kernels import dense as dense_kernels
from paceline.kernels.rules import INITIAL_A, INITIAL_B, NUM_PARAMETERS
from paceline.kernels.sparse import all_finite
from paceline.protocol import NUM_BUCKETS
from paceline.ps.messages import TableSpec
from paceline.ps.rules import INITIALIZERS, RULES, Initializer, UpdateRule, from_fields
from paceline.ps.sparse_store import Floats, Keys, SparseStore


class Selection:
    """The keys, or the range of a dense table, that a request is about. `places` is a dense part's own."""

    __slots__ = ("keys", "places", "start", "stop")

    def __init__(self, keys: Keys | None, start: int = 0, stop: int = 0) -> None:
        self.keys = keys
        self.start = start
        self.stop = stop
        self.places: npt.NDArray[np.int64] | None = None

    def copy(self) -> Selection:
        """Return one that does not depend on a receive buffer."""
        return Selection(None if self.keys is None else self.keys.copy(), self.start, self.stop)


def check_finite(grads: Floats, who: str, table: str) -> None:
    """Raise NonFiniteError unless all gradients (flat) are finite; both ends of a push ask."""
    if not all_finite(grads):
        bad = grads[~np.isfinite(grads)][0]
        raise NonFiniteError(
            f"a push of {who} to table {table!r} holds {bad}; it was refused and the table is unchanged: look for a "
            "diverging loss or a division by zero in the gradient"
        )


class TablePart(ABC):
    """What one server holds of a table."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.dim = spec.dim
        self.rule: UpdateRule = from_fields(RULES, spec.update)
        self.initializer: Initializer = from_fields(INITIALIZERS, spec.initializer)

    @property
    def record_words(self) -> int:
        """How many float32 the value and the state of a key are."""
        return self.dim * (1 + self.rule.num_states) + self.rule.has_count

    @property
    @abstractmethod
    def parameters(self) -> npt.NDArray[np.float64]:
        """The kernel's parameter array."""

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Rows (sparse) or elements (dense) held."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes held."""

    @abstractmethod
    def num_values(self, selection: Selection) -> int:
        """How many float32 a selection's values are, on this server. Raises UsageError if it is not all there."""

    @abstractmethod
    def keys_of(self, selection: Selection) -> Keys:
        """Return the keys of a selection that lie on this server, in order."""

    @abstractmethod
    def pull(self, selection: Selection, out: Floats) -> None:
        """Read values into `out` (float32 [num_values])."""

    @abstractmethod
    def push(self, selection: Selection, grads: Floats) -> None:
        """Apply the update rule with finite `grads` (float32 [num_values])."""

    def push_sum(self, selection: Selection, grads: Sequence[Floats], factor: float) -> None:
        """Apply the update rule once with the sum of finite `grads` (float32 [num_values] each) times `factor`."""
        total = grads[0]
        for more in grads[1:]:
            total = total + more
        self.push(selection, total if factor == 1.0 else total * np.float32(factor))

    @abstractmethod
    def read_bucket(self, bucket: int) -> tuple[Keys, Floats]:
        """Return keys and records of a bucket."""

    @abstractmethod
    def write_records(self, keys: Keys, records: Floats) -> None:
        """Set whole records: values and state of each key."""

    @abstractmethod
    def erase(self, keys: Keys) -> int:
        """Erase the rows of `keys`; return how many there were."""

    def set_update(self, rule: UpdateRule) -> None:
        """Take other hyperparameters of the same rule."""
        if type(rule) is not type(self.rule):
            raise UsageError(
                f"table {self.spec.name!r} is updated by {type(self.rule).__name__}, and its state is of that rule: "
                f"it cannot become {type(rule).__name__}"
            )
        self.rule = rule
        self.parameters[: len(rule.hyper)] = rule.hyper


class SparsePart(TablePart):
    """Rows by uint64 key."""

    def __init__(self, spec: TableSpec) -> None:
        super().__init__(spec)
        self.store = SparseStore(dim=spec.dim, rule=self.rule, initializer=self.initializer, seed=spec.seed)

    @property
    def parameters(self) -> npt.NDArray[np.float64]:
        """See :meth:`TablePart.parameters`."""
        return self.store.parameters

    @property
    def num_rows(self) -> int:
        """See :meth:`TablePart.num_rows`."""
        return len(self.store)

    @property
    def num_bytes(self) -> int:
        """See :meth:`TablePart.num_bytes`."""
        return self.store.num_bytes

    def num_values(self, selection: Selection) -> int:
        """See :meth:`TablePart.num_values`."""
        assert selection.keys is not None
        return len(selection.keys) * self.dim

    def keys_of(self, selection: Selection) -> Keys:
        """See :meth:`TablePart.keys_of`."""
        assert selection.keys is not None
        return selection.keys

    def pull(self, selection: Selection, out: Floats) -> None:
        """See :meth:`TablePart.pull`."""
        assert selection.keys is not None
        self.store.pull(selection.keys, out)

    def push(self, selection: Selection, grads: Floats) -> None:
        """See :meth:`TablePart.push`."""
        assert selection.keys is not None
        self.store.push(selection.keys, grads)

    def read_bucket(self, bucket: int) -> tuple[Keys, Floats]:
        """See :meth:`TablePart.read_bucket`."""
        return self.store.bucket(bucket)

    def write_records(self, keys: Keys, records: Floats) -> None:
        """See :meth:`TablePart.write_records`."""
        self.store.write_records(keys, records)

    def erase(self, keys: Keys) -> int:
        """See :meth:`TablePart.erase`."""
        return self.store.erase(keys)


def bucket_bounds(size: int, bucket: int) -> tuple[int, int]:
    """Return the range [start, stop) of a dense table's elements that a bucket holds."""
    width = bucket_width(size)
    return min(bucket * width, size), min((bucket + 1) * width, size)


def bucket_width(size: int) -> int:
    """Return how many elements a bucket of a dense table of `size` elements holds (the last ones hold fewer)."""
    return max(1, -(-size // NUM_BUCKETS))


def owned_runs(size: int, buckets: Sequence[int]) -> list[tuple[int, int]]:
    """Return the elements of rising `buckets` of a dense table as the fewest ranges [start, stop)."""
    runs: list[tuple[int, int]] = []
    for bucket in buckets:
        start, stop = bucket_bounds(size, bucket)
        if start == stop:
            continue
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], stop)
        else:
            runs.append((start, stop))
    return runs


def clip_runs(runs: Sequence[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Return the parts of `runs` within [start, stop)."""
    return [(max(a, start), min(b, stop)) for a, b in runs if a < stop and b > start]


def _sum_scaled(parts: Sequence[Floats], factor: float, out: Floats) -> None:
    """Write the sum of `parts`, in order, times `factor` to `out`."""
    if len(parts) == 1:
        np.multiply(parts[0], np.float32(factor), out=out)
        return
    np.add(parts[0], parts[1], out=out)
    for more in parts[2:]:
        out += more
    if factor != 1.0:
        out *= np.float32(factor)


_BLOCK = 1 << 14  # elements: 64 KiB, with the part of the record that they update, stay in the second cache
_ELSEWHERE = -(1 << 62)  # less than any place by more than any bucket's width


class DensePart(TablePart):
    """The buckets of a dense table that this server owns, as one long record: values, then state planes."""

    def __init__(self, spec: TableSpec, buckets: Sequence[int]) -> None:
        super().__init__(spec)
        self._runs = owned_runs(spec.size, buckets)
        self._width = bucket_width(spec.size)
        self._base = np.full(NUM_BUCKETS, _ELSEWHERE, np.int64)  # bucket → its first element here
        total = 0
        for bucket in buckets:
            start, stop = bucket_bounds(spec.size, bucket)
            self._base[bucket] = total
            total += stop - start
        self._size = total
        planes = 1 + self.rule.num_states + self.rule.has_count
        self._record = np.zeros(planes * total, np.float32)
        self._parameters = np.zeros(NUM_PARAMETERS, np.float64)
        self._parameters[: len(self.rule.hyper)] = self.rule.hyper
        self._parameters[INITIAL_A], self._parameters[INITIAL_B] = self.initializer.arguments
        code, seed = self.initializer.code, np.uint64(spec.seed & (2**64 - 1))
        at = 0
        for start, stop in self._runs:
            dense_kernels.dense_start(
                self.rule.code, self._record, total, at, at + stop - start, start, code, seed, self._parameters
            )
            at += stop - start

    @property
    def parameters(self) -> npt.NDArray[np.float64]:
        """See :meth:`TablePart.parameters`."""
        return self._parameters

    @property
    def num_rows(self) -> int:
        """See :meth:`TablePart.num_rows`."""
        return self._size

    @property
    def num_bytes(self) -> int:
        """See :meth:`TablePart.num_bytes`."""
        return self._record.nbytes

    def _local(self, element: int) -> int:
        return int(self._base[element // self._width]) + element % self._width

    def _positions(self, keys: Keys) -> npt.NDArray[np.int64]:
        if len(keys) and keys.max() >= self.spec.size:
            raise UsageError(
                f"keys of dense table {self.spec.name!r} hold {keys.max()}: they go from 0 to {self.spec.size - 1}"
            )
        elements = keys.astype(np.int64)
        found: npt.NDArray[np.int64] = self._base[elements // self._width] + elements % self._width
        if len(found) and found.min() < 0:
            raise UsageError(
                f"key {keys[found.argmin()]} of dense table {self.spec.name!r} came to a server that does not hold it"
            )
        return found

    def keys_of(self, selection: Selection) -> Keys:
        """See :meth:`TablePart.keys_of`."""
        if selection.keys is not None:
            return selection.keys
        own = clip_runs(self._runs, selection.start, selection.stop)
        runs = [np.arange(a, b, dtype=np.uint64) for a, b in own]
        return np.concatenate(runs) if runs else np.empty(0, np.uint64)

    def _places(self, selection: Selection) -> npt.NDArray[np.int64]:
        assert selection.keys is not None
        return self._positions(selection.keys) if selection.places is None else selection.places

    def num_values(self, selection: Selection) -> int:
        """See :meth:`TablePart.num_values`."""
        if selection.keys is not None:
            selection.places = self._positions(selection.keys)
            return len(selection.keys)
        return sum(b - a for a, b in clip_runs(self._runs, selection.start, selection.stop))

    def pull(self, selection: Selection, out: Floats) -> None:
        """See :meth:`TablePart.pull`."""
        if selection.keys is not None:
            # Every place is within the values; mode="raise" would buffer the whole answer to be sure of it.
            np.take(self._record, self._places(selection), out=out, mode="clip")
            return
        at = 0
        for start, stop in clip_runs(self._runs, selection.start, selection.stop):
            local, length = self._local(start), stop - start
            out[at : at + length] = self._record[local : local + length]
            at += length

    def push(self, selection: Selection, grads: Floats) -> None:
        """See :meth:`TablePart.push`."""
        code, size = self.rule.code, self._size
        if selection.keys is not None:
            places = self._places(selection)
            dense_kernels.dense_push_at(code, self._record, size, places, grads, self._parameters)
            return
        at = 0
        for start, stop in clip_runs(self._runs, selection.start, selection.stop):
            local, length = self._local(start), stop - start
            dense_kernels.dense_push(code, self._record, size, local, local + length, grads, at, self._parameters)
            at += length

    def push_sum(self, selection: Selection, grads: Sequence[Floats], factor: float) -> None:
        """See :meth:`TablePart.push_sum`. A block that stays in the cache is summed, then applied: one pass in all."""
        if selection.keys is not None or (len(grads) == 1 and factor == 1.0):
            super().push_sum(selection, grads, factor)
            return
        code, size = self.rule.code, self._size
        total = np.empty(_BLOCK, np.float32)
        at = 0
        for start, stop in clip_runs(self._runs, selection.start, selection.stop):
            end = self._local(start) + stop - start
            for local in range(end - (stop - start), end, _BLOCK):
                length = min(_BLOCK, end - local)
                block = total[:length]
                _sum_scaled([each[at : at + length] for each in grads], factor, block)
                dense_kernels.dense_push(code, self._record, size, local, local + length, block, 0, self._parameters)
                at += length

    def read_bucket(self, bucket: int) -> tuple[Keys, Floats]:
        """See :meth:`TablePart.read_bucket`."""
        start, stop = bucket_bounds(self.spec.size, bucket)
        local = int(self._base[bucket])
        if start < stop and local < 0:
            raise UsageError(f"bucket {bucket} of dense table {self.spec.name!r} does not lie on this server")
        planes = self._record.reshape(self.record_words, self._size)
        keys = np.arange(start, stop, dtype=np.uint64)
        return keys, np.ascontiguousarray(planes[:, local : local + stop - start].T)

    def write_records(self, keys: Keys, records: Floats) -> None:
        """See :meth:`TablePart.write_records`."""
        positions = self._positions(keys)
        planes = self._record.reshape(self.record_words, self._size)
        planes[:, positions] = records.reshape(len(keys), -1).T

    def erase(self, keys: Keys) -> int:
        """See :meth:`TablePart.erase`."""
        raise UsageError(f"table {self.spec.name!r} is dense: its elements cannot be erased")


def make_part(spec: TableSpec, buckets: Sequence[int]) -> TablePart:
    """Return an empty part of a table, for the server that owns `buckets`."""
    return SparsePart(spec) if spec.kind == "sparse" else DensePart(spec, buckets)
