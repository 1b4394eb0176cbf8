"""The text kernels' twins in plain Python: what :mod:`paceline.kernels.text` must compute, readable and slow.

The tables that both share are made here too, so that nothing in them depends on a machine's libm.

**The hash.** A feature's key is a 64-bit hash of bytes under a seed that says which field they stand in. It
is part of saved models, so it never changes (tests hold golden values). All arithmetic is modulo 2^64::

    h = seed ^ (length * 0x9E3779B97F4A7C15)
    for each 8 bytes, little-endian, the last word padded with zeros:
        h = (h ^ word) * 0xBF58476D1CE4E5B9;  h ^= h >> 32
    h *= 0x94D049BB133111EB;  h ^= h >> 29
    h *= 0xD6E8FEB86659FD93;  h ^= h >> 32

Every step is a bijection, so two values of up to eight bytes and of one length never collide within a
field. The multipliers are those of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) and of rrmxmx (Evensen,
2018).
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

MASK = (1 << 64) - 1
LENGTH_MULTIPLIER = 0x9E3779B97F4A7C15
WORD_MULTIPLIER = 0xBF58476D1CE4E5B9
FIRST_FINAL_MULTIPLIER = 0x94D049BB133111EB
LAST_FINAL_MULTIPLIER = 0xD6E8FEB86659FD93

CRITEO_INTEGERS = 13
CRITEO_CATEGORIES = 26
CRITEO_FEATURES = CRITEO_INTEGERS + CRITEO_CATEGORIES
SMALL_INTEGERS = 4096
MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?", "."})
"""What a missing number may be written as, in any case."""
_FIXED_BITS = 128

MAX_FLOAT32 = 3.4028235677973362e38
"""The largest double that rounds to a finite float32."""

BAD_FIELDS = 1
BAD_CRITEO_LABEL = 2
BAD_INTEGER = 3
BAD_BYTE = 4
BAD_LABEL = 5
BAD_INDEX = 6
BAD_VALUE = 7

BAD_WIDTH = 8
BAD_QUOTE = 9
NO_LABEL = 10
NO_LABEL_NUMBER = 11
NO_NUMBER = 12
NO_WEIGHT = 13
NO_WEIGHT_NUMBER = 14
LABEL_WORDS = {**dict.fromkeys(("true", "t", "yes", "y"), 1.0), **dict.fromkeys(("false", "f", "no", "n"), 0.0)}
"""What labels may be written as instead of 1 and 0, in any case."""

DETAIL = 16
"""What ails a csv row is one of the last seven, and DETAIL times its number of cells, or the number of its column."""

LABEL_SLOT, WEIGHT_SLOT, SKIPPED_SLOT, OPTIONAL_LABEL_SLOT, TEXT_SLOT = -1, -2, -3, -4, -5
"""Where a csv column has no feature: the label, the weight, what is not read, or a label that is NaN where missing; or
many: the first column of text, and the next ones below it."""

NO_BAR, BAD_VW_HEAD, BAD_VW_WEIGHT, BAD_VW_BASE = range(17, 21)
MISSING_LABEL = 22
BAD_JSON, BAD_JSON_LABEL, BAD_JSON_NUMBER, BAD_JSON_WEIGHT, TOO_DEEP, MISSING_WEIGHT, BAD_JSON_CLASS, BAD_TRIPLE = (
    range(23, 31)
)
MAX_DEPTH = 32
"""So many objects and lists may be open at a time in a row of JSON."""

REASONS = {
    BAD_FIELDS: "it does not have 40 fields with tabs between them",
    BAD_CRITEO_LABEL: "its label is neither 0 nor 1",
    BAD_INTEGER: "one of its 13 integer fields is not an integer of at most 18 digits",
    BAD_BYTE: "it holds a control byte",
    BAD_LABEL: "its label is not a finite number",
    BAD_INDEX: "an index is not an integer from 0 to 2^64-1 with a colon after it",
    BAD_VALUE: "a value is not a finite float32 number",
    NO_BAR: "it has no | before its features",
    BAD_VW_HEAD: "before the first | stands something else than a label, a weight and a tag",
    BAD_VW_WEIGHT: "its weight is below 0",
    BAD_VW_BASE: "it has an initial prediction, which is not read",
    BAD_TRIPLE: "a feature is not field:feature:value with a finite float32 number",
    MISSING_LABEL: "it has no label",
    MISSING_WEIGHT: "it has no weight",
    BAD_JSON: "it is not one object of JSON",
    BAD_JSON_LABEL: "its label is not a finite number, true or false",
    BAD_JSON_CLASS: "its label is none of the words that labels are",
    BAD_JSON_NUMBER: "a number is not a finite float32 number",
    BAD_JSON_WEIGHT: "its weight is not a finite number from 0 up",
    TOO_DEEP: f"it is nested deeper than {MAX_DEPTH} objects and lists",
}

_WHOLE = re.compile(rb"-?[0-9]+\.0")
_NUMBER = re.compile(rb"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_DECIMAL = re.compile(r"(-?)([0-9]+)(?:\.([0-9]*))?(?:[eE]([+-]?[0-9]+))?")
_CONTROL = re.compile(rb"[\x00-\x1f]")
_WORD = re.compile(rb"(?:[A-Za-z]|(?!\xe2\x80)[\xc3-\xff][\x80-\xbf]*)+")


def hash_bytes(data: bytes, seed: int) -> int:
    """The key of `data` under `seed`, as the module's text defines it."""
    h = seed ^ (len(data) * LENGTH_MULTIPLIER & MASK)
    for at in range(0, len(data), 8):
        h = hash_word(h, int.from_bytes(data[at : at + 8], "little"))
    return hash_end(h)


