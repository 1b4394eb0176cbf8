"""Data formats, one class each, and detection of a file's format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from paceline.data.bad_lines import shorten
from paceline.data.dialect import BYTE_ORDER_MARK, guess_dialect, hint_at_open_quote, read_lines
from paceline.data.formats.base import Format
from paceline.data.formats.converted import CONVERTED, ConvertedData
from paceline.data.formats.criteo import Criteo
from paceline.data.formats.csv_format import Csv
from paceline.data.formats.json_lines import JsonLines
from paceline.data.formats.libsvm import Libsvm
from paceline.data.formats.numpy_arrays import NumpyArrays
from paceline.data.formats.parquet import Parquet
from paceline.data.formats.vw import Libffm, VowpalWabbit
from paceline.data.streams import stat_file
from paceline.errors import DataError, UsageError

__all__ = ["CONVERTED", "FORMATS", "Format", "detect_format", "find_format", "have_same_features", "source_format"]

# JSON lines come before vw, because a text in JSON may contain the bar of a namespace, and no line of vw is a JSON
# object.
_CLASSES = (Criteo, Libsvm, Libffm, JsonLines, VowpalWabbit, Csv, Parquet, NumpyArrays, ConvertedData)
FORMATS: Final[Mapping[str, Format]] = {kind.name: kind() for kind in _CLASSES}
"""The formats by name, in the order of detection."""


def detect_format(path: str | Path) -> str:
    """Detect the format of a file from its first 64 KiB, or from its first line if that is longer.

    Raises DataError for an unreadable file, or an unknown format.
    """
    path = str(path)
    stat_file(path)
    head, is_all = read_lines(path)
    for format in FORMATS.values():
        if format.magics and head.startswith(format.magics):
            return format.name
    lines = head.removeprefix(BYTE_ORDER_MARK).decode("utf-8", errors="replace").split("\n")
    if not is_all and len(lines) > 1:
        lines.pop()  # the last line may be cut
    lines = [line.rstrip("\r") for line in lines if line.strip() and "\0" not in line]
    for format in FORMATS.values() if lines else ():
        if format.matches(path, lines):
            return format.name
    raise _unknown_format(path, lines)


def _unknown_format(path: str, lines: list[str]) -> DataError:
    first = lines[0].lstrip() if lines else ""
    if first.startswith("{"):
        return DataError(
            f"{path} looks like JSON with objects of several lines. Write one object per line, as jq -c . does"
        )
    if first.startswith("["):
        return DataError(f"{path} looks like a JSON array. Write one object per line, as jq -c '.[]' does")
    if len(lines) == 1 and guess_dialect(lines[0], [""]) is not None:
        return DataError(f"{path} has one line, '{shorten(lines[0])}', and no row of data after it")
    found = f"its first line is '{shorten(lines[0])}'" if lines else "it has no line of text"
    found += hint_at_open_quote("\n".join(lines))
    return DataError(f"{path} looks like none of {', '.join(FORMATS)}: {found}. Pass --format if it is one")


def find_format(name: str) -> Format:
    """Return the format of this name. Raises UsageError for an unknown name."""
    if name not in FORMATS:
        raise UsageError(f"format {name!r} is unknown. Choose one of {', '.join(FORMATS)}")
    return FORMATS[name]


def source_format(path: str | Path, format: str | None = None) -> str:
    """Return the name of the format that determines the features of a file.

    For converted data this is the format of the sources; for arrays it is libsvm. `format` is the file's own format;
    None detects it. Raises DataError, and UsageError for an unknown format.
    """
    return find_format(format or detect_format(path)).source_of(str(path))


def have_same_features(format: str, other: str) -> bool:
    """Return whether a model that was trained on data of one format can predict data of the other format."""
    return format == other or all(name in FORMATS and FORMATS[name].has_columns for name in (format, other))
