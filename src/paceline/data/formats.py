"""Which format a file has, told from its content."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from paceline.data.bad_lines import shorten
from paceline.data.binary.arrays import NPY_MAGIC, ZIP_MAGIC
from paceline.data.binary.blocks import MAGIC
from paceline.data.dialect import BYTE_ORDER_MARK, LAST_SEPARATOR, NUMBER, guess_dialect, hint_at_open_quote, read_lines
from paceline.data.streams import stat_file
from paceline.errors import DataError

FORMATS = ("criteo", "libsvm", "libffm", "vw", "jsonl", "csv", "parquet", "numpy", "paceline")
TEXT_FORMATS = ("criteo", "libsvm", "libffm", "vw", "jsonl")
KEYED_FORMATS = ("libsvm", "libffm", "vw", "jsonl")
"""Formats without columns: what their numbers are is told from a sample, key by key."""
COLUMN_FORMATS = ("csv", "parquet")
CONVERTED = "paceline"
"""The format of what ``paceline convert`` writes."""

_LIBSVM = re.compile(rf"[ \t]*{NUMBER.pattern}(?:[ \t]+(?:qid:[0-9]+|[0-9]+:{NUMBER.pattern}))*[ \t]*(?:#.*)?")
_FFM = re.compile(rf"[ \t]*(?:{NUMBER.pattern}(?=[ \t]))?(?:[ \t]*[^\s:|]+:[^\s:|]+:{NUMBER.pattern}(?!\S))+[ \t]*")
_BANDIT = re.compile(rf"[ \t]*(?:[0-9]+:{NUMBER.pattern}(?::{NUMBER.pattern})?[ \t]*)+\||shared[ \t]*\|")
_VW = re.compile(
    rf"[ \t]*(?:{NUMBER.pattern}(?:[ \t]+{NUMBER.pattern}){{0,2}}[ \t]*)?(?:'[^ \t|]*[ \t]+|'?[^ \t|]*)?\|"
)


def detect_format(path: str | Path) -> str:
    """The format of `path` (one of :data:`FORMATS`), told from its first 64 KiB, or the first line if longer.

    :exc:`DataError` if the file cannot be read, or if it fits no format.
    """
    path = str(path)
    stat_file(path)
    head, whole = read_lines(path)
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(MAGIC):
        return CONVERTED
    if head.startswith((NPY_MAGIC, ZIP_MAGIC)):
        return "numpy"
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
        if _share(data, _FFM.fullmatch) > 0.5:
            return "libffm"
        if _share(lines, _BANDIT.match) > 0.5 or lines[0].startswith("shared |"):
            raise DataError(
                f"{path} is in the contextual bandit format of Vowpal Wabbit, which is not supported: write lines with "
                "one label, '1 | a b'"
            )
        if _share(lines, _is_json) > 0.5 or _is_json(lines[0]):
            return "jsonl"
        if _share(lines, _is_vw) > 0.5 and not _is_bar_separated(lines):
            return "vw"
        if not lines[0].lstrip().startswith("{") and guess_dialect("\n".join(lines)) is not None:
            return "csv"
    if lines and lines[0].lstrip().startswith("{"):
        raise DataError(
            f"{path} looks like JSON whose objects do not end in the line in which they begin: write one object per "
            "line, as jq -c . does"
        )
    if lines and lines[0].lstrip().startswith("["):
        raise DataError(f"{path} looks like an array of JSON: write one object per line, as jq -c '.[]' does")
    if len(lines) == 1 and guess_dialect(lines[0], [""]) is not None:
        raise DataError(f"{path} has one line, '{shorten(lines[0])}', and no row of data behind it")
    first = f"its first line is '{shorten(lines[0])}'" if lines else "it holds no line of text"
    first += hint_at_open_quote("\n".join(lines))
    raise DataError(f"{path} looks like none of {', '.join(FORMATS)}: {first}; if it is one, say so with --format")


def is_unlabelled_criteo(path: str) -> bool:
    """Whether most lines are those of Criteo's format without the label, as its test data is."""
    lines = read_lines(path)[0].decode("utf-8", errors="replace").split("\n")
    whole = [line for line in lines if line.strip()]
    return bool(whole) and _share(whole, _is_criteo) <= 0.5 < _share(whole, lambda line: line.count("\t") == 38)


def source_format(path: str | Path, format: str | None = None) -> str:
    """The format whose features a file has: converted data those of its sources, arrays those of libsvm.

    Raises DataError.
    """
    from paceline.data.binary.converted import describe_converted

    format = format or detect_format(path)
    if format == CONVERTED:
        format = describe_converted(str(path)).description.format
    return feature_format(format)


def feature_format(format: str) -> str:
    """Return the format whose features one that is no converted data has: arrays those of libsvm."""
    return "libsvm" if format == "numpy" else format


def have_same_features(format: str, other: str) -> bool:
    """Whether a model that was trained on one of two source formats can read the other."""
    return format == other or {format, other} <= set(COLUMN_FORMATS)


def _share(lines: list[str], fits: Callable[[str], object]) -> float:
    return sum(bool(fits(line)) for line in lines) / max(len(lines), 1)


def _is_criteo(line: str) -> bool:
    return line.count("\t") == 39 and line[:2] in ("0\t", "1\t")


def _is_json(line: str) -> bool:
    line = line.strip()
    return line.startswith("{") and line.endswith("}") and '"' in line[:4096]


def _is_vw(line: str) -> bool:
    return _VW.match(line) is not None


def _is_bar_separated(lines: list[str]) -> bool:
    """Whether lines that begin as those of vw are csv: they have names in the first, or not one feature in all."""
    if re.fullmatch(r"[^\s|]+(?:\|[^\s|]+)+", lines[0]) is None:  # as examples begin that have features, or none at all
        return False
    dialect = guess_dialect("\n".join(lines))
    if dialect is None:
        return False
    has_names = dialect.has_header and dialect.separator == LAST_SEPARATOR
    return has_names or not any(re.search(r"\|\S*[ \t]+[^\s|]", line) for line in lines)


def _is_libsvm(line: str) -> bool:
    return _LIBSVM.fullmatch(line) is not None
