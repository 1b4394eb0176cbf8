"""Numba kernels that turn rows of csv into keys and values.

Cells are split as RFC 4180 has it, and as Python's `csv` module and Arrow do: a quote counts at the beginning of a
cell alone, a doubled one inside quotes stands for itself, what follows the closing quote belongs to the cell; a row
ends with a newline, a carriage return, or both; empty lines are no rows. The twin is
:func:`paceline.kernels.text.reference.csv_row`.

The parsers read ``text[start:end]``, and may load (never use) eight bytes behind `end`. ``text[end]`` must be a
newline: a row that ends there is unfinished.
"""

from __future__ import annotations

import numpy as np

from paceline.kernels.jit import njit
from paceline.kernels.scaling import centre_number, scale_number
from paceline.kernels.text.bytes import (
    byte_at,
    category_end,
    digits_of,
    first_bytes,
    first_ending,
    first_match,
    hash_finish,
    hash_span,
    hash_start,
    hash_step,
    repeat_byte,
    word_at,
)
from paceline.kernels.text.lines import FLOAT_BAD, FLOAT_MISSING, FLOAT_OK, read_float
from paceline.kernels.text.reference import (
    BAD_QUOTE,
    BAD_WIDTH,
    DETAIL,
    LABEL_SLOT,
    NO_LABEL,
    NO_LABEL_NUMBER,
    NO_NUMBER,
    NO_WEIGHT,
    NO_WEIGHT_NUMBER,
    SKIPPED_SLOT,
    WEIGHT_SLOT,
    powers_of_ten,
)

ROWS, BAD, POSITION, PAIRS = range(4)
"""What `counts` says: good rows and bad ones, where the parser stopped, pairs."""
NUM_COUNTS = 4

_TAB, _NEWLINE, _RETURN, _SPACE, _QUOTE = 9, 10, 13, 32, 34
_POINT_ZERO = 0x302E  # the bytes of ".0" as a number


@njit()
def _cell_end(text, at, separator, pattern):  # type: ignore[no-untyped-def]
    """The position from `at` on of what ends a cell outside quotes."""
    while True:
        at += first_ending(word_at(text, at), pattern)
        byte = byte_at(text, at)
        if byte in (separator, _NEWLINE, _RETURN):
            return at
        if byte < _SPACE:
            at += 1


@njit()
def _next_quote(text, at, end):  # type: ignore[no-untyped-def]
    """The position from `at` on of a quote, or `end` or more."""
    pattern = repeat_byte(_QUOTE)
    while at < end:
        offset = first_match(word_at(text, at), pattern)
        at += offset
        if offset < 8:
            return at
    return end


@njit()
def _quoted(text, at, end, separator, pattern, scratch):  # type: ignore[no-untyped-def]
    """The cell whose quote is at `at`: (first, stop, what ends it, whether in `scratch`); the third is -1 for no end.

    A cell that is not in one piece, for it has doubled quotes or goes on behind the closing one, is put together in
    `scratch`.
    """
    first = at + 1
    at = _next_quote(text, first, end)
    if at >= end:
        return 0, 0, -1, False
    if byte_at(text, at + 1) in (separator, _NEWLINE, _RETURN):
        return first, at, at + 1, False
    filled = 0
    while True:
        while first < at:
            scratch[filled] = text[first]
            filled += 1
            first += 1
        if byte_at(text, at + 1) != _QUOTE:
            break
        scratch[filled] = _QUOTE
        filled += 1
        first = at + 2
        at = _next_quote(text, first, end)
        if at >= end:
            return 0, 0, -1, False
    stop = _cell_end(text, at + 1, separator, pattern)
    for k in range(at + 1, stop):
        scratch[filled] = text[k]
        filled += 1
    return 0, filled, stop, True


@njit()
def _lower_word(text, at, stop):  # type: ignore[no-untyped-def]
    """Up to seven letters of ``text[at:stop]`` as one number, in lower case; 0 for more."""
    found = 0
    if stop - at > 7:
        return 0
    for k in range(at, stop):
        byte = byte_at(text, k)
        found = found * 256 + (byte + 32 if 65 <= byte <= 90 else byte)
    return found


def _word(letters):  # type: ignore[no-untyped-def]
    return int.from_bytes(letters, "big")


_NA, _N_A, _NAN, _NULL, _NONE = _word(b"na"), _word(b"n/a"), _word(b"nan"), _word(b"null"), _word(b"none")
_TRUE, _T, _YES, _Y = _word(b"true"), _word(b"t"), _word(b"yes"), _word(b"y")
_FALSE, _F, _NO, _N = _word(b"false"), _word(b"f"), _word(b"no"), _word(b"n")