def hash_word(h: int, word: int) -> int:
    """One step of the hash: takes in eight bytes."""
    h = (h ^ word) * WORD_MULTIPLIER & MASK
    return h ^ (h >> 32)


def hash_end(h: int) -> int:
    """The end of the hash: every bit of the state reaches every bit of the key."""
    h = h * FIRST_FINAL_MULTIPLIER & MASK
    h ^= h >> 29
    h = h * LAST_FINAL_MULTIPLIER & MASK
    return h ^ (h >> 32)


def name_seed(name: str) -> int:
    """The seed of a named column, which is also the key of a numeric column: the hash of its name."""
    return hash_bytes(name.encode("utf-8"), 0)


def category_text(text: bytes) -> bytes:
    """What is hashed of a category's text: of a whole number with ``.0`` behind it, the whole number.

    That is how programs write the integers of a column in which others are missing.
    """
    return text[:-2] if _WHOLE.fullmatch(text) else text


def split_words(text: bytes) -> list[bytes]:
    """The words of a text: runs of letters, those of ASCII in lower case; so are other characters above U+00BF, but for
    the punctuation from U+2000 to U+203F.
    """
    return [word.lower() for word in _WORD.findall(text)]


def number_text(text: str) -> str:
    """A number of JSON as a category's key is made of it: one text for ``1000``, ``1000.0`` and ``1e3``.

    Whole numbers without a point and an exponent stay as they are written. Others have these as Arrow writes numbers of
    a column: an exponent from 10^18 up and below 10^-6, no zeros at the end, and no point behind whole ones.
    """
    found = _DECIMAL.fullmatch(text)
    if found is None or (found[3] is None and found[4] is None):
        return text
    sign, whole, fraction = found[1], found[2], found[3] or ""
    digits = (whole + fraction).lstrip("0")
    place = len(digits) - len(fraction) + int(found[4] or 0)  # of the point, behind the first digit that counts
    digits = digits.rstrip("0")
    if not digits:
        return "0"
    if not -5 <= place <= 18:
        return f"{sign}{digits[0]}{'.' * (len(digits) > 1)}{digits[1:]}e{place - 1:+d}"
    if place <= 0:
        return f"{sign}0.{'0' * -place}{digits}"
    return f"{sign}{digits[:place].ljust(place, '0')}{'.' * (len(digits) > place)}{digits[place:]}"


def field_of(name: str) -> int:
    """What a batch calls the field of this name: the lower half of the hash of the name."""
    return name_seed(name) & 0xFFFFFFFF


def field_seed(field: int) -> int:
    """The seed of field `field` (1 to 39) of a Criteo row."""
    return hash_bytes(field.to_bytes(8, "little"), 0)


