"""Numba kernels that convert rows of csv to keys and values.

Cells are split according to RFC 4180, as Python's `csv` module and Arrow do. A quote opens a quoted cell only at the
beginning of the cell. In a quoted cell, two quotes represent one quote. Text after the closing quote belongs to the
cell. A row ends with a newline, a carriage return, or both. Empty lines are not rows. The reference implementation is
``csv_row`` of ``tests/reference/text.py``. :mod:`.csv_cells` converts the cells.

The parsers read ``text[start:end]``. They may load, but never use, eight bytes after `end`. ``text[end]`` must be a
newline, and a row that reaches this position is unfinished.
"""

from __future__ import annotations

import numpy as np

from paceline.kernels.jit import njit, uncounted
from paceline.kernels.text.bytes import (
    byte_at,
    first_ending,
    first_match,
    hash_finish,
    hash_start,
    hash_step,
    hash_words,
    repeat_byte,
    word_at,
)
from paceline.kernels.text.codes import (
    BAD_QUOTE,
    BAD_WIDTH,
    DETAIL,
    LABEL_SLOT,
    OPTIONAL_LABEL_SLOT,
    SKIPPED_SLOT,
    TEXT_SLOT,
)
from paceline.kernels.text.csv_cells import POINT_ZERO, hash_short, plain_category, put_number, short_number, take_cell
from paceline.kernels.text.values import powers_of_ten

ROWS, BAD, POSITION, PAIRS = range(4)
"""Indices of the array `counts`: good rows, bad rows, the position at which the parser stopped, and pairs (key, value).
"""
NUM_COUNTS = 4

_NEWLINE, _RETURN, _SPACE, _QUOTE = 10, 13, 32, 34
_BYTE, _LOW = np.uint64(0xFF), np.uint64(0xFFFFFFFF)


@uncounted()
def _cell_end(text, at, separator, pattern):  # type: ignore[no-untyped-def]
    """Return the position of the separator or line end that ends the unquoted cell at `at`."""
    while True:
        at += first_ending(word_at(text, at), pattern)
        byte = byte_at(text, at)
        if byte in (separator, _NEWLINE, _RETURN):
            return at
        if byte < _SPACE:
            at += 1


@uncounted()
def _next_quote(text, at, end):  # type: ignore[no-untyped-def]
    """Return the position of the next quote from `at` on. The result is `end` or larger if there is no quote."""
    pattern = repeat_byte(_QUOTE)
    while at < end:
        offset = first_match(word_at(text, at), pattern)
        at += offset
        if offset < 8:
            return at
    return end