@njit()
def _number(text, at, stop, powers):  # type: ignore[no-untyped-def]
    """The number ``text[at:stop]``, blanks around it allowed: (value, FLOAT_ code, the word that is there instead)."""
    if 0 < stop - at <= 8:
        digits = digits_of(word_at(text, at), stop - at)
        if digits >= 0:
            return np.float64(digits), FLOAT_OK, 0
    while at < stop and byte_at(text, at) in (_SPACE, _TAB, _RETURN, _NEWLINE):
        at += 1
    while at < stop and byte_at(text, stop - 1) in (_SPACE, _TAB, _RETURN, _NEWLINE):
        stop -= 1
    if at == stop:
        return 0.0, FLOAT_MISSING, 0
    value, behind = read_float(text, at, stop, powers)
    if behind == stop:
        return value, FLOAT_OK, 0
    word = _lower_word(text, at, stop)
    if word in (_NA, _N_A, _NAN, _NULL, _NONE):
        return 0.0, FLOAT_MISSING, word
    return 0.0, FLOAT_BAD, word


@njit()
def _read_label(text, at, stop, powers):  # type: ignore[no-untyped-def]
    """The label ``text[at:stop]``: (value, what ails it, or 0)."""
    value, status, word = _number(text, at, stop, powers)
    if status == FLOAT_OK:
        return value, 0
    if word in (_TRUE, _T, _YES, _Y):
        return 1.0, 0
    if word in (_FALSE, _F, _NO, _N):
        return 0.0, 0
    return 0.0, NO_LABEL if at == stop else NO_LABEL_NUMBER


@njit()
def _read_weight(text, at, stop, powers):  # type: ignore[no-untyped-def]
    """The weight ``text[at:stop]``: (value, what ails it, or 0)."""
    value, status, _ = _number(text, at, stop, powers)
    if status == FLOAT_OK and value >= 0.0:
        return value, 0
    return 0.0, NO_WEIGHT if at == stop else NO_WEIGHT_NUMBER


@njit()
def _hash_short(word, size, seed):  # type: ignore[no-untyped-def]
    """The hash of a cell of up to eight bytes; `word` is 0 behind them."""
    h = hash_start(seed, size)
    stepped = hash_step(h, word)
    return hash_finish(stepped if size > 0 else h)


@njit()
def _plain_category(word, size):  # type: ignore[no-untyped-def]
    """The bytes of a cell of up to eight, and whether it has no quote at its beginning and no ``.0`` at its end.

    Without a branch on its size, which would be guessed wrong often: a shift by up to 64 bits is two.
    """
    unwanted = np.uint64(64 - 8 * size)
    half = unwanted >> np.uint64(1)
    rest = unwanted - half
    top = (word << half) << rest
    is_plain = (top >> np.uint64(48)) != np.uint64(_POINT_ZERO) and (word & np.uint64(0xFF)) != np.uint64(_QUOTE)
    return (top >> half) >> rest, is_plain


@njit()
def _put_number(value, status, scales, k, seed, values, keys, at):  # type: ignore[no-untyped-def]
    """Write a numeric feature, NaN if it is missing; return whether it is a number or missing."""
    keys[at] = seed
    values[at] = np.nan
    if status == FLOAT_OK:
        number = centre_number(value, scales[3, k])
        values[at] = scale_number(number, scales[0, k], scales[1, k], scales[2, k], scales[3, k])
    return status != FLOAT_BAD


@njit()
def _parse_row(  # type: ignore[no-untyped-def]
    text, at, end, separator, slots, seeds, scales, powers, scratch, labels, weights, row, keys, values, base
):
    """Parse the row at `at`: (position behind it, columns, what ails its cells, or 0).

    The position is -1 for a row with an open quote, and -2 for one that is unfinished otherwise.
    """
    first_numeric = seeds.shape[0] - scales.shape[1]
    pattern = repeat_byte(separator)
    column, why = 0, 0
    while True:
        slot = slots[column] if column < slots.shape[0] else SKIPPED_SLOT
        if 0 <= slot < first_numeric:
            word = word_at(text, at)
            size = first_ending(word, pattern)
            if byte_at(text, at + size) == separator and at + size < end:  # most cells are so, and done with here
                cell, is_plain = _plain_category(word, size)
                if is_plain:
                    keys[base + slot] = _hash_short(cell, size, seeds[slot])
                    at += size + 1
                    column += 1
                    continue
        source, first = text, at
        if byte_at(text, at) == _QUOTE:
            first, stop, at, moved = _quoted(text, at, end, separator, pattern, scratch)
            if at < 0:
                return -1, column, why
            if moved:
                source = scratch
        else:
            at = _cell_end(text, at, separator, pattern)
            stop = at
        if at >= end:
            return -2, column, why
        if slot >= first_numeric:
            value, status, _ = _number(source, first, stop, powers)
            k = slot - first_numeric
            if not _put_number(value, status, scales, k, seeds[slot], values, keys, base + slot) and why == 0:
                why = NO_NUMBER + DETAIL * column
        elif slot >= 0:
            stop = category_end(source, first, stop)
            size = stop - first
            if size <= 8:
                keys[base + slot] = _hash_short(first_bytes(word_at(source, first), size), size, seeds[slot])
            else:
                keys[base + slot] = hash_span(source, first, stop, seeds[slot])
        elif slot == LABEL_SLOT:
            labels[row], fault = _read_label(source, first, stop, powers)
            if fault != 0:
                why = fault + DETAIL * column
        elif slot == WEIGHT_SLOT:
            weights[row], fault = _read_weight(source, first, stop, powers)
            if fault != 0 and why == 0:
                why = fault + DETAIL * column
        column += 1
        byte = byte_at(text, at)
        at += 1
        if byte != separator:
            if byte == _RETURN and at < end and byte_at(text, at) == _NEWLINE:
                at += 1
            return at, column, why


