"""References of the text kernels in plain Python: readable and slow."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.kernels.hashing import MASK, hash_bytes
from paceline.kernels.text.codes import (
    BAD_BYTE,
    BAD_CRITEO_LABEL,
    BAD_FIELDS,
    BAD_INDEX,
    BAD_INTEGER,
    BAD_LABEL,
    BAD_VALUE,
    BAD_VW_BASE,
    BAD_VW_HEAD,
    BAD_VW_WEIGHT,
    BAD_WIDTH,
    DETAIL,
    LABEL_SLOT,
    NO_BAR,
    NO_LABEL,
    NO_LABEL_NUMBER,
    NO_NUMBER,
    NO_WEIGHT,
    NO_WEIGHT_NUMBER,
    OPTIONAL_LABEL_SLOT,
    WEIGHT_SLOT,
)
from paceline.kernels.text.criteo import CRITEO_FEATURES, CRITEO_INTEGERS, field_seed, integer_category
from paceline.kernels.text.values import LABEL_WORDS, MAX_FLOAT32, MISSING, category_text

_NUMBER = re.compile(rb"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_CONTROL = re.compile(rb"[\x00-\x1f]")


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
    head, bar, tail = line.partition(b"|")
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
    for namespace in tail.split(b"|"):
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
    """Return the number that `text` represents (decimal, optional exponent), or None unless it is a finite float32."""
    if not _NUMBER.fullmatch(text):
        return None
    value = float(text)
    return value if abs(value) <= MAX_FLOAT32 else None


def csv_number(cell: str) -> float | str | None:
    """Return the number of a numeric cell, None if it is missing, or its text in lower case if it is no number."""
    word = cell.strip(" \t\r\n")
    value = parse_float(word.encode())
    if value is not None:
        return value
    return None if word.lower() in MISSING else word.lower()


def class_number(cell: str, classes: Sequence[str]) -> float | None:
    """Return the position of a label, without blanks around it, in the list of classes."""
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
    """Return label, weight, keys and values of a CSV row, or the error; slots and seeds are those of the kernel."""
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
    """Return the keys of many categories with one seed."""
    return np.array([hash_bytes(category_text(string), seed) for string in strings], dtype=np.uint64)
