"""Check the settings of a table, and convert them for messages and files.

The settings (for example update rules and initializers) are frozen dataclasses. :func:`to_fields` converts them to
dictionaries, and :func:`from_fields` back. Nothing is pickled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import numpy as np

from paceline.errors import UsageError

MAX_FLOAT32: Final = 3.4028234e38  # the largest number of float32, the type of kernels
TINY: Final = 5e-324  # the smallest positive float: as a lower bound, it means "greater than 0"

_Kind = TypeVar("_Kind")


def check_bounds(settings: object, **bounds: tuple[float, float]) -> None:
    """Raise UsageError unless each named field is a number within its bounds (inclusive) and finite as float32."""
    for name, (low, high) in bounds.items():
        value = getattr(settings, name)
        check_number(f"{type(settings).__name__}({name}={value!r})", value, low, high)


def check_number(subject: str, value: Any, low: float, high: float = math.inf) -> None:
    """Raise UsageError for `subject` if the value is not a number between the bounds, or too large for float32."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not abs(value) <= MAX_FLOAT32 or not low <= value <= high:
        raise UsageError(f"{subject}: expected a number {_describe_range(low, high)}")


def _describe_range(low: float, high: float) -> str:
    if math.isinf(low):
        return "that is finite" if math.isinf(high) else f"of at most {high:g}"
    least = "greater than 0" if low == TINY else f"of {low:g} or more"
    if math.isinf(high):
        return least
    return f"{least} and at most {high:g}" if low == TINY else f"from {low:g} to {high:g}"


def check_whole(settings: object, **bounds: tuple[int, int]) -> None:
    """Raise UsageError unless each named field is an integer within its bounds (inclusive). Convert NumPy integers."""
    for name, (low, high) in bounds.items():
        value = getattr(settings, name)
        number = whole_number(f"{type(settings).__name__}({name}={value!r})", value, low, high)
        object.__setattr__(settings, name, number)


def whole_number(subject: str, value: object, low: int, high: int | None = None) -> int:
    """Return `value` as an int. Raises UsageError for `subject` if it is not an integer within inclusive bounds."""
    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_whole or int(value) < low or (high is not None and int(value) > high):  # type: ignore[call-overload]
        raise UsageError(f"{subject}: expected a whole number from {low}" + ("" if high is None else f" to {high}"))
    return int(value)  # type: ignore[call-overload,no-any-return]


def check_flags(settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if not isinstance(value, bool):
            raise UsageError(f"{type(settings).__name__}({name}={value!r}): expected True or False")


def check_pair(settings: object, name: str, low: float, high: float, expected: str) -> None:
    """Check that a field is a pair of numbers in [low, high). A list (from JSON or msgpack) becomes a tuple."""
    pair: Any = getattr(settings, name)
    if isinstance(pair, list):
        pair = tuple(pair)
        object.__setattr__(settings, name, pair)
    is_pair = isinstance(pair, tuple) and len(pair) == 2
    if not is_pair or not all(isinstance(number, (int, float)) and low <= number < high for number in pair):
        raise UsageError(f"{type(settings).__name__}({name}={pair!r}): expected two numbers {expected}")


def to_fields(settings: object) -> dict[str, Any]:
    """Return an update rule or initializer as a dictionary of class name and fields, for JSON and msgpack."""
    return {"kind": type(settings).__name__, **dataclasses.asdict(settings)}  # type: ignore[call-overload]


def from_fields(kinds: Mapping[str, type[_Kind]], fields: dict[str, Any]) -> _Kind:
    arguments = dict(fields)
    name = arguments.pop("kind", None)
    if not isinstance(name, str) or name not in kinds:
        raise UsageError(f"unknown kind {name!r}: expected one of {', '.join(sorted(kinds))}")
    try:
        return kinds[name](**arguments)
    except TypeError as error:
        raise UsageError(f"{name} does not take these settings: {error}") from None