@cache
def log_thresholds() -> tuple[int, ...]:
    """Element k is the least integer x with ln(x)² ≥ k + 1, for all such x of up to 18 digits.

    So ⌊ln(x)²⌋ is the number of thresholds ≤ x, exactly: exp(√k) is never an integer, and is known to 100 bits. It is
    computed as exp(√(k - 1)) · exp(√k - √(k - 1)) in fixed point, in a seventh of the time that `decimal` takes.
    """
    thresholds: list[int] = []
    power, root = 1 << _FIXED_BITS, 0
    for k in itertools.count(1):
        step = math.isqrt(k << 2 * _FIXED_BITS) - root
        root += step
        power = power * _fixed_exp(step) >> _FIXED_BITS
        threshold = (power >> _FIXED_BITS) + 1
        if threshold >= 10**18:
            break
        thresholds.append(threshold)
    return tuple(thresholds)


def _fixed_exp(x: int) -> int:
    """Return e to the power of a fixed-point number, by its series."""
    term, total = 1 << _FIXED_BITS, 0
    for n in itertools.count(1):
        total += term
        term = (term * x >> _FIXED_BITS) // n
        if not term:
            break
    return total


def integer_category(x: int) -> int:
    """The category of an integer field: x itself up to 2, ⌊ln(x)²⌋ + 10 above."""
    return x if x <= 2 else bisect_right(log_thresholds(), x) + 10


@cache
def criteo_tables() -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """What the Criteo kernel looks up: the fields' seeds, small integers' categories, the thresholds."""
    seeds = np.array([field_seed(field) for field in range(1, CRITEO_FEATURES + 1)], dtype=np.uint64)
    small = np.array([integer_category(x) for x in range(SMALL_INTEGERS)], dtype=np.int64)
    return seeds, small, np.array(log_thresholds(), dtype=np.int64)


@cache
def powers_of_ten() -> npt.NDArray[np.float64]:
    """10^0 to 10^75, each the nearest double."""
    return np.array([float(f"1e{exponent}") for exponent in range(76)], dtype=np.float64)


def criteo_line(line: bytes) -> tuple[float, list[int]] | int | None:
    """Label and keys of one line without its newline; a BAD_ code if it is malformed; None if it is blank."""
    if not line.strip(b" \r"):
        return None
    fields = line.removesuffix(b"\r").split(b"\t")
    if fields[0] not in (b"0", b"1") or len(fields) == 1:
        return BAD_CRITEO_LABEL
    keys = []
    for field, value in enumerate(fields[1:], 1):
        if field > CRITEO_FEATURES:
            return BAD_FIELDS
        if field <= CRITEO_INTEGERS and value:
            if len(fields) == field + 1:  # the line ends in this field
                return BAD_FIELDS if re.fullmatch(rb"-?[0-9]{1,18}", value) else BAD_INTEGER
            if not re.fullmatch(rb"-?[0-9]{1,18}", value):
                return BAD_INTEGER
            value = (integer_category(int(value)) & MASK).to_bytes(8, "little")
        elif _CONTROL.search(value):
            return BAD_BYTE
        keys.append(hash_bytes(value, field_seed(field)))
    return (float(fields[0]), keys) if len(keys) == CRITEO_FEATURES else BAD_FIELDS


def libsvm_line(line: bytes) -> tuple[float, list[int], list[float]] | int | None:
    """Label, keys and values of one line without its newline; a BAD_ code if malformed; None if blank."""
    words = [word for word in re.split(rb"[ \t\r]+", line.partition(b"#")[0]) if word]
    if not words:
        return None
    label = parse_float(words[0])
    if label is None:
        return BAD_LABEL
    keys, values = [], []
    for word in words[1:]:
        if re.fullmatch(rb"qid:[0-9]+", word):
            continue
        index, colon, text = word.partition(b":")
        if not colon or not re.fullmatch(rb"[0-9]+", index) or int(index) > MASK:
            return BAD_INDEX
        value = parse_float(text)
        if value is None:
            return BAD_VALUE
        keys.append(int(index))
        values.append(value)
    return float(np.float32(label)), keys, values


