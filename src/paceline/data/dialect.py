"""Detect the separator and the column names of a csv file from its beginning."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.data.bad_lines import shorten
from paceline.data.streams import read_head
from paceline.errors import DataError, UsageError
from paceline.kernels.text.values import MISSING

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
HEAD_BYTES = 1 << 16
_MAX_HEAD_BYTES = 1 << 24

HEADERS = ("auto", "yes", "no")
LABEL_NAMES = ("label", "click", "clicked", "target", "y")
"""The usual names of the label, ignoring case. The first of them that a file has is its label."""
SEPARATORS = (",", ";", "\t")
LAST_SEPARATOR = "|"
"""A separator to try last, because files with another separator use it between the elements of a list."""
BLANKS = "\x1f"
"""The separator of files whose cells are separated by runs of blanks and tabs, written by :func:`mark_blanks`."""
PREAMBLE = re.compile(rb'(?:\xef\xbb\xbf)?(?:"?sep=.?"?\r?\n)?', re.IGNORECASE)
"""The optional bytes before the first row: a byte-order mark, and Excel's line that declares the separator."""
_DECLARED = re.compile(r'"?sep=(.)"?\r?\n', re.IGNORECASE)
_BLANKS = re.compile(rb'"[^"\n]*"|(?<=[^ \t\r\n])[ \t]+(?=[^ \t\r\n\x1f])')
_WIDE_MARKS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")

_ROWS, _BLANKS_SHARE = 200, 0.9
PLACE = re.compile(r"c[1-9][0-9]*")
"""The name of a column without a name in the header: ``c`` and its position."""


def check_header(header: str) -> None:
    if header not in HEADERS:
        raise UsageError(f"--header {header}: expected one of {', '.join(HEADERS)}")


@dataclass(frozen=True, slots=True)
class Dialect:
    """The separator of a csv file, and its columns' names: from the header, otherwise ``c1``, ``c2``, ...

    Blanks around a name are removed, unless the user wants the name with its blanks.
    """

    separator: str
    names: tuple[str, ...]
    has_header: bool

    def describe(self) -> str:
        origin = "" if self.has_header else " (the file has no header)"
        return ", ".join(self.names) + origin


def read_lines(path: str) -> tuple[bytes, bool]:
    """Return the first 64 KiB (up to 16 MiB if the first line is long), and whether this is the whole text.

    Raises DataError for UTF-16 and UTF-32, detected by their byte-order marks.
    """
    num_bytes = HEAD_BYTES
    while True:
        head, is_all = read_head(path, num_bytes)
        encoding = next((name for mark, name in _WIDE_MARKS.items() if head.startswith(mark)), None)
        if encoding is not None:
            raise DataError(
                f"{path} has a byte-order mark of {encoding}: expected UTF-8. Convert it, as "
                f"iconv -f {encoding} -t UTF-8 does"
            )
        if is_all or b"\n" in head or num_bytes >= _MAX_HEAD_BYTES:
            return head, is_all
        num_bytes *= 4


def head_of(path: str) -> str:
    head, is_all = read_lines(path)
    text = head.removeprefix(BYTE_ORDER_MARK).decode("utf-8", errors="replace")
    return text if is_all or "\n" not in text else text[: text.rindex("\n") + 1]


def read_dialect(path: str, wanted: Sequence[str] = (), header: str = "auto") -> Dialect:
    text = head_of(path)
    dialect = guess_dialect(text, wanted, header)
    if dialect is None:
        first = shorten(text.partition("\n")[0])
        raise DataError(
            f"{path} does not look like csv: expected rows of one width, separated by commas, semicolons, tabs, | or "
            f"blanks. Its first line is '{first}'{hint_at_open_quote(text)}"
        )
    return dialect


def mark_blanks(text: bytes | bytearray) -> bytes:
    """Replace the last blank of each run between two cells, but not within quotes, by :data:`BLANKS`."""
    return _BLANKS.sub(lambda run: run[0] if run[0][:1] == b'"' else run[0][1:].replace(b"\t", b" ") + b"\x1f", text)


def parse_rows(text: str, separator: str, limit: int | None = None) -> list[list[str]]:
    """Return the rows before the first invalid row, without blanks around cells."""
    rows: list[list[str]] = []
    if separator == BLANKS:
        text = mark_blanks(text.encode()).decode()
    try:
        for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator):
            if row:
                rows.append([cell.strip(" ") for cell in row])
            if len(rows) == limit:
                break
    except csv.Error:
        pass
    return rows


