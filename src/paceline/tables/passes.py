"""Record the last pass over the data in which each row of a sparse table was pushed, to find unused features.

A store records passes after the first :func:`begin_pass`. A row's last pass is stored as its *mark*, in unused bits of
the index (:mod:`paceline.kernels.index`). Marks need additional memory only for rows of two words, which then use as
much as rows of three words.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.kernels import index
from paceline.tables.sparse_store import SparseStore
from paceline.tables.types import Keys


def has_room_for_marks(store: SparseStore) -> bool:
    """Return whether the index of a store has unused bits for marks. If not, the store must be created with marks."""
    return bool(store.layout[index.ENTRY_WORDS] * store.layout[index.SLOTS] * 4 < index.LINE_BYTES)


def begin_pass(store: SparseStore, number: int, rows_of: int) -> None:
    """Begin the pass `number` over the data.

    At the first call, pass `rows_of` becomes the last pass of existing rows. Marks repeat after 63 passes, so the
    caller must erase rows that were not pushed for 63 passes. If the training was resumed from a snapshot, `number` may
    be smaller than before.
    """
    assert has_room_for_marks(store)
    former, store.pass_number = store.pass_number, number
    if former == 0:
        store.layout[index.MARK] = _mark_of(max(rows_of, number - index.NUM_MARKS + 1))
        index.mark_all(store.directory, store.layout)
    store.layout[index.MARK] = _mark_of(number)
    for bucket in range(index.NUM_BUCKETS if former > number else 0):
        later = unseen_keys(store, bucket, max(index.NUM_MARKS - (former - number), 1))
        index.mark(store.directory, store.layout, later)


def record_push(store: SparseStore, keys: Keys) -> None:
    if store.layout[index.MARK] != 0:
        index.mark(store.directory, store.layout, keys)


def last_passes(store: SparseStore, bucket: int, keys: Keys) -> npt.NDArray[np.float32]:
    """Return the last pass in which each row was pushed. For erased rows this is the oldest recorded pass."""
    _, exist = store.read_records(keys)
    ages = np.where(exist, 0, index.NUM_MARKS - 1)
    older = np.flatnonzero(exist)
    for age in range(1, index.NUM_MARKS):
        older = older[np.isin(keys[older], unseen_keys(store, bucket, age))]
        if not len(older):
            break
        ages[older] = age
    numbers: npt.NDArray[np.float32] = (store.pass_number - ages).astype(np.float32)
    return numbers


def record_passes(store: SparseStore, keys: Keys, numbers: npt.NDArray[np.int64]) -> None:
    """Record that the rows of `keys` (uint64 [n]) were last pushed in passes `numbers` (int64 [n])."""
    current = store.pass_number
    oldest, mark = current - index.NUM_MARKS + 1, store.layout[index.MARK]
    clipped = np.clip(numbers, oldest, current)
    for number in np.unique(clipped).tolist():
        store.layout[index.MARK] = _mark_of(number)
        index.mark(store.directory, store.layout, keys[clipped == number])
    store.layout[index.MARK] = mark


def unseen_keys(store: SparseStore, bucket: int, num_passes: int) -> Keys:
    """Return the keys of a bucket's rows without a push in the last `num_passes` passes, including the current one."""
    keys = np.empty(int(store.counts[bucket]), np.uint64)
    if not len(keys) or store.layout[index.MARK] == 0:
        return keys[:0]
    return keys[: index.old_keys(store.directory, store.layout, bucket, num_passes, keys)]


def _mark_of(number: int) -> int:
    return 1 + number % index.NUM_MARKS
