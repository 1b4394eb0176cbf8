"""Kernels of a sparse table: they look up, read and update rows, and write and copy whole records (values and state).

The arguments `directory` and `layout` describe the hash index (see :mod:`paceline.kernels.index`), and `parameters` the
update rule and the initializer (see :mod:`paceline.kernels.parameters`). A kernel that inserts rows stops at a key
whose bucket must grow first, and returns the position of this key. The caller grows the bucket and calls the kernel
again from this position.

The kernels that update rows receive two kernels: `update`, which applies an update rule to a row, and `start_state`,
which sets the state of a new row. :mod:`paceline.tables.rules` compiles them.
"""

from __future__ import annotations

import numpy as np

from .index import (
    AHEAD,
    COUNT,
    DIM,
    ENTRY_WORDS,
    INITIALIZER,
    INLINE,
    LIMIT,
    NUM_BUCKETS,
    ROW_WORDS,
    RULE,
    SEED,
    SLOTS,
    find_entry,
    home_line,
    mix,
    place_entry,
    row_of_entry,
    take_slot,
)
from .initializers import initial_row
from .jit import inlined, njit, uncounted
from .memory import floats_at, prefetch, store_u32
from .parameters import INITIAL_A, INITIAL_B, hyper_of

_U0, _U1 = np.uint64(0), np.uint64(1)
_DIGEST_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_DIGEST_SHIFT = np.uint64(32)
_KEY = np.uint64(8)
_WORD = np.uint64(4)
_BUCKET_SHIFT = np.uint64(55)
_RING = 64
_BLOCK = 64  # if rows are outside the index entries, this number of rows is looked up before the first is used
SCRATCH = _RING + _BLOCK


def entry_words(row_words: int) -> int:
    """Return the number of 32-bit words of an index entry for rows of `row_words` words."""
    return max(3, 2 + row_words)


@njit(cache=True, nogil=True, inline="always")
def bytes_of_entry(layout):  # type: ignore[no-untyped-def]
    """Return the size of an index entry in bytes."""
    return np.uint64(layout[ENTRY_WORDS]) * _WORD


@uncounted(cache=True, nogil=True)
def _find_rows(directory, layout, keys, start, stop, rows, lines, prefetch_words):  # type: ignore[no-untyped-def]
    """Write the row address of each of keys[start:stop] to `rows` (0 if absent). Prefetch the start of each row."""
    entry_bytes, slots = bytes_of_entry(layout), layout[SLOTS]
    for i in range(start, stop):
        line = home_line(directory, keys[i])
        lines[i - start] = line
        prefetch(line)
    for i in range(start, stop):
        entry = find_entry(directory, lines[i - start], keys[i], entry_bytes, slots)
        if entry != _U0:
            entry = row_of_entry(directory, entry, keys[i], layout)
            for word in range(0, prefetch_words, 16):
                prefetch(entry + np.uint64(word) * _WORD)
        rows[i - start] = entry


@uncounted(cache=True, nogil=True)
def _initial_row(layout, parameters, key, out, at):  # type: ignore[no-untyped-def]
    kind, seed = layout[INITIALIZER], np.uint64(layout[SEED])
    initial_row(kind, seed, key, out, at, layout[DIM], parameters[INITIAL_A], parameters[INITIAL_B])


@njit(cache=True, nogil=True, forceinline=True)
def _gather_narrow(directory, layout, parameters, keys, out, slots, entry_bytes, dim):  # type: ignore[no-untyped-def]
    # In the common cases, the callers pass literals for slots, entry_bytes and dim, which the compiler inlines. This
    # reduces the time per key from 22 to 20 ns at 10^7 rows.
    num_keys = len(keys)
    ring = np.empty(_RING, np.uint64)
    for i in range(min(AHEAD, num_keys)):
        line = home_line(directory, keys[i])
        ring[i] = line
        prefetch(line)
    for i in range(num_keys):
        line = ring[i & (_RING - 1)]
        if i + AHEAD < num_keys:
            ahead = home_line(directory, keys[i + AHEAD])
            ring[(i + AHEAD) & (_RING - 1)] = ahead
            prefetch(ahead)
        entry = find_entry(directory, line, keys[i], entry_bytes, slots)
        if entry == _U0:
            _initial_row(layout, parameters, keys[i], out, i * dim)
        else:
            row = floats_at(entry + _KEY, dim)
            for j in range(dim):
                out[i * dim + j] = row[j]