def guess_dialect(text: str, wanted: Sequence[str] = (), header: str = "auto") -> Dialect | None:
    """Return the dialect of a file that begins with `text`; None if it does not look like csv.

    With the right separator, most rows have as many cells as the first row, or the first row has a `wanted` name. If
    `header` is auto, the first row is a header if it has a wanted name, or if there are no wanted names and its words
    are rare in the rows below. If `wanted` are positions such as ``c3``, the first row is a header only if it has all
    of them as names.
    """
    found: list[tuple[bool, float, int, str, list[list[str]]]] = []
    declared = _DECLARED.match(text)
    text = text[declared.end() :] if declared else text
    for separator in declared[1] if declared else (*SEPARATORS, LAST_SEPARATOR, BLANKS):
        if found and (separator == LAST_SEPARATOR or (separator == BLANKS and not _is_aligned(text, found[-1][3]))):
            continue
        rows = parse_rows(text, separator, _ROWS)
        if len(rows) < (1 if wanted else 2) or len(rows[0]) < 2:
            continue
        share = sum(len(row) == len(rows[0]) for row in rows) / len(rows)
        names_it = any(name.strip(" ") in rows[0] for name in wanted or LABEL_NAMES)
        if separator == BLANKS and (share < _BLANKS_SHARE or not _are_mostly_numbers(rows)):
            continue
        if share > 0.5 or (wanted and names_it):
            found.append((names_it, share, len(rows[0]), separator, rows))
    if not found:
        return None
    _, _, width, separator, rows = max(found, key=lambda candidate: candidate[:3])
    first, data = rows[0], [row for row in rows[1:] if len(row) == width]
    known = {name.strip(" "): name for name in wanted}
    if header != "auto":
        has_header = header == "yes"
    elif wanted and all(PLACE.fullmatch(name) and int(name[1:]) <= width for name in wanted):
        has_header = {*wanted} <= {*first}
    else:
        has_header = any(cell in known for cell in first) or _is_header(first, data)
    are_places = header == "yes" and wanted and all(map(PLACE.fullmatch, wanted)) and known.keys().isdisjoint(first)
    has_names = has_header and not are_places
    names = tuple((known.get(first[at], first[at]) if has_names else "") or f"c{at + 1}" for at in range(width))
    return Dialect(separator, names, has_header)


def _is_aligned(text: str, separator: str) -> bool:
    lines = text.splitlines()[:_ROWS]
    return separator == "\t" and sum("  " in line.strip() for line in lines) > len(lines) / 2


def _are_mostly_numbers(rows: Sequence[Sequence[str]]) -> bool:
    columns = zip(*([row for row in rows[1:] if len(row) == len(rows[0])] or rows), strict=True)
    return 2 * sum(all(is_number(cell) or is_missing(cell) for cell in cells) for cells in columns) >= len(rows[0])


def _is_header(first: list[str], data: list[list[str]]) -> bool:
    """Return whether the first row contains column names.

    In a header, at most half of the words occur again in their own columns.
    """
    below = [[cell for cell in cells if not is_missing(cell)] for cells in zip(*data, strict=True)] or [[]] * len(first)
    words = [
        (cell, column) for cell, column in zip(first, below, strict=True) if not (is_number(cell) or is_missing(cell))
    ]
    if 2 * sum(cell in column for cell, column in words) > len(words):
        return False
    if any(cell.lower() in LABEL_NAMES or (column and all(map(is_number, column))) for cell, column in words):
        return True
    names = [cell for cell in first if cell]
    return len(set(names)) == len(names) > 0 and not any(map(is_number, names))


def hint_at_open_quote(text: str) -> str:
    if text.count('"') % 2 == 0:
        return ""
    number = next((number for number, line in enumerate(text.split("\n"), 1) if line.count('"') % 2), 0)
    return f". Line {number:,} opens a quote and does not close it" if number else ""


def is_number(cell: str) -> bool:
    return NUMBER.fullmatch(cell.strip(" \t")) is not None


def is_missing(cell: str) -> bool:
    return cell.strip().lower() in MISSING
