"""A Numba kernel that converts lines of Vowpal Wabbit's or libffm's text format to keys and values.

A line of Vowpal Wabbit has the form ``[label [weight [0]]] ['tag]|namespace[:value] feature[:value] ... |namespace
...``. A feature's key is the hash of its name. This hash starts from the hash of the namespace's name. The value of a
feature is multiplied by the value of its namespace. Each namespace is a field. A feature without a name has its number
in the namespace (from 0 on) as its name. A word is a tag if it begins with a quote, or if no blank is between it and
the first bar. Tags are ignored.

A line of libffm, ``label field:feature:value ...``, is read as ``label |field feature:value ...``. The reference
implementation is ``vw_line`` of ``tests/reference/text.py``. :mod:`.lines` defines the limits within which kernels read
text.
"""

from __future__ import annotations

import numpy as np

from paceline.kernels.jit import njit, uncounted
from paceline.kernels.text.bytes import as_bits, byte_at, hash_finish, hash_span, hash_start, hash_step, skip_blanks
from paceline.kernels.text.codes import (
    BAD_LABEL,
    BAD_TRIPLE,
    BAD_VALUE,
    BAD_VW_BASE,
    BAD_VW_HEAD,
    BAD_VW_WEIGHT,
    MISSING_LABEL,
    NO_BAR,
)
from paceline.kernels.text.lines import ALL_ONES, BAD, NONZEROS, NUM_COUNTS, POSITION, ROWS, read_float
from paceline.kernels.text.values import MAX_FLOAT32, powers_of_ten

UNWEIGHTED = NUM_COUNTS
"""The index in the array `counts` of the flag that all weights are 1."""
NUM_VW_COUNTS = NUM_COUNTS + 1

_TAB, _NEWLINE, _RETURN, _SPACE, _QUOTE, _COLON, _BAR = 9, 10, 13, 32, 39, 58, 124
_NO_SEED = np.uint64(0)
_LOW = np.uint64(0xFFFFFFFF)


@uncounted()
def _name_end(text, at):  # type: ignore[no-untyped-def]
    """Return the position of the character that ends the name at `at`: a blank, a colon, a bar or a newline."""
    byte = byte_at(text, at)
    while not (byte in (_SPACE, _TAB, _RETURN) or byte in (_COLON, _BAR, _NEWLINE)):
        at += 1
        byte = byte_at(text, at)
    return at


@uncounted()
def _read_value(text, at, end, powers):  # type: ignore[no-untyped-def]
    """Read the value after a name that ends at `at`. Return (value, position after the value).

    Return (0, -1) if the value is not a number.
    """
    if byte_at(text, at) != _COLON:
        return 1.0, at
    value, at = read_float(text, at + 1, end, powers)
    if at >= 0 and not (byte_at(text, at) in (_SPACE, _TAB, _RETURN) or byte_at(text, at) in (_BAR, _NEWLINE)):
        at = -1
    return value, at


@uncounted()
def _read_head(text, at, bar, powers):  # type: ignore[no-untyped-def]
    """Parse the label, weight and tag before the first bar. Return (label or NaN, weight, fault code or 0)."""
    label, weight, count = np.nan, 1.0, 0
    at = skip_blanks(text, at)
    while at < bar:
        stop = at
        while stop < bar and byte_at(text, stop) not in (_SPACE, _TAB, _RETURN):
            stop += 1
        if byte_at(text, at) == _QUOTE or stop == bar:
            return label, weight, (0 if skip_blanks(text, stop) == bar else BAD_VW_HEAD)
        value, after = read_float(text, at, stop, powers)
        if after != stop or count > 2:
            return label, weight, BAD_VW_HEAD
        if count == 0:
            label = value
        elif count == 1:
            weight = value
            if np.float32(weight) < 0.0:
                return label, weight, BAD_VW_WEIGHT
        elif value != 0.0:
            return label, weight, BAD_VW_BASE
        count += 1
        at = skip_blanks(text, stop)
    return label, weight, 0


@uncounted()
def _read_features(text, at, end, powers, keys, values, fields, pair):  # type: ignore[no-untyped-def]
    """Parse the namespaces from the bar at `at` on. Return (number of pairs so far, fault code or 0)."""
    while byte_at(text, at) == _BAR:
        first = at + 1
        at = _name_end(text, first)
        seed = hash_span(text, first, at, _NO_SEED)
        scale, at = _read_value(text, at, end, powers)
        if at < 0:
            return pair, BAD_VALUE
        at = skip_blanks(text, at)
        byte = byte_at(text, at)
        num_unnamed = 0
        while byte not in (_BAR, _NEWLINE):
            first = at
            at = _name_end(text, first)
            if at == first:
                keys[pair] = _hash_number(num_unnamed, seed)
                num_unnamed += 1
            else:
                keys[pair] = hash_span(text, first, at, seed)
            value, at = _read_value(text, at, end, powers)
            value *= scale
            if at < 0 or abs(value) > MAX_FLOAT32:
                return pair, BAD_VALUE
            values[pair] = value
            fields[pair] = np.uint32(seed & _LOW)
            pair += 1
            at = skip_blanks(text, at)
            byte = byte_at(text, at)
    return pair, 0


