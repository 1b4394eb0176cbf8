"""Format numbers with three digits and decimal units, and draw bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

_PREFIXES = ("", "k", "M", "G", "T", "P")
_NONE = "-"
_BARS: Final = "▁▂▃▄▅▆▇█"


def format_rate(per_s: float, unit: str = "") -> str:
    """Return a rate in three digits: ``312k/s``, ``4.07/s``. `unit` is placed before the slash."""
    number, prefix = _three_digits(per_s, is_count=False)
    return f"{number}{prefix}{unit}/s"


def format_bytes(num_bytes: float) -> str:
    """Return a size in three digits and decimal units, as for networks and disks: ``512 B``, ``1.50 MB``."""
    number, prefix = _three_digits(num_bytes, is_count=True)
    return f"{number} {prefix}B"


def format_count(count: int) -> str:
    """Return a count in three digits: ``999``, ``1.05M``."""
    return "".join(_three_digits(count, is_count=True))


def format_duration(seconds: float) -> str:
    """Return whole seconds as a clock: ``0:07``, ``12:34``, ``1:02:03``."""
    minutes, remainder = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder:02}" if hours else f"{minutes}:{remainder:02}"


def draw_bars(values: Sequence[float], low: float, high: float) -> str:
    """Return one character for each value: a bar whose height is the value's place between `low` and `high`."""
    height = high / 2 - low / 2  # the difference itself may be infinite
    if not height > 0:
        return _BARS[0] * len(values)
    return "".join(_BARS[round((value / 2 - low / 2) / height * (len(_BARS) - 1))] for value in values)


def _three_digits(value: float, is_count: bool) -> tuple[str, str]:
    """Return the number with its prefix. A count without a prefix has no decimals."""
    if not math.isfinite(value):
        return (_NONE if math.isnan(value) else f"{value}"), ""
    size = abs(value)
    for prefix in _PREFIXES:
        if size < 999.5 or prefix == _PREFIXES[-1]:
            break
        size /= 1000
    if (is_count and not prefix) or size == 0:
        digits = 0
    else:
        digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{'-' if value < 0 else ''}{size:.{digits}f}", prefix