@njit(cache=True, nogil=True)
def _gather_wide(directory, layout, parameters, keys, out):  # type: ignore[no-untyped-def]
    dim, num_keys = layout[DIM], len(keys)
    rows, lines = np.empty(_BLOCK, np.uint64), np.empty(_BLOCK, np.uint64)
    for start in range(0, num_keys, _BLOCK):
        stop = min(num_keys, start + _BLOCK)
        _find_rows(directory, layout, keys, start, stop, rows, lines, dim)
        for i in range(start, stop):
            if rows[i - start] == _U0:
                _initial_row(layout, parameters, keys[i], out, i * dim)
            else:
                row = floats_at(rows[i - start], dim)
                for j in range(dim):
                    out[i * dim + j] = row[j]


@njit(cache=True, nogil=True)
def gather(directory, layout, parameters, keys, out):  # type: ignore[no-untyped-def]
    """Write the values of `keys` (uint64 [n]) to `out` (float32 [n * dim]). Absent keys have their initial values."""
    slots, dim = layout[SLOTS], layout[DIM]
    if layout[INLINE] == 1:
        if dim == 1 and slots == 5:
            _gather_narrow(directory, layout, parameters, keys, out, 5, np.uint64(12), 1)
        elif dim == 1 and slots == 3:
            _gather_narrow(directory, layout, parameters, keys, out, 3, np.uint64(20), 1)
        else:
            _gather_narrow(directory, layout, parameters, keys, out, slots, bytes_of_entry(layout), dim)
    else:
        _gather_wide(directory, layout, parameters, keys, out)


@uncounted(cache=True, nogil=True)
def _place_row(directory, layout, key, line):  # type: ignore[no-untyped-def]
    """Create a row for an absent key, without values. Return its address, or 0 if the bucket must grow first."""
    entry = place_entry(directory, line, key, bytes_of_entry(layout), layout[SLOTS])
    if entry == _U0:
        return _U0
    if layout[INLINE] == 0:
        bucket = np.int64(mix(key) >> _BUCKET_SHIFT)
        store_u32(entry + _KEY, np.uint32(take_slot(directory, bucket, layout[ROW_WORDS])))
    return row_of_entry(directory, entry, key, layout)


@uncounted(nogil=True)
def _insert_row(directory, layout, parameters, key, line, start_state):  # type: ignore[no-untyped-def]
    """Create a row with initial values for an absent key. Return its address, or 0 if the bucket must grow first."""
    row = _place_row(directory, layout, key, line)
    if row != _U0:
        dim, words = layout[DIM], layout[ROW_WORDS]
        record = floats_at(row, words)
        _initial_row(layout, parameters, key, record, 0)
        start_state(layout[RULE], record, words, dim, 0, dim, parameters)
    return row


@njit(cache=True, nogil=True)
def has_room(directory, keys, counts):  # type: ignore[no-untyped-def]
    """Return whether all `keys` (uint64 [n]) can be inserted without the growth of a bucket, in 1 ns per key.

    If not, the function sets `counts` (uint64 [512]) to the number of `keys` that belong to each bucket.
    """
    num_keys, num_easy = np.uint64(len(keys)), 0
    if len(keys) <= _BLOCK:  # for few keys, test whether every bucket has room for all of them
        for i in range(len(keys)):
            at = np.int64(mix(keys[i]) >> _BUCKET_SHIFT)
            num_easy += directory[COUNT + at] + num_keys <= directory[LIMIT + at]
    if num_easy == len(keys):
        return True
    counts[:] = _U0
    for i in range(len(keys)):
        counts[np.int64(mix(keys[i]) >> _BUCKET_SHIFT)] += _U1
    num_crowded = 0
    for bucket in range(NUM_BUCKETS):
        num_crowded += directory[COUNT + bucket] + counts[bucket] > directory[LIMIT + bucket]
    return num_crowded == 0


