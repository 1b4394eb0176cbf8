"""How a csv file is written, told from its beginning: the separator, and whether its first row names the columns."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.data.bad_lines import shorten
from paceline.data.streams import read_head
from paceline.errors import DataError
from paceline.kernels.text.reference import MISSING

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
HEAD_BYTES = 1 << 16
_MAX_HEAD_BYTES = 1 << 24

SEPARATORS = (",", ";", "\t")
LAST_SEPARATOR = "|"
"""Taken where no other fits: within cells of other files it separates the elements of lists."""
_WIDE_MARKS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")

_ROWS = 200
PLACE = re.compile(r"c[1-9][0-9]*")
"""What a column is called that has no name: by its place."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The separator of a csv file, and its columns' names: of the first row, or ``c1``, ``c2``, ... if that is data."""

    separator: str
    names: tuple[str, ...]
    has_header: bool

    def describe(self) -> str:
        """Return the columns' names for a message."""
        origin = "" if self.has_header else " (the file has no header)"
        return ", ".join(self.names) + origin


def read_lines(path: str) -> tuple[bytes, bool]:
    """What a file begins with, and whether that is all of it: 64 KiB, or up to 16 MiB for a longer first line.

    Raises DataError for text of two or four bytes a character, by its byte-order mark.
    """
    num_bytes = HEAD_BYTES
    while True:
        head, whole = read_head(path, num_bytes)
        encoding = next((name for mark, name in _WIDE_MARKS.items() if head.startswith(mark)), None)
        if encoding is not None:
            raise DataError(
                f"{path} is text in {encoding}, by its byte-order mark, and expected is UTF-8: convert it, as "
                f"iconv -f {encoding} -t UTF-8 does"
            )
        if whole or b"\n" in head or num_bytes >= _MAX_HEAD_BYTES:
            return head, whole
        num_bytes *= 4


def head_of(path: str) -> str:
    """The text that a file begins with, without what may be cut: its first lines."""
    head, whole = read_lines(path)
    text = head.removeprefix(BYTE_ORDER_MARK).decode("utf-8", errors="replace")
    return text if whole or "\n" not in text else text[: text.rindex("\n") + 1]


def read_dialect(path: str, wanted: Sequence[str] = ()) -> Dialect:
    """The dialect of a csv file, as :func:`guess_dialect` has it. Raises DataError if it does not look like csv."""
    text = head_of(path)
    dialect = guess_dialect(text, wanted)
    if dialect is None:
        first = shorten(text.partition("\n")[0])
        raise DataError(
            f"{path} does not look like csv: expected rows of one width, separated by commas, semicolons, tabs or |; "
            f"its first line is '{first}'{hint_at_open_quote(text)}"
        )
    return dialect


def parse_rows(text: str, separator: str, limit: int | None = None) -> list[list[str]]:
    """The rows of a text that begins a row; what is behind a row that cannot be read is left out."""
    rows: list[list[str]] = []
    try:
        for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator):
            if row:
                rows.append(row)
            if len(rows) == limit:
                break
    except csv.Error:
        pass
    return rows


def guess_dialect(text: str, wanted: Sequence[str] = ()) -> Dialect | None:
    """The dialect of a file that begins with `text`; None if it does not look like csv.

    The separator is the one that gives most rows the width of the first, or a first row that holds a `wanted` name. The
    first row is a header if it holds a wanted name; if `wanted` are places such as ``c3``, it is none; else it is one
    if it has a word above a column of numbers, or consists of distinct words alone.
    """
    found: list[tuple[bool, float, int, str, list[list[str]]]] = []
    for separator in (*SEPARATORS, LAST_SEPARATOR):
        if found and separator == LAST_SEPARATOR:
            break
        rows = parse_rows(text, separator, _ROWS)
        if len(rows) < (1 if wanted else 2) or len(rows[0]) < 2:
            continue
        share = sum(len(row) == len(rows[0]) for row in rows) / len(rows)
        names_it = any(name in rows[0] for name in wanted)
        if share > 0.5 or names_it:
            found.append((names_it, share, len(rows[0]), separator, rows))
    if not found:
        return None
    _, _, width, separator, rows = max(found, key=lambda each: each[:3])
    first, rest = rows[0], [row for row in rows[1:] if len(row) == width]
    if any(name in first for name in wanted):
        has_header = True
    elif wanted and all(PLACE.fullmatch(name) and int(name[1:]) <= width for name in wanted):
        has_header = False
    else:
        has_header = _is_header(first, rest)
    names = tuple((first[at] if has_header else "") or f"c{at + 1}" for at in range(width))
    return Dialect(separator, names, has_header)


def _is_header(first: list[str], rest: list[list[str]]) -> bool:
    for at, cell in enumerate(first):
        below = [row[at] for row in rest if not is_missing(row[at])]
        if below and not is_number(cell) and not is_missing(cell) and all(map(is_number, below)):
            return True
    words = [cell for cell in first if cell.strip()]
    return len(set(words)) == len(words) > 0 and not any(is_number(cell) for cell in words)


def hint_at_open_quote(text: str) -> str:
    """Say, for a message on a file that begins with `text` and is not understood, where a quote may be left open."""
    if text.count('"') % 2 == 0:
        return ""
    number = next((number for number, line in enumerate(text.split("\n"), 1) if line.count('"') % 2), 0)
    return f"; line {number:,} opens a quote and does not close it" if number else ""


def is_number(cell: str) -> bool:
    """Whether a cell is a number, blanks around it allowed."""
    return NUMBER.fullmatch(cell.strip(" \t")) is not None


def is_missing(cell: str) -> bool:
    """Whether a cell stands for a missing number."""
    return cell.strip().lower() in MISSING
