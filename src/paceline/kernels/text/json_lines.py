"""A Numba kernel that converts JSON lines (one object per line) to keys and values.

Each name and value of the object is a feature. A number is a numeric feature, whose key is the hash of the name. A
text, `true` and `false` are categories, whose key is a hash that starts from the hash of the name. `null` and `NaN` are
missing values. In a list, a number is a category too, with the spelling of
:func:`paceline.kernels.text.values.number_text`.

The name of a value in nested objects consists of their names, joined by dots. An object in a list has the name of the
list. Each name of the outermost object is a field, with all values below it at any depth. The reference implementation
is ``json_line`` of ``tests/reference/json_lines.py``. :mod:`.lines` defines the limits within which kernels read text.
"""

from __future__ import annotations

import numpy as np

from paceline.kernels.jit import njit, uncounted
from paceline.kernels.text.bytes import byte_at, category_end, class_of, hash_span, skip_blanks
from paceline.kernels.text.codes import (
    BAD_JSON,
    BAD_JSON_CLASS,
    BAD_JSON_LABEL,
    BAD_JSON_NUMBER,
    BAD_JSON_WEIGHT,
    MAX_DEPTH,
    MISSING_LABEL,
    MISSING_WEIGHT,
    TOO_DEEP,
)
from paceline.kernels.text.json_numbers import canonical_number, number_end
from paceline.kernels.text.lines import ALL_ONES, BAD, NONZEROS, NUM_COUNTS, POSITION, ROWS, read_float
from paceline.kernels.text.values import powers_of_ten

_TAB, _NEWLINE, _RETURN, _SPACE = 9, 10, 13, 32
_QUOTE, _COMMA, _MINUS, _DOT, _COLON, _BACKSLASH = 34, 44, 45, 46, 58, 92
_OPEN_LIST, _CLOSE_LIST, _OPEN_OBJECT, _CLOSE_OBJECT = 91, 93, 123, 125
_NO_SEED = np.uint64(0)
_LOW = np.uint64(0xFFFFFFFF)

_IS_NUMBER, _IS_TEXT, _IS_MISSING = range(3)


@uncounted()
def _string_end(text, at):  # type: ignore[no-untyped-def]
    """Return the position of the string's closing quote (-1 if missing), and whether the string has escapes.

    `at` is the position after the opening quote.
    """
    escaped = False
    while True:
        byte = byte_at(text, at)
        if byte == _QUOTE:
            return at, escaped
        if byte < _SPACE:
            return -1, False
        if byte == _BACKSLASH:
            escaped = True
            at += 1
            if byte_at(text, at) < _SPACE:
                return -1, False
        at += 1


@uncounted()
def _hex4(text, at):  # type: ignore[no-untyped-def]
    """Return the number that the four hexadecimal digits at `at` spell, or -1 if a digit is invalid."""
    found = 0
    for k in range(at, at + 4):
        byte = byte_at(text, k)
        if 48 <= byte <= 57:
            found = found * 16 + byte - 48
        elif 65 <= byte <= 70 or 97 <= byte <= 102:
            found = found * 16 + (byte & 15) + 9
        else:
            return -1
    return found


@uncounted()
def _put_utf8(code, scratch, to):  # type: ignore[no-untyped-def]
    if code < 0x80:
        scratch[to] = code
        return to + 1
    if code < 0x800:
        scratch[to] = 0xC0 | (code >> 6)
    else:
        if code < 0x10000:
            scratch[to] = 0xE0 | (code >> 12)
        else:
            scratch[to] = 0xF0 | (code >> 18)
            to += 1
            scratch[to] = 0x80 | ((code >> 12) & 63)
        to += 1
        scratch[to] = 0x80 | ((code >> 6) & 63)
    to += 1
    scratch[to] = 0x80 | (code & 63)
    return to + 1