@njit(cache=True, nogil=True)
def count_absent(directory, layout, keys, absent):  # type: ignore[no-untyped-def]
    """Write the number of `keys` without a row in each bucket to `absent` (uint64 [512]). Each duplicate counts."""
    entry_bytes, slots = bytes_of_entry(layout), layout[SLOTS]
    lines = np.empty(_BLOCK, np.uint64)
    absent[:] = _U0
    for start in range(0, len(keys), _BLOCK):
        stop = min(len(keys), start + _BLOCK)
        for i in range(start, stop):
            lines[i - start] = home_line(directory, keys[i])
            prefetch(lines[i - start])
        for i in range(start, stop):
            entry = find_entry(directory, lines[i - start], keys[i], entry_bytes, slots)
            absent[np.int64(mix(keys[i]) >> _BUCKET_SHIFT)] += np.uint64(entry == _U0)


@inlined()
def push_narrow(directory, layout, parameters, keys, grads, scratch, sizes, update, start_state):  # type: ignore[no-untyped-def]
    """Update the rows of `keys` in a table whose rows are stored in the index entries. Otherwise like `push_wide`."""
    slots, entry_bytes, dim, words = sizes
    # In the common cases the compiler knows the sizes, has dim 1 and inlines the rule. At 10^7 rows, this reduces SGD
    # from 26 to 17 ns per key and FTRL from 30 to 20; at 10^5 rows, Adagrad from 16 to 6.
    num_keys, hyper, rule = len(keys), hyper_of(parameters), layout[RULE]
    ring, gradient, step = scratch[:_RING], np.uint64(grads.ctypes.data), np.uint64(dim) * _WORD
    for i in range(min(AHEAD, num_keys)):
        line = home_line(directory, keys[i])
        ring[i] = line
        prefetch(line)
    for i in range(num_keys):
        line = ring[i & (_RING - 1)]
        if i + AHEAD < num_keys:
            ahead = home_line(directory, keys[i + AHEAD])
            ring[(i + AHEAD) & (_RING - 1)] = ahead
            prefetch(ahead)
        entry = find_entry(directory, line, keys[i], entry_bytes, slots)
        row = entry + _KEY
        if entry == _U0:
            row = _insert_row(directory, layout, parameters, keys[i], line, start_state)
            if row == _U0:
                return i
        update(rule, floats_at(row, words), dim, floats_at(gradient, dim), hyper)
        gradient += step
    return num_keys


@inlined()
def push_wide(directory, layout, parameters, keys, grads, scratch, update, start_state):  # type: ignore[no-untyped-def]
    """Update the rows of `keys` with the gradients `grads` (float32 [n * dim]), and create absent rows.

    Return len(keys) if all rows are updated. Otherwise return the position of a key whose bucket must grow first.
    """
    # The common update rules are inlined, which reduces SGD of dim 16 at 10^5 rows from 34 to 21 ns per key.
    dim, words, num_keys, hyper, rule = layout[DIM], layout[ROW_WORDS], len(keys), hyper_of(parameters), layout[RULE]
    rows, lines = scratch[:_BLOCK], scratch[_BLOCK:]
    gradient, step = np.uint64(grads.ctypes.data), np.uint64(dim) * _WORD
    for start in range(0, num_keys, _BLOCK):
        stop = min(num_keys, start + _BLOCK)
        _find_rows(directory, layout, keys, start, stop, rows, lines, words)
        for i in range(start, stop):
            row = rows[i - start]
            if row == _U0:  # the look-up found no row, but this loop may have inserted it: `keys` may have duplicates
                entry = find_entry(directory, lines[i - start], keys[i], bytes_of_entry(layout), layout[SLOTS])
                if entry != _U0:
                    row = row_of_entry(directory, entry, keys[i], layout)
                else:
                    row = _insert_row(directory, layout, parameters, keys[i], lines[i - start], start_state)
                    if row == _U0:
                        return i
            update(rule, floats_at(row, words), dim, floats_at(gradient, dim), hyper)
            gradient += step
    return num_keys


