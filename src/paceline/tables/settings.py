"""Settings of a table as users write them, keyword-only frozen dataclasses: their checks, and how they travel.

They travel and are saved as plain dictionaries (:func:`to_fields`, :func:`from_fields`), never pickled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import numpy as np

from paceline.errors import UsageError

MAX_FLOAT32: Final = 3.4028234e38  # kernels have float32
TINY: Final = 5e-324  # the least positive float: an open lower bound

_Kind = TypeVar("_Kind")


def check_bounds(settings: object, **bounds: tuple[float, float]) -> None:
    """Raise unless every named field is a finite number, as a float32 too, within its closed bounds."""
    for name, (low, high) in bounds.items():
        value = getattr(settings, name)
        check_number(f"{type(settings).__name__}({name}={value!r})", value, low, high)


def check_number(what: str, value: Any, low: float, high: float = math.inf) -> None:
    """Raise UsageError, which begins with `what`, unless the value is a finite float32 within closed bounds."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not abs(value) <= MAX_FLOAT32 or not low <= value <= high:
        raise UsageError(f"{what}: expected a number {_describe_range(low, high)}")


def _describe_range(low: float, high: float) -> str:
    if math.isinf(low):
        return "that is finite" if math.isinf(high) else f"of at most {high:g}"
    least = "greater than 0" if low == TINY else f"of {low:g} or more"
    if math.isinf(high):
        return least
    return f"{least} and at most {high:g}" if low == TINY else f"from {low:g} to {high:g}"


def check_whole(settings: object, **bounds: tuple[int, int]) -> None:
    """Raise unless every named field is a whole number within its closed bounds; NumPy's become Python's."""
    for name, (low, high) in bounds.items():
        value = getattr(settings, name)
        number = whole_number(f"{type(settings).__name__}({name}={value!r})", value, low, high)
        object.__setattr__(settings, name, number)


def whole_number(what: str, value: object, low: int, high: int | None = None) -> int:
    """Return a whole number within closed bounds as an int; raise UsageError, which begins with `what`, otherwise."""
    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_whole or int(value) < low or (high is not None and int(value) > high):  # type: ignore[call-overload]
        raise UsageError(f"{what}: expected a whole number from {low}" + ("" if high is None else f" to {high}"))
    return int(value)  # type: ignore[call-overload,no-any-return]


def check_flags(settings: object, *names: str) -> None:
    """Raise unless every named field is True or False."""
    for name in names:
        value = getattr(settings, name)
        if not isinstance(value, bool):
            raise UsageError(f"{type(settings).__name__}({name}={value!r}): expected True or False")


def check_pair(settings: object, name: str, low: float, high: float, expected: str) -> None:
    """Take a pair of numbers from low to below high, which may be a list, as JSON and msgpack have it."""
    pair: Any = getattr(settings, name)
    if isinstance(pair, list):
        pair = tuple(pair)
        object.__setattr__(settings, name, pair)
    is_pair = isinstance(pair, tuple) and len(pair) == 2
    if not is_pair or not all(isinstance(each, (int, float)) and low <= each < high for each in pair):
        raise UsageError(f"{type(settings).__name__}({name}={pair!r}): expected two numbers {expected}")


def to_fields(settings: object) -> dict[str, Any]:
    """Return an update rule or initializer as a dictionary of its class name and fields, fit for JSON and msgpack."""
    return {"kind": type(settings).__name__, **dataclasses.asdict(settings)}  # type: ignore[call-overload]


def from_fields(kinds: Mapping[str, type[_Kind]], fields: dict[str, Any]) -> _Kind:
    """Return the update rule or initializer that :func:`to_fields` described."""
    arguments = dict(fields)
    name = arguments.pop("kind", None)
    if not isinstance(name, str) or name not in kinds:
        raise UsageError(f"unknown kind {name!r}: expected one of {', '.join(sorted(kinds))}")
    try:
        return kinds[name](**arguments)
    except TypeError as error:
        raise UsageError(f"{name} does not take these settings: {error}") from None
