"""Which format a file has, told from its content."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path

from paceline.data.bad_lines import shorten
from paceline.data.streams import read_head, stat_file
from paceline.errors import DataError

FORMATS = ("criteo", "libsvm", "csv", "parquet")
TEXT_FORMATS = ("criteo", "libsvm")
COLUMN_FORMATS = ("csv", "parquet")

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_HEAD_BYTES = 1 << 16
_NUMBER = r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_LIBSVM = re.compile(rf"[ \t]*{_NUMBER}(?:[ \t]+(?:qid:[0-9]+|[0-9]+:{_NUMBER}))*[ \t]*(?:#.*)?")
_IS_NUMBER = re.compile(_NUMBER)


def detect_format(path: str | Path) -> str:
    """The format of `path` (``criteo``, ``libsvm``, ``csv`` or ``parquet``), told from its first 64 KiB.

    :exc:`DataError` if the file cannot be read, or if it fits no format.
    """
    path = str(path)
    stat_file(path)
    head, whole = read_head(path, _HEAD_BYTES)
    if head.startswith(b"PAR1"):
        return "parquet"
    lines = head.removeprefix(BYTE_ORDER_MARK).decode("utf-8", errors="replace").split("\n")
    if not whole and len(lines) > 1:
        lines.pop()  # it may be cut
    lines = [line.rstrip("\r") for line in lines if line.strip() and "\0" not in line]
    if lines:
        if _share(lines, _is_criteo) > 0.5:
            return "criteo"
        data = [line for line in lines if not line.lstrip().startswith("#")]
        if data and _share(data, _is_libsvm) > 0.5 and any(":" in line for line in data):
            return "libsvm"
        if _is_csv(lines):
            return "csv"
    first = f"its first line is '{shorten(lines[0])}'" if lines else "it holds no line of text"
    raise DataError(f"{path} looks like none of {', '.join(FORMATS)}: {first}; if it is one, say so with --format")


def _share(lines: list[str], fits: Callable[[str], bool]) -> float:
    return sum(fits(line) for line in lines) / len(lines)


def _is_criteo(line: str) -> bool:
    return line.count("\t") == 39 and line[:2] in ("0\t", "1\t")


def _is_libsvm(line: str) -> bool:
    return _LIBSVM.fullmatch(line) is not None


def _is_csv(lines: list[str]) -> bool:
    """A header of two or more distinct names that are no numbers, and rows mostly as wide as it."""
    try:
        rows = list(csv.reader(lines[:200]))
    except csv.Error:
        return False
    header = rows[0]
    if len(header) < 2 or len(set(header)) < len(header):
        return False
    if any(not name.strip() or _IS_NUMBER.fullmatch(name.strip()) for name in header):
        return False
    rest = rows[1:]
    return bool(rest) and sum(len(row) == len(header) for row in rest) * 2 > len(rest)
