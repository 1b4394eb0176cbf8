"""The reference of :mod:`paceline.kernels.text.json_lines` in plain Python."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from tests.reference.text import class_number, parse_float

from paceline.kernels.hashing import field_of, hash_bytes, name_seed
from paceline.kernels.text.codes import (
    BAD_JSON,
    BAD_JSON_CLASS,
    BAD_JSON_LABEL,
    BAD_JSON_NUMBER,
    BAD_JSON_WEIGHT,
    MAX_DEPTH,
    MISSING_WEIGHT,
    TOO_DEEP,
)
from paceline.kernels.text.values import LABEL_WORDS, category_text, number_text


class _Number(str):
    """A JSON number with its original text."""


class _Members(list[tuple[str, Any]]):
    """The members of an object."""


class _MalformedError(Exception):
    def __init__(self, why: int) -> None:
        self.why = why


def json_line(
    line: str, label: str, weight: str = "", as_text: tuple[str, ...] = (), classes: tuple[str, ...] = ()
) -> tuple[float | None, float, list[int], list[float], list[int]] | int | None:
    """Label (None if it has none), weight, keys, values and fields of a line; a code if malformed, None if blank."""
    if not line.strip(" \t\r"):
        return None
    try:
        found = json.loads(
            line.strip(" \t\r"),
            object_pairs_hook=_Members,
            parse_int=_Number,
            parse_float=_Number,
            parse_constant=_Number,
        )
        if not isinstance(found, _Members):
            return BAD_JSON
        row = _Row(label, weight, as_text, classes)
        row.add_object(found, "", 1)
    except ValueError:
        return BAD_JSON
    except _MalformedError as error:
        return error.why
    if row.weight is None:
        return MISSING_WEIGHT
    return row.label, row.weight, row.keys, row.values, row.fields


class _Row:
    def __init__(self, label: str, weight: str, as_text: tuple[str, ...], classes: tuple[str, ...]) -> None:
        self._names = label, weight or None
        self._as_text, self._classes = as_text, classes
        self.label: float | None = None
        self.weight: float | None = None if weight else 1.0
        self.keys: list[int] = []
        self.values: list[float] = []
        self.fields: list[int] = []
        self._field = 0

    def add_object(self, members: _Members, path: str, depth: int) -> None:
        for name, value in members:
            if depth == 1:
                self._field = field_of(name)
            self._add(value, f"{path}.{name}" if depth > 1 else name, depth, in_list=False)

    def _add(self, value: Any, path: str, depth: int, *, in_list: bool) -> None:
        if isinstance(value, list) and depth == MAX_DEPTH:  # an object is also a value
            raise _MalformedError(TOO_DEEP)
        if isinstance(value, _Members):
            self.add_object(value, path, depth + 1)
        elif isinstance(value, list):
            for item in value:
                self._add(item, path, depth + 1, in_list=True)
        elif (value is not None and value != "NaN") or (type(value) is str):
            self._add_scalar(value, path, in_list=in_list)

    def _add_scalar(self, value: Any, path: str, *, in_list: bool) -> None:
        number = parse_float(value.encode()) if isinstance(value, _Number) else None
        if isinstance(value, _Number) and number is None:
            raise _MalformedError(BAD_JSON_NUMBER if value.lstrip("-")[0].isdigit() else BAD_JSON)
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if not in_list and path in self._names:
            found = LABEL_WORDS.get(text.lower(), parse_float(text.encode("utf-8", "surrogatepass")))
            if path == self._names[0] and self._classes:
                found = class_number(text, self._classes)
            if path == self._names[0]:
                if found is None:
                    raise _MalformedError(BAD_JSON_CLASS if self._classes else BAD_JSON_LABEL)
                self.label = float(np.float32(found))
            else:
                if found is None or np.float32(found) < 0:
                    raise _MalformedError(BAD_JSON_WEIGHT)
                self.weight = float(np.float32(found))
        elif number is None or in_list or path in self._as_text:
            text = number_text(text) if isinstance(value, _Number) else text
            self._append(hash_bytes(category_text(text.encode("utf-8", "surrogatepass")), name_seed(path)), 1.0)
        else:
            self._append(name_seed(path), float(np.float32(number)))

    def _append(self, key: int, value: float) -> None:
        self.keys.append(key)
        self.values.append(value)
        self.fields.append(self._field)