@uncounted()
def _quoted(text, at, end, separator, pattern, scratch):  # type: ignore[no-untyped-def]
    """Find the quoted cell at `at`. Return (first, stop, position after the cell or -1, whether it is in `scratch`).

    The cell is ``text[first:stop]``. A cell with doubled quotes or with text after the closing quote is assembled in
    `scratch` and is ``scratch[first:stop]``.
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


@uncounted()
def _parse_row(  # type: ignore[no-untyped-def]
    text, at, end, separator, trims, slots, seeds, scales, powers, classes, text_seeds, scratch,
    labels, weights, row, keys, values, base, words, word_fields, num_words,
):  # fmt: skip
    """Parse the row at `at`. Return (position after the row, number of columns, fault code or 0, number of words).

    The position is -1 for a row with an open quote, and -2 for a row that is incomplete for another reason. The number
    of words includes those of earlier rows.
    """
    first_numeric = seeds.shape[0] - scales.shape[1]
    pattern = repeat_byte(separator)
    column, why = 0, 0
    while True:
        slot = slots[column] if column < slots.shape[0] else SKIPPED_SLOT
        word = word_at(text, at)
        size = first_ending(word, pattern)
        ending = byte_at(text, at + size)
        is_padded = trims and size > 0 and (byte_at(text, at) == _SPACE or byte_at(text, at + size - 1) == _SPACE)
        if ending == separator and at + size < end and not is_padded:  # most cells are short
            is_done = False
            if 0 <= slot < first_numeric:
                if size == 8:  # with this branch, the processor can start the next cell before it has this cell's size
                    if (word >> np.uint64(48)) != POINT_ZERO and np.int64(word & _BYTE) != _QUOTE:
                        keys[base + slot] = hash_finish(hash_step(hash_start(seeds[slot], 8), word))
                        at += 9
                        column += 1
                        continue
                else:
                    cell, is_done = plain_category(word, size)
                    if is_done:
                        keys[base + slot] = hash_short(cell, size, seeds[slot])
            elif slot >= first_numeric:
                value, is_done = short_number(word, size, powers)
                if is_done:
                    put_number(value, scales, slot - first_numeric, seeds[slot], values, keys, base + slot)
            elif slot == LABEL_SLOT and size > 0 and classes.shape[0] == 0:
                value, is_done = short_number(word, size, powers)
                if is_done:
                    labels[row] = value
            elif slot == SKIPPED_SLOT:
                is_done = np.int64(word & _BYTE) != _QUOTE
            if is_done:
                at += size + 1
                column += 1
                continue
        first, moved = at, False
        if byte_at(text, at) == _QUOTE:
            first, stop, at, moved = _quoted(text, at, end, separator, pattern, scratch)
            if at < 0:
                return -1, column, why, num_words
        else:
            at = _cell_end(text, at, separator, pattern)
            stop = at
        if at >= end:
            return -2, column, why, num_words
        # One call is for `scratch` and one for `text`: with one variable for both arrays, Numba would count references
        # for each cell.
        if slot <= TEXT_SLOT:
            seed, fault, before = text_seeds[TEXT_SLOT - slot], 0, num_words
            if moved:
                num_words = hash_words(scratch, first, stop, seed, words, num_words)
            else:
                num_words = hash_words(text, first, stop, seed, words, num_words)
            for k in range(before, num_words):
                word_fields[k] = np.uint32(seed & _LOW)
        elif moved:
            fault = take_cell(
                *(scratch, first, stop, slot, first_numeric, trims, seeds, scales, powers, classes),
                *(labels, weights, row, keys, values, base),
            )
        else:
            fault = take_cell(
                *(text, first, stop, slot, first_numeric, trims, seeds, scales, powers, classes),
                *(labels, weights, row, keys, values, base),
            )
        if fault != 0 and (why == 0 or slot in (LABEL_SLOT, OPTIONAL_LABEL_SLOT)):
            why = fault + DETAIL * column
        column += 1
        byte = byte_at(text, at)
        at += 1
        if byte != separator:
            if byte == _RETURN and at < end and byte_at(text, at) == _NEWLINE:
                at += 1
            return at, column, why, num_words


@uncounted()
def _close_row(keys, values, base, num_features, num_numeric):  # type: ignore[no-untyped-def]
    """Set the values of a row's categories to 1, and remove missing numbers. Return the end of the row's pairs."""
    after = base + num_features
    if num_numeric == 0:
        return after
    first_numeric = after - num_numeric
    for k in range(base, first_numeric):
        values[k] = 1.0
    kept = first_numeric
    for k in range(first_numeric, after):
        keys[kept], values[kept] = keys[k], values[k]
        kept += np.int64(values[k] == values[k])  # NaN adds 0; a branch would often be mispredicted
    return kept


@uncounted()
def _parse_rows(  # type: ignore[no-untyped-def]
    text, start, end, limit, last, separator, trims, slots, seeds, scales, powers, classes, text_seeds, scratch,
    labels, weights, indptr, keys, values, words, word_fields, word_ends, bad_at, bad_why, counts,
):  # fmt: skip
    """Parse rows as :func:`parse_csv` describes. In this function Numba counts no references to arrays for each row."""
    at, rows, bad, pairs = start, 0, 0, 0
    indptr[0] = word_ends[0] = 0
    while at < end and at < limit and rows < labels.shape[0]:
        if byte_at(text, at) in (_NEWLINE, _RETURN):
            at += 1
            continue
        after, column, why, num_words = _parse_row(
            *(text, at, end, separator, trims, slots, seeds, scales, powers, classes, text_seeds, scratch),
            *(labels, weights, rows, keys, values, pairs, words, word_fields, word_ends[rows]),
        )
        if after < 0:
            if not last:
                break
            after, why = end, BAD_QUOTE
        elif column != slots.shape[0]:
            why = BAD_WIDTH + DETAIL * column
        if why == 0:
            rows += 1
            pairs = _close_row(keys, values, pairs, seeds.shape[0], scales.shape[1])
            indptr[rows] = pairs
            word_ends[rows] = num_words
        else:
            if bad < bad_at.shape[0]:
                bad_at[bad] = at
                bad_why[bad] = why
            bad += 1
        at = after
    counts[ROWS], counts[BAD], counts[POSITION], counts[PAIRS] = rows, bad, at, pairs


@njit(cache=True, nogil=True)
def parse_csv(  # type: ignore[no-untyped-def]
    text, start, end, limit, last, separator, trims, slots, seeds, scales, powers, classes, text_seeds, scratch,
    labels, weights, indptr, keys, values, words, word_fields, word_ends, bad_at, bad_why, counts,
):  # fmt: skip
    """Parse the rows that begin before `limit`, until `end` or an unfinished row is reached or `labels` is full.

    The inputs, apart from the text and its limits, are:

    - `last` is 1 if the whole text ends at `end`. Then an open quote at `end` is a fault.
    - `trims` is 1 if blanks around categories are ignored.
    - `slots` (int64 [columns]) has the position of each column's feature in a row, or another slot of :mod:`.codes`.
    - `seeds` (uint64 [features]) has the seeds of the categorical features, then of the numeric features.
    - `scales` (float64 [4, numeric features]) has the unit of logarithms, the mean, the deviation (0 for unscaled
      numbers) and the centre of each numeric feature.
    - `classes` (uint64) has the hashes of the words that are labels. The index of a word is its label. The array is
      empty if labels are numbers.
    - `text_seeds` (uint64) has the seeds of the text columns.
    - `scratch` (uint8) is overwritten, and is as long as `text`.

    The kernel writes these arrays:

    - `labels` (float32 [rows]) and `weights` (float32 [rows], or length 0 if no column is the weight).
    - `indptr` (int64 [rows + 1]), `keys` (uint64 [rows times features]) and `values` (float32, as long as `keys`, or of
      length 0 if no feature is numeric).
    - `words` (uint64) and `word_fields` (uint32), the keys and fields of the words in text columns. The words of row i
      end at ``word_ends[i + 1]``.
    - `bad_at` and `bad_why` (int64), the positions and fault codes of the first bad rows.
    - `counts` (int64 [NUM_COUNTS]).
    """
    _parse_rows(
        text, start, end, limit, last, separator, trims, slots, seeds, scales, powers, classes, text_seeds, scratch,
        labels, weights, indptr, keys, values, words, word_fields, word_ends, bad_at, bad_why, counts,
    )  # fmt: skip


@njit(cache=True, nogil=True)
def skip_rows(text, start, end, limit, separator, scratch):  # type: ignore[no-untyped-def]
    """Return the position of the first row that begins at `limit` or later, or that is unfinished.

    Return `end` if there is no such row.
    """
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
    """Compile the kernels for the argument types of their callers, or load them from Numba's cache."""
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
            1,
            np.zeros(1, np.int64),
            np.zeros(1, np.uint64),
            np.zeros((4, 0)),
            powers_of_ten(),
            np.zeros(0, np.uint64),
            np.zeros(0, np.uint64),
            scratch,
        ),
        *(
            numbers,
            numbers,
            np.empty(2, np.int64),
            np.empty(1, np.uint64),
            numbers,
            np.empty(0, np.uint64),
            np.empty(0, np.uint32),
            np.empty(2, np.int64),
            bad,
            bad,
            np.empty(NUM_COUNTS, np.int64),
        ),
    )
    skip_rows(text, 0, 1, 1, 44, scratch)