@uncounted()
def _unescape(text, at, stop, scratch, to):  # type: ignore[no-untyped-def]
    """Copy ``text[at:stop]`` to `scratch` from `to` on, with escapes replaced by their characters.

    Return the position after the copy in `scratch`, or -1 for an invalid escape.
    """
    while at < stop:
        byte = byte_at(text, at)
        at += 1
        if byte == _BACKSLASH:
            byte = byte_at(text, at)
            at += 1
            if byte == 117:  # u
                code = _hex4(text, at)
                at += 4
                if code < 0:
                    return -1
                if 0xD800 <= code < 0xDC00 and byte_at(text, at) == _BACKSLASH and byte_at(text, at + 1) == 117:
                    low = _hex4(text, at + 2)
                    if 0xDC00 <= low < 0xE000:
                        code = 0x10000 + ((code - 0xD800) << 10) + low - 0xDC00
                        at += 6
                to = _put_utf8(code, scratch, to)
                continue
            if byte == 98:  # b
                byte = 8
            elif byte == 102:  # f
                byte = 12
            elif byte == 110:  # n
                byte = 10
            elif byte == 114:  # r
                byte = 13
            elif byte == 116:  # t
                byte = 9
            elif byte not in (_QUOTE, _BACKSLASH, 47):
                return -1
        scratch[to] = byte
        to += 1
    return to


@uncounted()
def _is_word(text, at, word):  # type: ignore[no-untyped-def]
    same = True
    for k in range(len(word)):
        same = same and byte_at(text, at + k) == word[k]
    return same


_TRUE, _FALSE, _NULL, _NAN = (tuple(word) for word in (b"true", b"false", b"null", b"NaN"))
_TRUE_WORDS = tuple(tuple(word.ljust(5)) for word in (b"true", b"t", b"yes", b"y"))
_FALSE_WORDS = tuple(tuple(word.ljust(5)) for word in (b"false", b"f", b"no", b"n"))


@uncounted()
def _is_one_of(text, at, stop, words):  # type: ignore[no-untyped-def]
    """Return whether ``text[at:stop]`` is one of `words` (up to five letters), ignoring case."""
    if stop - at > 5 or at == stop:
        return False
    for word in words:
        same = True
        for k in range(5):
            byte = _SPACE
            if at + k < stop:
                byte = byte_at(text, at + k)
                if 65 <= byte <= 90:
                    byte += 32
            same = same and byte == word[k]
        if same:
            return True
    return False


@uncounted()
def _read_scalar(text, at, end, powers, scratch, path_end):  # type: ignore[no-untyped-def]
    """Read a scalar: a string, number, true, false or null. Return (kind, number, first, stop, whether it is in
    `scratch`, position after the scalar or -1, fault code or 0).

    `first` and `stop` are the bounds of the scalar's text in `text` or in `scratch`.
    """
    byte = byte_at(text, at)
    if byte == _QUOTE:
        stop, escaped = _string_end(text, at + 1)
        if stop < 0:
            return _IS_TEXT, 0.0, 0, 0, False, -1, BAD_JSON
        if not escaped:
            return _IS_TEXT, 0.0, at + 1, stop, False, stop + 1, 0
        to = _unescape(text, at + 1, stop, scratch, path_end)
        return _IS_TEXT, 0.0, path_end, to, True, stop + 1 if to >= 0 else -1, BAD_JSON
    if byte == 116 and _is_word(text, at, _TRUE):
        return _IS_TEXT, 1.0, at, at + 4, False, at + 4, 0
    if byte == 102 and _is_word(text, at, _FALSE):
        return _IS_TEXT, 0.0, at, at + 5, False, at + 5, 0
    if byte == 110 and _is_word(text, at, _NULL):
        return _IS_MISSING, 0.0, at, at, False, at + 4, 0
    if byte == 78 and _is_word(text, at, _NAN):
        return _IS_MISSING, 0.0, at, at, False, at + 3, 0
    stop = number_end(text, at)
    if stop < 0:
        return _IS_NUMBER, 0.0, 0, 0, False, -1, BAD_JSON
    value, after = read_float(text, at, stop, powers)
    return _IS_NUMBER, value, at, stop, False, stop if after == stop else -1, BAD_JSON_NUMBER


@uncounted()
def _as_number(text, kind, value, first, stop, powers):  # type: ignore[no-untyped-def]
    """Convert a scalar to a label or a weight. Return (number, whether the scalar is a number)."""
    if kind == _IS_NUMBER:
        return value, True
    if _is_one_of(text, first, stop, _TRUE_WORDS):
        return 1.0, True
    if _is_one_of(text, first, stop, _FALSE_WORDS):
        return 0.0, True
    number, after = read_float(text, first, stop, powers)
    return number, after == stop