@njit(cache=True, nogil=True)
def write_records(directory, layout, keys, records, first):  # type: ignore[no-untyped-def]
    """Set the records (values and state) of ``keys[first:]`` to `records` (float32 [n * row_words]).

    The return value is that of :func:`push_wide`.
    """
    words, num_keys = layout[ROW_WORDS], len(keys)
    lines = np.empty(_BLOCK, np.uint64)
    for start in range(first, num_keys, _BLOCK):
        stop = min(num_keys, start + _BLOCK)
        for i in range(start, stop):
            lines[i - start] = home_line(directory, keys[i])
            prefetch(lines[i - start])
        for i in range(start, stop):
            line = lines[i - start]
            entry = find_entry(directory, line, keys[i], bytes_of_entry(layout), layout[SLOTS])
            if entry == _U0:
                row = _place_row(directory, layout, keys[i], line)
                if row == _U0:
                    return i
            else:
                row = row_of_entry(directory, entry, keys[i], layout)
            record = floats_at(row, words)
            for j in range(words):
                record[j] = records[i * words + j]
    return len(keys)


@njit(cache=True, nogil=True)
def read_records(directory, layout, keys, records, found):  # type: ignore[no-untyped-def]
    """Write the records (values and state) of `keys` to `records` (float32 [n * row_words]).

    ``found[i]`` (uint8 [n]) is 1 if key i has a row.
    """
    words, num_keys = layout[ROW_WORDS], len(keys)
    rows, lines = np.empty(_BLOCK, np.uint64), np.empty(_BLOCK, np.uint64)
    for start in range(0, num_keys, _BLOCK):
        stop = min(num_keys, start + _BLOCK)
        _find_rows(directory, layout, keys, start, stop, rows, lines, words)
        for i in range(start, stop):
            found[i] = 0
            if rows[i - start] != _U0:
                found[i] = 1
                record = floats_at(rows[i - start], words)
                for j in range(words):
                    records[i * words + j] = record[j]


@njit(cache=True, nogil=True)
def copy_records(rows, words, out):  # type: ignore[no-untyped-def]
    """Copy the records at the addresses `rows` to `out` (float32 [n * words])."""
    for i in range(len(rows)):
        record = floats_at(rows[i], words)
        for j in range(words):
            out[i * words + j] = record[j]


@njit(cache=True, nogil=True)
def largest(array):  # type: ignore[no-untyped-def]
    """Return the largest magnitude in a float32 array. It is NaN if the array has a NaN, and 0 for an empty array."""
    # The loop compares the bits of the magnitudes as integers, because the compiler vectorizes this loop. The integers
    # have the order of the magnitudes, and NaN is larger than infinity. Without the conversion to 32 bits, the loop
    # would compare 64-bit integers, and 160,000 numbers would take 30 µs instead of 13.
    bits, found = array.view(np.uint32), np.zeros(1, np.uint32)
    top = np.uint32(0)
    for i in range(len(bits)):
        top = max(top, np.uint32(bits[i] & np.uint32(0x7FFFFFFF)))
    found[0] = top
    return found.view(np.float32)[0]


@njit(cache=True, nogil=True)
def digest_records(keys, words):  # type: ignore[no-untyped-def]
    """Return a hash (uint64) of a set of rows, which does not depend on their order.

    `keys` is uint64 [n], and `words` (uint32 [n, w]) are the bits of their records (values and state). Two different
    sets of rows have equal hashes with a probability of about 2^-64.
    """
    total = _U0
    for i in range(words.shape[0]):
        hashed = mix(keys[i] + _DIGEST_FACTOR)
        for j in range(words.shape[1]):
            hashed = (hashed ^ np.uint64(words[i, j])) * _DIGEST_FACTOR
            hashed ^= hashed >> _DIGEST_SHIFT
        total += mix(hashed + _DIGEST_FACTOR)
    return total
