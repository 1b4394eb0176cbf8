"""Numba kernels that convert Criteo rows, LIBSVM rows and Arrow columns of strings to keys and values.

The reference implementation of each kernel is in ``tests/reference/text.py``. :mod:`paceline.kernels.hashing` defines
the hash that converts text to keys. The parsers read ``text[start:end]``, which must consist of complete lines. They
may load, but never use, eight bytes after ``end``, so ``text`` must be eight bytes longer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.kernels.jit import njit, uncounted
from paceline.kernels.text.bytes import (
    as_bits,
    byte_at,
    category_end,
    digits_of,
    has_control,
    hash_finish,
    hash_span,
    hash_start,
    hash_step,
    hash_words,
    low_bytes,
    skip_blanks,
    word_at,
)
from paceline.kernels.text.codes import (
    BAD_BYTE,
    BAD_CRITEO_LABEL,
    BAD_FIELDS,
    BAD_INDEX,
    BAD_INTEGER,
    BAD_LABEL,
    BAD_VALUE,
)
from paceline.kernels.text.criteo import CRITEO_FEATURES, CRITEO_INTEGERS, SMALL_INTEGERS, criteo_tables
from paceline.kernels.text.values import MAX_FLOAT32, powers_of_ten

ROWS, BAD, POSITION, NONZEROS, ALL_ONES = range(5)
"""Indices of the array `counts`: rows, bad lines, the position at which the parser stopped, pairs (key, value), and
whether all values are 1.
"""
NUM_COUNTS = 5

FLOAT_OK, FLOAT_MISSING, FLOAT_BAD = range(3)
"""The status codes that :func:`parse_floats` writes for each string."""

_TAB, _NEWLINE, _RETURN, _SPACE, _COLON, _HASH = 9, 10, 13, 32, 58, 35


@uncounted()
def _line_end(text, at):  # type: ignore[no-untyped-def]
    """Return the position after the newline of the line that contains `at`."""
    while byte_at(text, at) != _NEWLINE:
        at += 1
    return at + 1


@uncounted()
def _count_at_most(thresholds, x):  # type: ignore[no-untyped-def]
    """Return the number of the ascending `thresholds` that are at most `x`.

    This replaces ``np.searchsorted``, for which Numba imports SciPy in 0.2 s.
    """
    low, high = 0, thresholds.shape[0]
    while low < high:
        middle = (low + high) >> 1
        if thresholds[middle] <= x:
            low = middle + 1
        else:
            high = middle
    return low


@uncounted()
def _criteo_integers(text, at, seeds, small, thresholds, keys, base):  # type: ignore[no-untyped-def]
    """Parse the 13 integer fields from `at` on. Return (position after the fields, fault code or 0)."""
    for field in range(CRITEO_INTEGERS):
        byte = byte_at(text, at)
        if byte == _TAB:
            keys[base + field] = hash_finish(hash_start(seeds[field], 0))
            at += 1
            continue
        negative = byte == 45
        if negative:
            at += 1
        first = at
        x = 0
        digit = byte_at(text, at) - 48
        while 0 <= digit <= 9 and at - first < 19:
            x = x * 10 + digit
            at += 1
            digit = byte_at(text, at) - 48
        if byte_at(text, at) != _TAB or not 1 <= at - first <= 18:
            ends = digit == _NEWLINE - 48 or (digit == _RETURN - 48 and byte_at(text, at + 1) == _NEWLINE)
            short = ends and (1 <= at - first <= 18 or (at == first and not negative))
            return at, BAD_FIELDS if short else BAD_INTEGER
        at += 1
        if negative:
            x = -x
        elif x < SMALL_INTEGERS:
            x = small[x]
        else:
            x = _count_at_most(thresholds, x) + 10
        keys[base + field] = hash_finish(hash_step(hash_start(seeds[field], 8), as_bits(x)))
    return at, 0


@uncounted()
def _criteo_categories(text, at, seeds, keys, base):  # type: ignore[no-untyped-def]
    """Parse the 26 categories from `at` on. Return (position after the newline, fault code or 0)."""
    for field in range(CRITEO_INTEGERS, CRITEO_FEATURES):
        expected = _TAB if field < CRITEO_FEATURES - 1 else _NEWLINE
        if byte_at(text, at) == expected:
            keys[base + field] = hash_finish(hash_start(seeds[field], 0))
            at += 1
            continue
        word = word_at(text, at)
        if byte_at(text, at + 8) == expected and not has_control(word):
            keys[base + field] = hash_finish(hash_step(hash_start(seeds[field], 8), word))
            at += 9
            continue
        first = at
        byte = byte_at(text, at)
        while byte >= 32:
            at += 1
            byte = byte_at(text, at)
        stop = at
        if byte == _RETURN and byte_at(text, at + 1) == _NEWLINE:
            at += 1
            byte = _NEWLINE
        if byte != expected:
            return at, BAD_FIELDS if byte in (_TAB, _NEWLINE) else BAD_BYTE
        keys[base + field] = hash_span(text, first, stop, seeds[field])
        at += 1
    return at, 0


@njit(cache=True, nogil=True)
def parse_criteo(  # type: ignore[no-untyped-def]
    text, start, end, has_label, seeds, small, thresholds, labels, keys, bad_at, bad_why, counts
):
    """Parse Criteo rows until `end` or until `labels` is full.

    If `has_label` is 0, rows have no label, and NaN is written. `text` is uint8. ``criteo_tables()`` returns `seeds`,
    `small` and `thresholds`. The kernel writes `labels` (float32 [rows]), `keys` (uint64 [39 rows]), `counts` (int64
    [NUM_COUNTS]), and the positions and fault codes of the first bad lines (`bad_at` and `bad_why`, int64 of any
    length).
    """
    at, rows, bad = start, 0, 0
    while at < end and rows < labels.shape[0]:
        line = at
        byte = byte_at(text, at)
        why = 0
        is_labelled = has_label != 0 and byte in (48, 49) and byte_at(text, at + 1) == _TAB
        if is_labelled or (has_label == 0 and byte not in (_SPACE, _RETURN, _NEWLINE)):
            base = rows * CRITEO_FEATURES
            at, why = _criteo_integers(text, at + 2 * has_label, seeds, small, thresholds, keys, base)
            if why == 0:
                at, why = _criteo_categories(text, at, seeds, keys, base)
            if why == 0:
                labels[rows] = byte - 48 if is_labelled else np.nan
                rows += 1
                continue
        else:
            while byte in (_SPACE, _RETURN):
                at += 1
                byte = byte_at(text, at)
            if byte == _NEWLINE:
                at += 1
                continue
            why = BAD_CRITEO_LABEL
        if bad < bad_at.shape[0]:
            bad_at[bad] = line
            bad_why[bad] = why
        bad += 1
        at = _line_end(text, line)
    counts[ROWS], counts[BAD], counts[POSITION] = rows, bad, at
    counts[NONZEROS], counts[ALL_ONES] = rows * CRITEO_FEATURES, 1


@uncounted()
def read_float(text, at, stop, powers):  # type: ignore[no-untyped-def]
    """Read the number at the start of ``text[at:stop]``. Return (value, position after the number).

    Return (0, -1) if there is no finite float32 number.
    """
    negative = False
    if at < stop and byte_at(text, at) in (43, 45):
        negative = byte_at(text, at) == 45
        at += 1
    mantissa, kept, exponent, seen, fraction = 0, 0, 0, False, False
    while at < stop:
        digit = byte_at(text, at) - 48
        if kept <= 10 and at + 8 <= stop and (mantissa > 0 or 1 <= digit <= 9):  # convert eight digits together
            eight = digits_of(word_at(text, at), 8)
            if eight >= 0:
                mantissa = mantissa * 100_000_000 + eight
                exponent -= 8 if fraction else 0
                seen, kept = True, kept + 8
                at += 8
                continue
        if 0 <= digit <= 9:
            seen = True
            if kept < 18:  # further digits could change the float32 by at most one unit in the last place
                mantissa = mantissa * 10 + digit
                if mantissa > 0:
                    kept += 1
                if fraction:
                    exponent -= 1
            elif not fraction:
                exponent += 1
        elif digit == -2 and not fraction:
            fraction = True
        else:
            break
        at += 1
    if not seen:
        return 0.0, -1
    if at < stop and byte_at(text, at) in (69, 101):
        at += 1
        down = False
        if at < stop and byte_at(text, at) in (43, 45):
            down = byte_at(text, at) == 45
            at += 1
        first, written = at, 0
        while at < stop and 0 <= byte_at(text, at) - 48 <= 9:
            written = min(written * 10 + byte_at(text, at) - 48, 10**15)
            at += 1
        if at == first:
            return 0.0, -1
        exponent += -written if down else written
    value = 0.0
    if mantissa > 0 and exponent >= -75:
        if exponent > 38:
            return 0.0, -1
        value = mantissa * powers[exponent] if exponent >= 0 else mantissa / powers[-exponent]
        if value > MAX_FLOAT32:
            return 0.0, -1
    return (-value if negative else value), at


@uncounted()
def _read_index(text, at):  # type: ignore[no-untyped-def]
    """Read the integer at `at`.

    Return (value, position after the integer), or (0, -1) if it is missing or too large.
    """
    first = at
    low = 0
    digit = byte_at(text, at) - 48
    while 0 <= digit <= 9 and at - first < 18:
        low = low * 10 + digit
        at += 1
        digit = byte_at(text, at) - 48
    index = np.uint64(low)
    while 0 <= digit <= 9:
        tenth = np.uint64(1844674407370955161)
        if index > tenth or (index == tenth and digit > 5):
            return np.uint64(0), -1
        index = index * np.uint64(10) + np.uint64(digit)
        at += 1
        digit = byte_at(text, at) - 48
    return index, (at if at > first else -1)


@uncounted()
def _ends_word(byte):  # type: ignore[no-untyped-def]
    return byte in (_SPACE, _TAB, _RETURN, _NEWLINE, _HASH)


@uncounted()
def _after_qid(text, at):  # type: ignore[no-untyped-def]
    """Return the position after a query id ``qid:<digits>`` at `at`, or `at` if there is no query id."""
    if byte_at(text, at) != 113 or byte_at(text, at + 1) != 105 or byte_at(text, at + 2) != 100:
        return at
    if byte_at(text, at + 3) != _COLON:
        return at
    first = at + 4
    stop = first
    while 0 <= byte_at(text, stop) - 48 <= 9:
        stop += 1
    return stop if stop > first and _ends_word(byte_at(text, stop)) else at


@njit(cache=True, nogil=True)
def parse_libsvm(  # type: ignore[no-untyped-def]
    text, start, end, needs_label, powers, labels, indptr, keys, values, bad_at, bad_why, counts
):
    """Parse LIBSVM rows until `end`, or until `labels` or `keys` has no room for the next row.

    If `needs_label` is 0, rows may begin with their first pair, and their label is then NaN. `powers` comes from
    ``powers_of_ten()``. The kernel writes `labels` (float32 [rows]), `indptr` (int64 [rows + 1]), `keys` (uint64
    [pairs]) and `values` (float32 [pairs]). :func:`parse_criteo` describes `bad_at`, `bad_why` and `counts`. If even
    the first row does not fit, ``counts[POSITION]`` is the start of this row.
    """
    at, rows, bad, pairs, ones = start, 0, 0, 0, True
    indptr[0] = 0
    while at < end and rows < labels.shape[0]:
        line = at
        at = skip_blanks(text, at)
        byte = byte_at(text, at)
        if byte in (_NEWLINE, _HASH):
            at = _line_end(text, at)
            continue
        why, pair, first = 0, pairs, at
        label, at = read_float(text, at, end, powers)
        if at < 0 or not _ends_word(byte_at(text, at)):
            if needs_label == 0 and at > 0 and byte_at(text, at) == _COLON:
                label, at = np.nan, first
            else:
                why = BAD_LABEL
        while why == 0:
            at = skip_blanks(text, at)
            byte = byte_at(text, at)
            if byte in (_NEWLINE, _HASH):
                break
            after = _after_qid(text, at)
            if after > at:
                at = after
                continue
            index, at = _read_index(text, at)
            if at < 0 or byte_at(text, at) != _COLON:
                why = BAD_INDEX
                break
            value, at = read_float(text, at + 1, end, powers)
            if at < 0 or not _ends_word(byte_at(text, at)):
                why = BAD_VALUE
                break
            if pair == keys.shape[0]:
                why = -1
                break
            keys[pair] = index
            values[pair] = value
            ones = ones and value == 1.0
            pair += 1
        if why == 0:
            labels[rows] = np.float32(label)
            rows += 1
            pairs = pair
            indptr[rows] = pairs
            at = _line_end(text, at)
            continue
        if why < 0:
            at = line
            break
        if bad < bad_at.shape[0]:
            bad_at[bad] = line
            bad_why[bad] = why
        bad += 1
        at = _line_end(text, line)
    counts[ROWS], counts[BAD], counts[POSITION] = rows, bad, at
    counts[NONZEROS], counts[ALL_ONES] = pairs, 1 if ones else 0


@njit(cache=True, nogil=True)
def hash_strings(data, offsets, seed, out, first, stride):  # type: ignore[no-untyped-def]
    """Hash string i, ``data[offsets[i]:offsets[i+1]]``, as a category into ``out[first + i * stride]``.

    `data` (uint8) and `offsets` (int64 [n + 1]) are read-only arrays, as Arrow's buffers are. `seed` is uint64 and
    `out` uint64. The kernel loads no bytes outside `data`.
    """
    for i in range(offsets.shape[0] - 1):
        start, stop = offsets[i], category_end(data, offsets[i], offsets[i + 1])
        whole = start + ((stop - start) & ~7)
        h = hash_start(seed, stop - start)
        at = start
        while at < whole:
            h = hash_step(h, word_at(data, at))
            at += 8
        if at < stop:
            if at + 8 <= data.shape[0]:
                h = hash_step(h, low_bytes(word_at(data, at), stop - at))
            else:
                word = as_bits(0)
                for k in range(stop - at):
                    word |= as_bits(byte_at(data, at + k) << (8 * k))
                h = hash_step(h, word)
        out[first + i * stride] = hash_finish(h)


@njit(cache=True, nogil=True)
def parse_floats(data, offsets, powers, out, status):  # type: ignore[no-untyped-def]
    """Read string i, ``data[offsets[i]:offsets[i+1]]``, as a number into ``out[i]`` (float64).

    ``status[i]`` (uint8) is FLOAT_OK, FLOAT_MISSING for an empty or blank string, or FLOAT_BAD if the string is not a
    finite float32. ``out[i]`` is 0 if the status is not FLOAT_OK. :func:`hash_strings` describes `data` and `offsets`.
    """
    for i in range(offsets.shape[0] - 1):
        at, stop = offsets[i], offsets[i + 1]
        while at < stop and byte_at(data, at) in (_SPACE, _TAB):
            at += 1
        while at < stop and byte_at(data, stop - 1) in (_SPACE, _TAB, _RETURN):
            stop -= 1
        out[i] = 0.0
        if at == stop:
            status[i] = FLOAT_MISSING
            continue
        value, after = read_float(data, at, stop, powers)
        if after == stop:
            out[i] = value
            status[i] = FLOAT_OK
        else:
            status[i] = FLOAT_BAD


@njit(cache=True, nogil=True)
def split_strings(data, offsets, seed, words, lengths):  # type: ignore[no-untyped-def]
    """Write the keys of the words of all strings to `words` (uint64), and return the number of words.

    ``lengths[i]`` (int64) is the number of words of string i. :func:`hash_strings` describes `data`, `offsets` and
    `seed`.
    """
    count = 0
    for i in range(offsets.shape[0] - 1):
        before = count
        count = hash_words(data, offsets[i], offsets[i + 1], seed, words, count)
        lengths[i] = count - before
    return count


KERNELS = (parse_criteo, parse_libsvm, hash_strings, split_strings, parse_floats)
"""All kernels of this module that are called from Python."""


def compile_kernels() -> None:
    """Compile every kernel for the argument types of its callers, or load it from Numba's cache."""
    text = np.frombuffer(bytearray(b"\n" + bytes(15)), dtype=np.uint8)
    labels, values = np.empty(1, np.float32), np.empty(1, np.float32)
    keys, indptr = np.empty(CRITEO_FEATURES, np.uint64), np.empty(2, np.int64)
    bad_at, bad_why, counts = np.empty(1, np.int64), np.empty(1, np.int64), np.empty(NUM_COUNTS, np.int64)
    powers = powers_of_ten()
    parse_criteo(text, 0, 1, 1, *criteo_tables(), labels, keys, bad_at, bad_why, counts)
    parse_libsvm(text, 0, 1, 1, powers, labels, indptr, keys, values, bad_at, bad_why, counts)
    data, offsets = read_only(text), read_only(np.zeros(2, np.int64))
    hash_strings(data, offsets, np.uint64(0), keys, 0, 1)
    split_strings(data, offsets, np.uint64(0), keys, indptr)
    parse_floats(data, offsets, powers, np.empty(1), np.empty(1, np.uint8))


def read_only(array: Any) -> Any:
    """Return a read-only view of `array`. The view has the Numba type of Arrow's buffers."""
    view = array.view()
    view.flags.writeable = False
    return view