@uncounted()
def _parse_object(  # type: ignore[no-untyped-def]
    text,
    at,
    end,
    label_seed,
    weight_seed,
    as_text,
    powers,
    classes,
    scratch,
    bases,
    is_list,
    keys,
    values,
    fields,
    pair,
):
    """Parse the object whose opening brace is at `at`.

    Return (position after the object, number of pairs so far, label, weight, fault code or 0). `bases` and `is_list`
    (int64 [MAX_DEPTH]) are scratch memory. They record for each open list or object the end of its name in `scratch`,
    and whether it is a list.
    """
    label, weight = np.nan, np.nan if weight_seed != _NO_SEED else 1.0
    depth, bases[0], is_list[0], may_close = 0, 0, 0, True
    name_end, name_hash = 0, _NO_SEED
    at += 1
    while True:
        at = skip_blanks(text, at)
        closing = _CLOSE_LIST if is_list[depth] == 1 else _CLOSE_OBJECT
        if may_close and byte_at(text, at) == closing:
            at += 1
        else:
            path_end = bases[depth]
            if is_list[depth] == 0:
                if byte_at(text, at) != _QUOTE:
                    return at, pair, label, weight, BAD_JSON
                stop, _ = _string_end(text, at + 1)
                if stop < 0:
                    return at, pair, label, weight, BAD_JSON
                if depth > 0:
                    scratch[path_end] = _DOT
                    path_end += 1
                path_end = _unescape(text, at + 1, stop, scratch, path_end)
                at = skip_blanks(text, stop + 1)
                if path_end < 0 or byte_at(text, at) != _COLON:
                    return at, pair, label, weight, BAD_JSON
                at = skip_blanks(text, at + 1)
                if depth == 0:
                    name_end, name_hash = path_end, hash_span(scratch, 0, path_end, _NO_SEED)
            byte = byte_at(text, at)
            if byte in (_OPEN_LIST, _OPEN_OBJECT):
                depth += 1
                if depth == MAX_DEPTH:
                    return at, pair, label, weight, TOO_DEEP
                bases[depth], is_list[depth], may_close = path_end, 1 if byte == _OPEN_LIST else 0, True
                at += 1
                continue
            kind, value, first, stop, moved, after, why = _read_scalar(text, at, end, powers, scratch, path_end)
            if after < 0:
                return at, pair, label, weight, why
            at = after
            source = scratch if moved else text
            seed = name_hash if path_end == name_end else hash_span(scratch, 0, path_end, _NO_SEED)
            if kind != _IS_MISSING and is_list[depth] == 0 and seed == label_seed:
                if classes.shape[0] > 0:
                    label = np.float64(class_of(source, first, stop, classes))
                    good = label >= 0.0
                else:
                    label, good = _as_number(source, kind, value, first, stop, powers)
                if not good:
                    return at, pair, label, weight, BAD_JSON_CLASS if classes.shape[0] > 0 else BAD_JSON_LABEL
            elif kind != _IS_MISSING and is_list[depth] == 0 and seed == weight_seed and weight_seed != _NO_SEED:
                weight, good = _as_number(source, kind, value, first, stop, powers)
                if not good or np.float32(weight) < 0.0:
                    return at, pair, label, weight, BAD_JSON_WEIGHT
            elif kind != _IS_MISSING:
                is_category = kind == _IS_TEXT or is_list[depth] == 1
                for k in range(as_text.shape[0]):
                    is_category = is_category or seed == as_text[k]
                if is_category and kind == _IS_NUMBER:
                    first, stop, moved = canonical_number(text, first, stop, scratch, path_end)
                    source = scratch if moved else text
                elif is_category:
                    stop = category_end(source, first, stop)
                keys[pair] = hash_span(source, first, stop, seed) if is_category else seed
                values[pair] = 1.0 if is_category else value
                fields[pair] = np.uint32(name_hash & _LOW)
                pair += 1
            depth += 1  # the code below handles the end of a scalar as that of a list or an object
        depth -= 1
        if depth < 0:
            return at, pair, label, weight, 0
        at = skip_blanks(text, at)
        byte = byte_at(text, at)
        may_close = byte != _COMMA
        if byte == _COMMA:
            at += 1
        elif byte != (_CLOSE_LIST if is_list[depth] == 1 else _CLOSE_OBJECT):
            return at, pair, label, weight, BAD_JSON