def vw_line(line: bytes) -> tuple[float | None, float, list[int], list[float], list[int]] | int | None:
    """Label (None if it has none), weight, keys, values and fields of a line; a code if malformed, None if blank."""
    if not line.strip(b" \t\r"):
        return None
    head, bar, rest = line.partition(b"|")
    if not bar:
        return NO_BAR
    words = [word for word in re.split(rb"[ \t\r]+", head) if word]
    if words and (words[-1].startswith(b"'") or head.endswith(words[-1])):
        words.pop()
    numbers = [parse_float(word) for word in words]
    for at, number in enumerate(numbers):
        if number is None or at > 2:
            return BAD_VW_HEAD
        if at == 1 and np.float32(number) < 0:
            return BAD_VW_WEIGHT
        if at == 2 and number != 0:
            return BAD_VW_BASE
    keys, values, fields = [], [], []
    for namespace in rest.split(b"|"):
        name, *features = re.split(rb"[ \t\r]+", namespace)
        name, scale = _name_and_value(name)
        if scale is None:
            return BAD_VALUE
        seed = hash_bytes(name, 0)
        num_unnamed = 0
        for feature in filter(None, features):
            name, value = _name_and_value(feature)
            if not name:
                name, num_unnamed = str(num_unnamed).encode(), num_unnamed + 1
            if value is None or abs(value * scale) > MAX_FLOAT32:
                return BAD_VALUE
            keys.append(hash_bytes(name, seed))
            values.append(float(np.float32(value * scale)))
            fields.append(seed & 0xFFFFFFFF)
    label = None if not numbers or numbers[0] is None else float(np.float32(numbers[0]))
    weight = 1.0 if len(numbers) < 2 or numbers[1] is None else float(np.float32(numbers[1]))
    return label, weight, keys, values, fields


def _name_and_value(word: bytes) -> tuple[bytes, float | None]:
    name, colon, value = word.partition(b":")
    return name, parse_float(value) if colon else 1.0


def parse_float(text: bytes) -> float | None:
    """The number that `text` spells (decimal, optional exponent); None unless it is a finite float32."""
    if not _NUMBER.fullmatch(text):
        return None
    value = float(text)
    return value if abs(value) <= MAX_FLOAT32 else None


def csv_number(cell: str) -> float | str | None:
    """A numeric cell: the number; None if it is missing; else the word that stands there, in lower case."""
    word = cell.strip(" \t\r\n")
    value = parse_float(word.encode())
    if value is not None:
        return value
    return None if word.lower() in MISSING else word.lower()


def class_number(cell: str, classes: Sequence[str]) -> float | None:
    """The place of a label, blanks around it aside, among the words that labels are."""
    word = cell.strip(" \t\r\n")
    return float(classes.index(word)) if word in classes else None


def csv_row(
    cells: Sequence[str],
    slots: Sequence[int],
    seeds: Sequence[int],
    num_numeric: int,
    classes: Sequence[str] = (),
    *,
    trims: bool = False,
) -> tuple[float, float, list[int], list[float]] | int:
    """Label, weight, keys and values of a csv row, with slots and seeds as the kernel takes them; else what ails it."""
    if len(cells) != len(slots):
        return BAD_WIDTH + DETAIL * len(cells)
    label, weight, pairs, faults = 0.0, 1.0, {}, []
    for column, (cell, slot) in enumerate(zip(cells, slots, strict=True)):
        if slot in (LABEL_SLOT, OPTIONAL_LABEL_SLOT):
            found = class_number(cell, classes) if classes else csv_number(cell)
            if isinstance(found, str):
                found = LABEL_WORDS.get(found, found)
            if slot == OPTIONAL_LABEL_SLOT and not isinstance(found, float) and csv_number(cell) is None:
                found = math.nan
            if not isinstance(found, float):
                return (NO_LABEL if not cell else NO_LABEL_NUMBER) + DETAIL * column
            label = found
        elif slot == WEIGHT_SLOT:
            found = csv_number(cell)
            if isinstance(found, float) and found >= 0:
                weight = float(np.float32(found))
            else:
                faults.append((NO_WEIGHT_NUMBER if cell else NO_WEIGHT) + DETAIL * column)
        elif slot >= len(seeds) - num_numeric:
            number = csv_number(cell)
            if isinstance(number, str):
                faults.append(NO_NUMBER + DETAIL * column)
            elif number is not None:
                pairs[slot] = (seeds[slot], float(np.float32(number)))
        elif slot >= 0:
            text = cell.strip(" ") if trims else cell
            pairs[slot] = (hash_bytes(category_text(text.encode()), seeds[slot]), 1.0)
    if faults:
        return faults[0]
    ordered = [pairs[slot] for slot in sorted(pairs)]
    return float(np.float32(label)), weight, [key for key, _ in ordered], [value for _, value in ordered]


def hash_strings(strings: Sequence[bytes], seed: int) -> npt.NDArray[np.uint64]:
    """The keys of many categories under one seed."""
    return np.array([hash_bytes(category_text(string), seed) for string in strings], dtype=np.uint64)
