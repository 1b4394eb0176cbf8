"""A store of sparse rows in one process: a thin Python layer over the kernels of the hash index and of rows.

Servers' tables and predictions without a server use this store. It is not thread-safe.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from paceline.errors import UsageError
from paceline.kernels import index, sparse
from paceline.kernels.parameters import INITIAL_A, INITIAL_B, NUM_PARAMETERS
from paceline.tables.initializers import Initializer, Zeros
from paceline.tables.memory.blocks import RowBlock, RowMemory
from paceline.tables.memory.pages import Pages
from paceline.tables.rules import SGD, UpdateRule, kernels
from paceline.tables.types import Floats, Keys

_GROWTH = 1.25
_WIDE_GROWTH = 1.5  # large, because reserved pages of wide rows use no memory before they are written
_LEAST_ROWS = 8
_SMALL_ROWS = 1024
_INLINE_WORDS = 3  # rows of up to 3 words (float32) are stored in the index
# The maximum share of entries in use, by the number of entries per line of the index. With a lower share, lines are
# full less often, and a full line causes a second cache miss. With 10^7 rows of one word, a share of 0.76 gives 20 ns
# per lookup and 1.8 times the minimum size. A share of 0.66 gives 16 ns and 2.1 times the minimum size.
_FILL = {5: 0.66, 4: 0.62, 3: 0.63}
_WIDE_FILL = 0.5  # a lower share for wide rows, because their index is small compared with the rows
_WITHOUT_MARKS = (4,)  # the sizes of entries (in words) that fill a line completely, without a word for marks
_HEADER_LINES = 1
_FEW_KEYS = 1000  # up to this number, counting each bucket's keys is as fast as a check of memory limits


def _new_salt() -> int:
    return secrets.randbits(64) | 1


def _bucket_of(key: np.uint64) -> int:
    out = np.empty(1, np.uint16)
    index.buckets_of(np.array([key], np.uint64), out)
    return int(out[0])


def _limits(directory: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    return directory[index.LIMIT : index.USED]


def _check_size(unit: str, rows: Floats, count: int, width: int) -> None:
    if rows.size != count * width or not rows.flags.c_contiguous:
        raise UsageError(f"{rows.size} {unit} for {count} keys: expected {width} per key, contiguous in memory")


def _next_limit(bucket: int, count: int, growth: float) -> int:
    """Return the next size of a bucket. Small sizes double, and large sizes grow by the factor `growth`.

    The sizes differ between buckets. If sizes were equal, all buckets would grow during the same request, because all
    buckets have about the same number of rows.
    """
    phase = bucket * 0.6180339887498949 % 1.0
    if count < _SMALL_ROWS:
        limit = _LEAST_ROWS * 2.0**phase
        while int(limit) <= count:
            limit *= 2.0
        return int(limit)
    limit = _SMALL_ROWS * growth**phase
    while int(limit) <= count:
        limit *= growth
    return int(limit)


class SparseStore:
    """A store of rows by uint64 key. A row has `dim` float32 values and the state of the update rule.

    :meth:`push` applies `rule`. `initializer` and `seed` determine the values of missing rows. `memory` provides the
    memory for rows. If `has_marks`, each row has space for a mark: the last pass over the data in which the row was
    pushed (:mod:`paceline.tables.passes`). A row exists after its first push. All 2^64 keys are valid.
    """

    def __init__(
        self,
        *,
        dim: int,
        rule: UpdateRule | None = None,
        initializer: Initializer | None = None,
        seed: int = 0,
        memory: RowMemory | None = None,
        has_marks: bool = False,
    ) -> None:
        rule = SGD(lr=1.0) if rule is None else rule
        initializer = Zeros() if initializer is None else initializer
        self.dim = dim
        self.rule = rule
        self.memory = RowMemory() if memory is None else memory
        self.row_words = dim * (1 + rule.num_states) + rule.has_count
        inline = self.row_words <= _INLINE_WORDS
        self._growth = _GROWTH if inline else _WIDE_GROWTH
        entry_words = sparse.entry_words(self.row_words if inline else 1)
        if has_marks and entry_words in _WITHOUT_MARKS:
            entry_words += 1
        slots = index.LINE_BYTES // (4 * entry_words)
        self._slots, self._fill = slots, _FILL[slots] if inline else _WIDE_FILL

        self.layout = np.zeros(index.LAYOUT_WORDS, np.int64)
        self.layout[index.ENTRY_WORDS] = entry_words
        self.layout[index.SLOTS] = slots
        self.layout[index.INLINE] = inline
        self.layout[index.DIM] = dim
        self.layout[index.ROW_WORDS] = self.row_words
        self.layout[index.RULE] = rule.code
        self.layout[index.INITIALIZER] = initializer.code
        self.layout[index.SEED] = np.uint64(seed & (2**64 - 1)).astype(np.int64)
        self._num_keys = np.empty(index.NUM_BUCKETS, np.uint64)  # for each bucket, the number of keys to insert
        self.pass_number = 0
        """The number of the current pass over the data; 0 if passes are not recorded."""
        self.parameters = np.zeros(NUM_PARAMETERS, np.float64)
        self.parameters[: len(rule.hyper)] = rule.hyper
        self.parameters[INITIAL_A], self.parameters[INITIAL_B] = initializer.arguments

        # Until their first row, all buckets share one empty home line, its tail and the line of key 0.
        self.directory = np.zeros(index.DIRECTORY_WORDS, np.uint64)
        self._nothing = self.memory.zeros((_HEADER_LINES + 1 + index.TAIL_LINES) * index.LINE_BYTES)
        self.lines = [self._nothing] * index.NUM_BUCKETS
        self._rows: list[Pages | RowBlock | None] = [None] * index.NUM_BUCKETS
        self.directory[index.LINES : index.ROWS : 2] = self._nothing.address + _HEADER_LINES * index.LINE_BYTES
        self.directory[index.LINES + 1 : index.ROWS : 2] = 1
        self.directory[index.TAIL : index.SALT] = index.TAIL_LINES
        self.directory[index.SALT :] = index.FIRST_SALT
        self._grown = np.zeros_like(self.directory)  # describes a bucket's new lines while the bucket grows

    def __len__(self) -> int:
        return int(self.counts.sum())

    @property
    def counts(self) -> npt.NDArray[np.uint64]:
        """The number of rows in each bucket (uint64 [512]). The array is a view, which changes with the store."""
        return self.directory[index.COUNT : index.LIMIT]

    @property
    def num_bytes(self) -> int:
        """The memory of the index and the rows in bytes. For wide rows, only the row slots used so far count."""
        lines = {id(block): block.num_bytes for block in self.lines}
        slots = 0 if self.layout[index.INLINE] else int(self.directory[index.USED : index.FREE].sum())
        return sum(lines.values()) + 4 * self.row_words * slots

    def pull(self, keys: Keys, out: Floats) -> None:
        """Read the values of `keys` (uint64 [n]) into `out`, a contiguous float32 array of n * dim elements."""
        _check_size("values", out, len(keys), self.dim)
        if self.memory.spilled_bytes:
            self.memory.read_ahead.read(self.directory, self.layout, keys)
        sparse.gather(self.directory, self.layout, self.parameters, keys, out.reshape(-1))

    def reserve(self, keys: Keys) -> None:
        """Allocate memory for the rows of `keys`. Raises MemoryError if there is not enough, and then changes no row.

        After this call, a push of `keys` does not run out of memory, unless an attacker has chosen keys that overflow a
        bucket's spare lines. The method does not check which keys already have rows, because this would cost as much as
        the push. If there is enough memory, each bucket gets space for all its keys in `keys`. If the system never
        rejects memory, this method does nothing.
        """
        if len(keys) > _FEW_KEYS and not self.memory.may_refuse():
            return
        num_keys = self._num_keys
        if sparse.has_room(self.directory, keys, num_keys):
            return
        limits = _limits(self.directory).copy()
        if (self.counts + num_keys <= np.maximum(limits, 2 * self.counts)).all():
            spare = None
            try:
                # This memory is only reserved and not written, so it uses no pages.
                spare = self.memory.zeros(max(lines.num_bytes for lines in self.lines))
                self._make_room(num_keys)
                return
            except MemoryError:
                del spare  # now there is enough memory to shrink one bucket after another
                self._take_back(limits)
        if self.memory.spilled_bytes:
            self.memory.read_ahead.read(self.directory, self.layout, keys)
        num_absent = np.empty_like(num_keys)
        sparse.count_absent(self.directory, self.layout, keys, num_absent)
        self._make_room(num_absent)

    def make_room_evenly(self, num_rows: int) -> None:
        """Allocate memory in an empty store for `num_rows` keys that are spread evenly over the buckets.

        The buckets share one block of memory, for which the system can provide huge pages.
        """
        share = num_rows / index.NUM_BUCKETS
        if share < _SMALL_ROWS:  # growing a small bucket is cheap, so it needs no memory in advance
            return
        count = int(share + 3 * share**0.5)
        limits = [_next_limit(bucket, count, self._growth) for bucket in range(index.NUM_BUCKETS)]
        num_lines = [int(limit / (self._slots * self._fill)) + 1 for limit in limits]
        sizes = [(_HEADER_LINES + lines + index.TAIL_LINES) * index.LINE_BYTES for lines in num_lines]
        block = self.memory.zeros(sum(sizes))
        for bucket, start in enumerate(itertools.accumulate(sizes[:-1], initial=block.address)):
            self._grow_rows(bucket, limits[bucket])
            self.lines[bucket] = RowBlock(start, sizes[bucket], block, is_spilled=False)
            self.directory[2 * bucket] = start + _HEADER_LINES * index.LINE_BYTES
            self.directory[2 * bucket + 1] = num_lines[bucket]
            self.directory[index.LIMIT + bucket] = limits[bucket]

    def _make_room(self, num_new: npt.NDArray[np.uint64]) -> None:
        """Allocate memory for new rows in the buckets. `num_new` (uint64 [512]) has the number for each bucket."""
        counts = self.counts + num_new
        for bucket in np.flatnonzero(counts > _limits(self.directory)).tolist():
            self.resize(bucket, _next_limit(bucket, int(counts[bucket]) - 1, self._growth))

    def _take_back(self, limits: npt.NDArray[np.uint64]) -> None:
        """Shrink enlarged buckets to their previous `limits`, until memory is refused."""
        with suppress(MemoryError):
            for bucket in np.flatnonzero(limits < _limits(self.directory)).tolist():
                self.resize(bucket, int(limits[bucket]))

    def push(self, keys: Keys, grads: Floats) -> None:
        """Update the rows of `keys` with `grads`, a contiguous float32 array of n * dim elements.

        A duplicate key is updated twice. If the update rule is not linear, the caller must first sum the gradients of
        duplicates.
        """
        _check_size("gradients", grads, len(keys), self.dim)
        flat, done = grads.reshape(-1), 0
        if self.memory.spilled_bytes:
            self.memory.read_ahead.read(self.directory, self.layout, keys)
        while True:
            done = kernels.push(self.directory, self.layout, self.parameters, keys, flat, done)
            if done == len(keys):
                return
            self._grow(keys[done])

    def write_records(self, keys: Keys, records: Floats) -> None:
        """Set complete rows with their state. `records` is float32 [n, row_words]."""
        _check_size("records", records, len(keys), self.row_words)
        flat, done = records.reshape(-1), 0
        while True:
            done = sparse.write_records(self.directory, self.layout, keys, flat, done)
            if done == len(keys):
                return
            self._grow(keys[done])

    def read_records(self, keys: Keys) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """Return the rows of `keys` with their state (float32 [n, row_words]), and whether they exist (bool [n]).

        The contents of missing rows are undefined.
        """
        records, found = np.empty((len(keys), self.row_words), np.float32), np.empty(len(keys), np.uint8)
        sparse.read_records(self.directory, self.layout, keys, records.reshape(-1), found)
        return records, found.view(np.bool_)

    def erase(self, keys: Keys) -> int:
        return int(index.erase(self.directory, self.layout, keys))

    def bucket(self, bucket: int) -> tuple[Keys, Floats]:
        """Return a copy of one bucket: its keys (uint64 [n]) and records (float32 [n, row_words])."""
        count = int(self.directory[index.COUNT + bucket])
        keys, rows = np.empty(count, np.uint64), np.empty(count, np.uint64)
        if count:
            self.lines[bucket].will_be_read()
            block = self._rows[bucket]
            if isinstance(block, RowBlock):
                block.will_be_read()
            index.bucket_keys(self.directory, self.layout, bucket, keys, rows)
        records = np.empty((len(keys), self.row_words), np.float32)
        sparse.copy_records(rows, self.row_words, records.reshape(-1))
        return keys, records

    def drop_bucket(self, bucket: int) -> None:
        """Remove a bucket's rows and free their memory, in constant time."""
        directory = self.directory
        directory[2 * bucket], directory[2 * bucket + 1] = self._nothing.address + _HEADER_LINES * index.LINE_BYTES, 1
        directory[index.TAIL + bucket] = index.TAIL_LINES
        directory[index.SALT + bucket] = index.FIRST_SALT
        for section in (index.ROWS, index.COUNT, index.LIMIT, index.USED, index.FREE):
            directory[section + bucket] = 0
        self.lines[bucket] = self._nothing
        self._rows[bucket] = None

    def load_bucket(self, bucket: int, keys: Keys, records: Floats) -> None:
        """Replace a bucket by data in the format of :meth:`bucket`. All memory is allocated before the first write."""
        _check_size("records", records, len(keys), self.row_words)
        self.drop_bucket(bucket)
        if len(keys):
            self.resize(bucket, _next_limit(bucket, len(keys), self._growth))
        self.write_records(keys, records)

    def items(self) -> Iterator[tuple[Keys, Floats]]:
        """Yield every nonempty bucket in the format of :meth:`bucket`."""
        for bucket in range(index.NUM_BUCKETS):
            if self.directory[index.COUNT + bucket]:
                yield self.bucket(bucket)

    def _grow(self, key: np.uint64) -> None:
        """Give the bucket of `key` more space for rows, more spare lines or another hash salt: the one that it needs.

        If there is not enough memory, nothing changes.
        """
        directory, bucket = self.directory, _bucket_of(key)
        count, limit = int(directory[index.COUNT + bucket]), int(directory[index.LIMIT + bucket])
        if count >= limit:
            self.resize(bucket, _next_limit(bucket, count, self._growth))
        elif index.is_run_too_long(directory, key, self.layout):
            self.resize(bucket, limit, salt=_new_salt())
        else:
            self.resize(bucket, limit, tail=2 * int(directory[index.TAIL + bucket]))

    def resize(self, bucket: int, limit: int, *, tail: int = 0, salt: int = 0) -> None:
        """Move a bucket to new lines for `limit` rows, with `tail` spare lines and the hash salt `salt`.

        A `tail` or `salt` of 0 keeps the current value. If the rows do not fit, the number of spare lines grows, or the
        salt changes.
        """
        directory, grown = self.directory, self._grown
        tail = tail or int(directory[index.TAIL + bucket])
        num_lines = int(directory[2 * bucket + 1])
        num_old = num_lines + int(directory[index.TAIL + bucket])
        if limit != directory[index.LIMIT + bucket]:
            num_lines = int(limit / (self._slots * self._fill)) + 1
            self._grow_rows(bucket, limit)
        grown[index.SALT + bucket] = salt or directory[index.SALT + bucket]
        self.lines[bucket].will_be_read()
        for attempt in itertools.count():
            block = self.memory.zeros((_HEADER_LINES + num_lines + tail) * index.LINE_BYTES)
            grown[2 * bucket] = block.address + _HEADER_LINES * index.LINE_BYTES
            grown[2 * bucket + 1] = num_lines
            grown[index.TAIL + bucket] = tail
            grown[index.LIMIT + bucket] = limit
            grown[index.COUNT + bucket] = 0
            if index.rehash(directory[2 * bucket], num_old, self.layout, bucket, grown):
                break
            tail *= 2
            if attempt:  # even the longer tail was too short
                grown[index.SALT + bucket] = _new_salt()
        for at in (
            2 * bucket,
            2 * bucket + 1,
            *(section + bucket for section in (index.TAIL, index.LIMIT, index.SALT)),
        ):
            directory[at] = grown[at]
        self.lines[bucket] = block

    def _grow_rows(self, bucket: int, limit: int) -> None:
        """Allocate memory for `limit` wide rows of a bucket. The memory never shrinks."""
        if self.layout[index.INLINE]:
            return
        num_bytes = 4 * self.row_words * limit
        pages = self._rows[bucket]
        if pages is None:
            pages = self._rows[bucket] = Pages(num_bytes) if self.memory.limit is None else self.memory.zeros(num_bytes)
        elif num_bytes > pages.num_bytes:
            if isinstance(pages, Pages):
                pages.resize(num_bytes)
            else:
                pages = self._rows[bucket] = self.memory.enlarged(pages, num_bytes)
        self.directory[index.ROWS + bucket] = pages.address