@uncounted()
def _parse_lines(  # type: ignore[no-untyped-def]
    text, start, end, needs_label, label_seed, weight_seed, as_text, powers, classes, scratch,
    bases, is_list,
    labels, weights, indptr, keys, values, fields, bad_at, bad_why, counts,
):  # fmt: skip
    """Parse lines as :func:`parse_json_lines` describes. In this function Numba counts no references for each line."""
    at, rows, bad, pairs, ones = start, 0, 0, 0, True
    indptr[0] = 0
    while at < end:
        line = at
        at = skip_blanks(text, at)
        if byte_at(text, at) == _NEWLINE:
            at += 1
            continue
        pair, label, weight, why = pairs, np.nan, 1.0, BAD_JSON
        if byte_at(text, at) == _OPEN_OBJECT:
            at, pair, label, weight, why = _parse_object(
                *(text, at, end, label_seed, weight_seed, as_text, powers, classes, scratch, bases, is_list),
                *(keys, values, fields, pairs),
            )
            at = skip_blanks(text, at)
            if why == 0 and byte_at(text, at) != _NEWLINE:
                why = BAD_JSON
            if why == 0 and needs_label == 1 and label != label:
                why = MISSING_LABEL
            if why == 0 and weight != weight:
                why = MISSING_WEIGHT
        if why == 0:
            for k in range(pairs, pair):
                ones = ones and values[k] == 1.0
            labels[rows], weights[rows] = np.float32(label), np.float32(weight)
            rows += 1
            pairs = pair
            indptr[rows] = pairs
        else:
            if bad < bad_at.shape[0]:
                bad_at[bad] = line
                bad_why[bad] = why
            bad += 1
        while byte_at(text, at) != _NEWLINE:
            at += 1
        at += 1
    counts[ROWS], counts[BAD], counts[POSITION] = rows, bad, at
    counts[NONZEROS], counts[ALL_ONES] = pairs, 1 if ones else 0


@njit(cache=True, nogil=True)
def parse_json_lines(  # type: ignore[no-untyped-def]
    text, start, end, needs_label, label_seed, weight_seed, as_text, powers, classes, scratch,
    labels, weights, indptr, keys, values, fields, bad_at, bad_why, counts,
):  # fmt: skip
    """Parse complete lines, with one object each, until `end`.

    - `label_seed` and `weight_seed` (uint64) are the hashes of the names of label and weight. `weight_seed` is 0 if
      there are no weights. Otherwise an object without a weight is malformed.
    - If `needs_label` is 1, an object without a label is malformed. Otherwise its label is NaN.
    - `as_text` (uint64) has the hashes of the names whose numbers are categories.
    - `classes` (uint64) has the hashes of the words that are labels. The index of a word is its label. The array is
      empty if labels are numbers.
    - `scratch` (uint8) is overwritten, and is 128 bytes longer than `text`.

    The kernel writes `labels`, `weights` and `values` (float32 [n]), `keys` (uint64 [n]), `fields` (uint32 [n]) and
    `indptr` (int64 [n + 1]), where n is (number of bytes) // 2 + 1. :func:`paceline.kernels.text.lines.parse_libsvm`
    describes `bad_at`, `bad_why` and `counts`.
    """
    bases, is_list = np.empty(MAX_DEPTH, np.int64), np.empty(MAX_DEPTH, np.int64)
    _parse_lines(
        text, start, end, needs_label, label_seed, weight_seed, as_text, powers, classes, scratch,
        bases, is_list,
        labels, weights, indptr, keys, values, fields, bad_at, bad_why, counts,
    )  # fmt: skip


KERNELS = (parse_json_lines,)


def compile_kernels() -> None:
    """Compile the kernel for the argument types of its callers, or load it from Numba's cache."""
    text = np.frombuffer(bytearray(b"\n" + bytes(15)), dtype=np.uint8)
    floats, numbers, keys = np.empty(2, np.float32), np.empty(NUM_COUNTS, np.int64), np.empty(2, np.uint64)
    scratch, seed = np.empty(32, np.uint8), np.uint64(0)
    parse_json_lines(
        *(text, 0, 1, 1, seed, seed, keys, powers_of_ten(), keys, scratch),
        *(floats, floats, numbers, keys, floats, np.empty(2, np.uint32), numbers, numbers, numbers),
    )