@uncounted()
def _hash_number(number, seed):  # type: ignore[no-untyped-def]
    """Return the key of the feature whose name is a number below 10^8."""
    word, size = 48 + number % 10, 1
    while number >= 10:
        number //= 10
        word, size = (word << 8) + 48 + number % 10, size + 1
    return hash_finish(hash_step(hash_start(seed, size), as_bits(word)))


@uncounted()
def _read_triples(text, at, end, needs_label, powers, keys, values, fields, pair):  # type: ignore[no-untyped-def]
    """Parse a line in libffm's format. Return (label or NaN, number of pairs so far, fault code or 0)."""
    label, after = read_float(text, at, end, powers)
    if needs_label == 1 or after < 0 or byte_at(text, after) != _COLON:
        at = after
    else:
        label = np.nan
    if at < 0 or byte_at(text, at) in (_COLON, _BAR):
        return label, pair, BAD_LABEL
    at = skip_blanks(text, at)
    while byte_at(text, at) != _NEWLINE:
        field = _name_end(text, at)
        if byte_at(text, field) != _COLON:
            return label, pair, BAD_TRIPLE
        seed, feature = hash_span(text, at, field, _NO_SEED), _name_end(text, field + 1)
        value, at = _read_value(text, feature, end, powers)
        if at < 0 or feature == field + 1 or byte_at(text, feature) != _COLON:
            return label, pair, BAD_TRIPLE
        keys[pair], values[pair] = hash_span(text, field + 1, feature, seed), value
        fields[pair] = np.uint32(seed & _LOW)
        pair += 1
        at = skip_blanks(text, at)
    return label, pair, 0


@njit(cache=True, nogil=True)
def parse_vw(  # type: ignore[no-untyped-def]
    text,
    start,
    end,
    is_ffm,
    needs_label,
    powers,
    labels,
    weights,
    indptr,
    keys,
    values,
    fields,
    bad_at,
    bad_why,
    counts,
):
    """Parse complete lines in Vowpal Wabbit's format until `end`. If `is_ffm` is 1, parse libffm's format instead.

    If `needs_label` is 1, a line without a label is malformed. Otherwise its label is NaN. The kernel writes `labels`,
    `weights` and `values` (float32 [n]), `keys` (uint64 [n]), `fields` (uint32 [n]) and `indptr` (int64 [n + 1]), where
    n is (number of bytes) // 2 + 1. :func:`paceline.kernels.text.lines.parse_libsvm` describes `bad_at`, `bad_why` and
    `counts`. In addition, ``counts[UNWEIGHTED]`` is written.
    """
    at, rows, bad, pairs, ones, unweighted = start, 0, 0, 0, True, True
    indptr[0] = 0
    while at < end:
        line = at
        at = skip_blanks(text, at)
        if byte_at(text, at) == _NEWLINE:
            at += 1
            continue
        bar = at
        while byte_at(text, bar) not in (_BAR, _NEWLINE):
            bar += 1
        pair, why, weight = pairs, NO_BAR, 1.0
        if is_ffm == 1:
            label, pair, why = _read_triples(text, at, end, needs_label, powers, keys, values, fields, pairs)
        elif byte_at(text, bar) == _BAR:
            label, weight, why = _read_head(text, at, bar, powers)
            if why == 0 and needs_label == 1 and label != label:
                why = MISSING_LABEL
            if why == 0:
                pair, why = _read_features(text, bar, end, powers, keys, values, fields, pairs)
        if why == 0:
            for k in range(pairs, pair):
                ones = ones and values[k] == 1.0
            labels[rows], weights[rows] = np.float32(label), np.float32(weight)
            unweighted = unweighted and weight == 1.0
            rows += 1
            pairs = pair
            indptr[rows] = pairs
        else:
            if bad < bad_at.shape[0]:
                bad_at[bad] = line
                bad_why[bad] = why
            bad += 1
        at = bar
        while byte_at(text, at) != _NEWLINE:
            at += 1
        at += 1
    counts[ROWS], counts[BAD], counts[POSITION] = rows, bad, at
    counts[NONZEROS], counts[ALL_ONES], counts[UNWEIGHTED] = pairs, 1 if ones else 0, 1 if unweighted else 0


KERNELS = (parse_vw,)


def compile_kernels() -> None:
    """Compile the kernel for the argument types of its callers, or load it from Numba's cache."""
    text = np.frombuffer(bytearray(b"\n" + bytes(15)), dtype=np.uint8)
    floats, numbers = np.empty(2, np.float32), np.empty(NUM_VW_COUNTS, np.int64)
    parse_vw(
        *(text, 0, 1, 0, 1, powers_of_ten(), floats, floats, numbers, np.empty(2, np.uint64), floats),
        *(np.empty(2, np.uint32), numbers, numbers, numbers),
    )
