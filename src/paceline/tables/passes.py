"""In which pass over the data the rows of a sparse table were last pushed: what tells which features are seen no more.

A store notes it from :func:`begin_pass` on, in bits that its index has to spare (:mod:`paceline.kernels.index`): rows
take no more memory, but for those of two words, which then take as much as rows of three.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.kernels import index
from paceline.tables.sparse_store import SparseStore
from paceline.tables.types import Keys


def has_room_for_marks(store: SparseStore) -> bool:
    """Return whether a store's lines have bits to spare; else it must be one that was made with ``has_marks``."""
    return bool(store.layout[index.ENTRY_WORDS] * store.layout[index.SLOTS] * 4 < index.LINE_BYTES)


def begin_pass(store: SparseStore, number: int, rows_of: int) -> None:
    """Have what is pushed from now on count as of pass `number`.

    If nothing was noted so far, the rows there count as last pushed in pass `rows_of`. Marks go round at 63 passes:
    rows that are older look like newer ones, and must have been erased before. Where `number` is an earlier pass than
    before, which a snapshot was of that is gone on with, no row counts as pushed in a later one.
    """
    assert has_room_for_marks(store)
    former, store.pass_number = store.pass_number, number
    if former == 0:
        store.layout[index.MARK] = _mark_of(rows_of)
        index.mark_all(store.directory, store.layout)
    store.layout[index.MARK] = _mark_of(number)
    for bucket in range(index.NUM_BUCKETS if former > number else 0):
        later = unseen_keys(store, bucket, max(index.NUM_MARKS - (former - number), 1))
        index.mark(store.directory, store.layout, later)


def note_push(store: SparseStore, keys: Keys) -> None:
    """Note that the rows of `keys` (uint64 [n]) were pushed in this pass, if passes are noted."""
    if store.layout[index.MARK] != 0:
        index.mark(store.directory, store.layout, keys)


def last_passes(store: SparseStore, bucket: int, keys: Keys) -> npt.NDArray[np.float32]:
    """Return in which pass the rows of a bucket's `keys` (uint64 [n]) were last pushed.

    Those without a row, which were erased since, count as pushed as long ago as is noted.
    """
    _, are_there = store.read_records(keys)
    ages = np.where(are_there, 0, index.NUM_MARKS - 1)
    older = np.flatnonzero(are_there)
    for age in range(1, index.NUM_MARKS):
        older = older[np.isin(keys[older], unseen_keys(store, bucket, age))]
        if not len(older):
            break
        ages[older] = age
    numbers: npt.NDArray[np.float32] = (store.pass_number - ages).astype(np.float32)
    return numbers


def note_passes(store: SparseStore, keys: Keys, numbers: npt.NDArray[np.int64]) -> None:
    """Note that the rows of `keys` (uint64 [n]) were last pushed in passes `numbers` (int64 [n])."""
    now = store.pass_number
    oldest, mark = now - index.NUM_MARKS + 1, store.layout[index.MARK]
    clipped = np.clip(numbers, oldest, now)
    for number in np.unique(clipped).tolist():
        store.layout[index.MARK] = _mark_of(number)
        index.mark(store.directory, store.layout, keys[clipped == number])
    store.layout[index.MARK] = mark


def unseen_keys(store: SparseStore, bucket: int, num_passes: int) -> Keys:
    """Return the keys of a bucket's rows that were pushed neither in this pass nor in `num_passes` - 1 before."""
    keys = np.empty(int(store.counts[bucket]), np.uint64)
    if not len(keys) or store.layout[index.MARK] == 0:
        return keys[:0]
    return keys[: index.old_keys(store.directory, store.layout, bucket, num_passes, keys)]


def _mark_of(number: int) -> int:
    return 1 + number % index.NUM_MARKS