@njit()
def _close_row(keys, values, base, num_features, num_numeric):  # type: ignore[no-untyped-def]
    """Give categories value 1 and leave missing numbers out; return where the next row's pairs begin."""
    behind = base + num_features
    if num_numeric == 0:
        return behind
    first_numeric = behind - num_numeric
    for k in range(base, first_numeric):
        values[k] = 1.0
    kept = first_numeric
    for k in range(first_numeric, behind):
        if values[k] == values[k]:
            keys[kept], values[kept] = keys[k], values[k]
            kept += 1
    return kept


@njit(cache=True, nogil=True)
def parse_csv(  # type: ignore[no-untyped-def]
    text, start, end, limit, last, separator, slots, seeds, scales, powers, scratch,
    labels, weights, indptr, keys, values, bad_at, bad_why, counts,
):  # fmt: skip
    """Parse the rows that begin before `limit`, until `end`, an unfinished row, or until `labels` is full.

    `last` is 1 if the text ends at `end`, so that a quote that is open there is a fault. `slots` int64 [columns] says
    where a column's feature stands in a row, or one of the other slots. `seeds` is uint64 [features], of which the last
    are numeric, as many as `scales`, float64 [4, numeric features], has columns: log, mean, deviation, which is 0 for
    numbers as they stand, and centre. `scratch` is uint8, as long as `text`. Out: `labels` float32 [rows]; `weights`
    float32 [rows], or none if no column is the weight; `indptr` int64 [rows + 1]; `keys` uint64 [rows times features];
    `values` float32, as many, or none if no feature is numeric; `bad_at`, `bad_why` int64: where the first bad rows
    begin, and what ails them; `counts` int64 [NUM_COUNTS].
    """
    at, rows, bad, pairs = start, 0, 0, 0
    indptr[0] = 0
    while at < end and at < limit and rows < labels.shape[0]:
        if byte_at(text, at) in (_NEWLINE, _RETURN):
            at += 1
            continue
        behind, column, why = _parse_row(
            text, at, end, separator, slots, seeds, scales, powers, scratch, labels, weights, rows, keys, values, pairs
        )
        if behind < 0:
            if not last:
                break
            behind, why = end, BAD_QUOTE
        elif column != slots.shape[0]:
            why = BAD_WIDTH + DETAIL * column
        if why == 0:
            rows += 1
            pairs = _close_row(keys, values, pairs, seeds.shape[0], scales.shape[1])
            indptr[rows] = pairs
        else:
            if bad < bad_at.shape[0]:
                bad_at[bad] = at
                bad_why[bad] = why
            bad += 1
        at = behind
    counts[ROWS], counts[BAD], counts[POSITION], counts[PAIRS] = rows, bad, at, pairs


@njit(cache=True, nogil=True)
def skip_rows(text, start, end, limit, separator, scratch):  # type: ignore[no-untyped-def]
    """The position of the first row that begins at `limit` or later, or of an unfinished one before; else `end`."""
    pattern = repeat_byte(separator)
    at = row = start
    while row < end and row < limit:
        if byte_at(text, at) == _QUOTE:
            _, _, at, _ = _quoted(text, at, end, separator, pattern, scratch)
            if at < 0:
                return row
        else:
            at = _cell_end(text, at, separator, pattern)
        if at >= end:
            return row
        byte = byte_at(text, at)
        at += 1
        if byte != separator:
            if byte == _RETURN and at < end and byte_at(text, at) == _NEWLINE:
                at += 1
            row = at
    return row


KERNELS = (parse_csv, skip_rows)


def compile_kernels() -> None:
    """Compile the kernels, or load them from Numba's cache, for the one signature that real calls have."""
    text = np.frombuffer(bytearray(b"\n" + bytes(15)), dtype=np.uint8)
    scratch = np.empty(16, np.uint8)
    numbers, bad = np.empty(1, np.float32), np.empty(1, np.int64)
    parse_csv(
        *(
            text,
            0,
            1,
            1,
            1,
            44,
            np.zeros(1, np.int64),
            np.zeros(1, np.uint64),
            np.zeros((4, 0)),
            powers_of_ten(),
            scratch,
        ),
        *(
            numbers,
            numbers,
            np.empty(2, np.int64),
            np.empty(1, np.uint64),
            numbers,
            bad,
            bad,
            np.empty(NUM_COUNTS, np.int64),
        ),
    )
    skip_rows(text, 0, 1, 1, 44, scratch)
