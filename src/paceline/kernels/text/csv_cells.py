"""Kernels that convert a csv cell to a number, a label, a weight or the key of a category.

The parser :mod:`.csv` finds the start and the end of each cell. The reference implementation is ``csv_row`` of
``tests/reference/text.py``.
"""

from __future__ import annotations

import numpy as np

from paceline.kernels.features.scaling import centre_number, scale_number
from paceline.kernels.jit import uncounted
from paceline.kernels.text.bytes import (
    byte_at,
    category_end,
    class_of,
    digits_of,
    first_bytes,
    first_match,
    hash_finish,
    hash_span,
    hash_start,
    hash_step,
    repeat_byte,
    trim_blanks,
    word_at,
)
from paceline.kernels.text.codes import (
    LABEL_SLOT,
    NO_LABEL,
    NO_LABEL_NUMBER,
    NO_NUMBER,
    NO_WEIGHT,
    NO_WEIGHT_NUMBER,
    OPTIONAL_LABEL_SLOT,
    WEIGHT_SLOT,
)
from paceline.kernels.text.lines import FLOAT_BAD, FLOAT_MISSING, FLOAT_OK, read_float

_TAB, _NEWLINE, _RETURN, _SPACE, _QUOTE = 9, 10, 13, 32, 34
_MINUS, _POINT = 45, 46
_BYTE = np.uint64(0xFF)
POINT_ZERO = 0x302E
"""The two bytes of the text ".0" as a little-endian number."""


@uncounted()
def _lower_word(text, at, stop):  # type: ignore[no-untyped-def]
    """Return the bytes of ``text[at:stop]`` in lower case as one number. Return 0 for more than seven bytes."""
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
_ASKED, _DOT = _word(b"?"), _word(b".")
_TRUE, _T, _YES, _Y = _word(b"true"), _word(b"t"), _word(b"yes"), _word(b"y")
_FALSE, _F, _NO, _N = _word(b"false"), _word(b"f"), _word(b"no"), _word(b"n")


@uncounted()
def _number(text, at, stop, powers):  # type: ignore[no-untyped-def]
    """Read the number ``text[at:stop]``, and ignore blanks around it. Return (value, FLOAT_ code, word).

    If the text is not a number, ``word`` contains its letters (see :func:`_lower_word`).
    """
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
    value, after = read_float(text, at, stop, powers)
    if after == stop:
        return value, FLOAT_OK, 0
    word = _lower_word(text, at, stop)
    if word in (_NA, _N_A, _NAN, _NULL, _NONE, _ASKED, _DOT):
        return 0.0, FLOAT_MISSING, word
    return 0.0, FLOAT_BAD, word


@uncounted()
def _read_label(text, at, stop, powers, classes):  # type: ignore[no-untyped-def]
    """Read the label ``text[at:stop]``. Return (label, fault code or 0)."""
    if classes.shape[0] > 0:
        found = class_of(text, at, stop, classes)
        return np.float64(found), 0 if found >= 0 else NO_LABEL if at == stop else NO_LABEL_NUMBER
    value, status, word = _number(text, at, stop, powers)
    if status == FLOAT_OK:
        return value, 0
    if word in (_TRUE, _T, _YES, _Y):
        return 1.0, 0
    if word in (_FALSE, _F, _NO, _N):
        return 0.0, 0
    return 0.0, NO_LABEL if at == stop else NO_LABEL_NUMBER


@uncounted()
def _read_weight(text, at, stop, powers):  # type: ignore[no-untyped-def]
    """Read the weight ``text[at:stop]``. Return (weight, fault code or 0)."""
    value, status, _ = _number(text, at, stop, powers)
    if status == FLOAT_OK and value >= 0.0:
        return value, 0
    return 0.0, NO_WEIGHT if at == stop else NO_WEIGHT_NUMBER


@uncounted()
def hash_short(word, size, seed):  # type: ignore[no-untyped-def]
    """Return the hash of a cell of `size` (at most eight) bytes. `word` contains the bytes, followed by zeros."""
    h = hash_start(seed, size)
    stepped = hash_step(h, word)
    return hash_finish(stepped if size > 0 else h)


@uncounted()
def plain_category(word, size):  # type: ignore[no-untyped-def]
    """Return the bytes of a cell of up to eight bytes, and whether the cell has no quote at its start and no final
    ``.0``.

    The kernel does not branch on the size, because the branch would often be mispredicted. It shifts twice, because one
    shift by 64 bits is undefined.
    """
    unwanted = np.uint64(64 - 8 * size)
    half = unwanted >> np.uint64(1)
    rest = unwanted - half
    top = (word << half) << rest
    is_plain = (top >> np.uint64(48)) != np.uint64(POINT_ZERO) and (word & np.uint64(0xFF)) != np.uint64(_QUOTE)
    return (top >> half) >> rest, is_plain


@uncounted()
def short_number(word, size, powers):  # type: ignore[no-untyped-def]
    """Return the number in the first `size` bytes of a word (NaN if `size` is 0), and whether it has a simple spelling.

    A simple spelling has only digits and at most one point. :func:`_number` reads the other spellings. The digits and
    the power of ten are both exact, so their quotient is the nearest float64 (Clinger, "How to read floating point
    numbers accurately", PLDI 1990).
    """
    if size == 0:
        return np.nan, True
    digits = digits_of(word, size)
    if digits >= 0:
        return np.float64(digits), True
    is_negative = np.int64(word & _BYTE) == _MINUS
    if is_negative:
        word >>= np.uint64(8)
        size -= 1
    point = min(first_match(word, repeat_byte(_POINT)), size)
    num_decimals = max(size - point - 1, 0)
    if point < size:
        before = (np.uint64(1) << np.uint64(8 * point)) - np.uint64(1)
        word = (word & before) | ((word >> np.uint64(8)) & ~before)
        size -= 1
    if size == 0:
        return 0.0, False
    digits = digits_of(word, size)
    value = np.float64(digits) / powers[num_decimals]
    return -value if is_negative else value, digits >= 0


@uncounted()
def put_number(value, scales, k, seed, values, keys, at):  # type: ignore[no-untyped-def]
    """Write the key and the scaled value of numeric feature `k`. If `value` is NaN (missing), NaN is written."""
    keys[at] = seed
    number = centre_number(value, scales[3, k])
    if scales[2, k] != 0.0:
        number = scale_number(number, scales[0, k], scales[1, k], scales[2, k], scales[3, k])
    values[at] = number


@uncounted()
def take_cell(  # type: ignore[no-untyped-def]
    text,
    first,
    stop,
    slot,
    first_numeric,
    trims,
    seeds,
    scales,
    powers,
    classes,
    labels,
    weights,
    row,
    keys,
    values,
    base,
):
    """Write the content of the cell ``text[first:stop]`` to the array of its `slot`. Return the fault code or 0."""
    if slot >= first_numeric:
        value, status, _ = _number(text, first, stop, powers)
        k = slot - first_numeric
        put_number(value if status == FLOAT_OK else np.nan, scales, k, seeds[slot], values, keys, base + slot)
        return NO_NUMBER if status == FLOAT_BAD else 0
    if slot >= 0:
        if trims:
            first, stop = trim_blanks(text, first, stop)
        stop = category_end(text, first, stop)
        size = stop - first
        if size <= 8:
            keys[base + slot] = hash_short(first_bytes(word_at(text, first), size), size, seeds[slot])
        else:
            keys[base + slot] = hash_span(text, first, stop, seeds[slot])
    elif slot in (LABEL_SLOT, OPTIONAL_LABEL_SLOT):
        labels[row], fault = _read_label(text, first, stop, powers, classes)
        if fault != 0 and slot == OPTIONAL_LABEL_SLOT and _number(text, first, stop, powers)[1] == FLOAT_MISSING:
            labels[row], fault = np.nan, 0
        return fault
    elif slot == WEIGHT_SLOT:
        weights[row], fault = _read_weight(text, first, stop, powers)
        return fault
    return 0
