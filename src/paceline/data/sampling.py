"""Sample data files: read pieces of text spread over the files, because files may be sorted.

The same files give the same pieces. Only the beginning of a gzip file is read, because all text before a later piece
would have to be decompressed.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data.bad_lines import BadLines
from paceline.data.batch import Batch
from paceline.data.binary.converted import ConvertedFile
from paceline.data.columns import Columns, Guesses
from paceline.data.dialect import PREAMBLE
from paceline.data.labels import MOST_CLASSES, describe_no_numbers, find_classes, read_label
from paceline.data.streams import open_stream, read_bytes, stat_file, text_size
from paceline.errors import DataError
from paceline.kernels.text.values import number_text

_PIECES = 64
_PIECE_BYTES = 32 << 10
_LONG_LINES_BYTES = 16 << 20  # at most this much further text is read to complete long lines
_MOST_CLASSES = 64


@dataclass(frozen=True, slots=True)
class TextTable:
    """Rows of csv or parquet files, as text. A missing cell is empty; a list is a JSON list of texts.

    `types` are the types of the columns in parquet files: ``integer``, ``float``, ``boolean``, ``text``, ``list`` or
    ``nested``; empty for csv.
    """

    names: tuple[str, ...]
    types: tuple[str, ...]
    rows: list[list[str]]
    has_header: bool = True
    """Whether the names come from the first file's header; otherwise they are positions such as c1."""
    _places: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_places", places_of(self.names))

    def column(self, name: str) -> list[str]:
        at = self._places[name]
        return [row[at] for row in self.rows]

    def counts(self, name: str) -> Counter[str]:
        """Return the number of nonempty cells (of elements, if the column has lists) with each value."""
        cells = [cell for cell in self.column(name) if cell]
        if self.types[self._places[name]] == "list":
            cells = [element for cell in cells for element in json.loads(cell)]
        return Counter(cells)

    def classes(self, name: str) -> tuple[str, ...]:
        """Return the words that are the labels in a column; no words if labels are numbers."""
        return find_classes(self.column(name))

    def labels(self, name: str) -> npt.NDArray[np.float64] | None:
        """Return a column's labels (NaN: missing). None if 3 to 64 are distinct: they may be classes or counts."""
        classes = self.classes(name)
        found = [read_label(cell, classes) for cell in self.column(name)]
        if 2 < len({label for label in found if label is not None}) <= _MOST_CLASSES:
            return None
        return np.array([math.nan if label is None else label for label in found])


def places_of(names: Sequence[str]) -> dict[str, int]:
    return {name: at for at, name in reversed(list(enumerate(names)))}


def json_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return number_text(repr(value)) if isinstance(value, float) else str(value)


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` evenly spread numbers from 0 to `count` - 1, including both."""
    if count <= most:
        return list(range(count))
    return [at * (count - 1) // (most - 1) for at in range(most)] if most > 1 else [0]


def text_pieces(files: Sequence[str]) -> Iterator[tuple[int, int, bytes]]:
    """Yield pieces of lines spread over the files: the file's number, the offset of the piece, and its lines."""
    chosen = spread(len(files), _PIECES)
    num_pieces = max(1, _PIECES // len(chosen))
    budget = _LONG_LINES_BYTES
    for file in chosen:
        path = files[file]
        size = text_size(path, stat_file(path).num_bytes)
        with contextlib.closing(open_stream(path)) as stream:
            if size is None or size <= num_pieces * _PIECE_BYTES:
                starts, length = [0], num_pieces * _PIECE_BYTES
            else:
                starts = [at * (size - _PIECE_BYTES) // max(num_pieces - 1, 1) for at in range(num_pieces)]
                length = _PIECE_BYTES
            for start in starts:
                stream.seek(start)
                piece = read_bytes(stream, length)
                begin = _first_line(piece, start)
                while not 0 <= begin < piece.rfind(b"\n") + 1 and len(piece) < budget:
                    more = read_bytes(stream, len(piece))  # the piece lies within one long line
                    piece += more
                    begin = _first_line(piece, start)
                    if not more:
                        break
                budget -= len(piece) - length
                end = piece.rfind(b"\n") + 1 or len(piece)
                preamble = PREAMBLE.match(piece) if start == 0 else None
                if 0 <= begin < end:
                    yield file, start + begin, piece[max(begin, preamble.end() if preamble else 0) : end]


def _first_line(piece: bytes, start: int) -> int:
    """Return the start of the first complete line of a piece; -1 if there is none."""
    newline = piece.find(b"\n")
    return 0 if start == 0 else newline + 1 if 0 <= newline < len(piece) - 1 else -1


@dataclass(frozen=True, slots=True, eq=False)
class ExampleSample:
    """Examples in the order of the files, in runs of neighbours. Run i begins with row ``starts[i]`` of `batch`."""

    batch: Batch
    starts: npt.NDArray[np.int64]
    num_examples: int
    """The number of examples in the data set. It is an estimate unless the sample has all of them (`is_whole`)."""
    is_whole: bool
    bad_lines: BadLines | None = None
    num_read: int = 0
    """The number of examples that were read. Some of them may not be in the sample."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """A sample of data files, and properties of the data derived from it."""

    files: tuple[str, ...]
    format: str
    labels: dict[float, int]
    """The number of sampled rows (in converted data: of all rows) with each label."""
    columns: Columns | None = None
    guesses: Guesses | None = None
    """The guessed kinds of the columns, with reasons."""
    has_guessed_columns: bool = False
    label_words: tuple[str, ...] = ()
    """The words for 0 and 1, such as no and yes, that occur as labels."""
    fields: tuple[str, ...] = ()
    """The namespaces or fields of rows, for formats without columns."""
    table: TextTable | None = None
    """The sampled rows of csv and parquet files, as text."""
    converted: tuple[ConvertedFile, ...] = ()
    """The descriptions of converted files, which are closed."""
    examples: ExampleSample | None = None
    """The examples on which a trial chose the scales of the columns; None if there was no trial."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The words that are labels; empty if labels are numbers."""
        return () if self.columns is None else self.columns.classes

    @property
    def header_note(self) -> str | None:
        """A note that the csv files have no header; None if they have a header or another format."""
        if self.table is None or self.table.has_header:
            return None
        last = self.table.names[-1]
        return (
            f"{self.files[0]} has no header: its columns are c1 to {last} (--header yes reads names from its first row)"
        )


def check_numbers(path: str, columns: Columns, labels: Sequence[str], weights: Sequence[str]) -> None:
    texts = None if columns.classes else describe_no_numbers(labels)
    if texts is not None:
        raise DataError(
            f"{path}: the labels, column '{columns.label}', are {texts}: expected numbers, or 2 to {MOST_CLASSES} "
            "words. Choose another column with --label"
        )
    texts = describe_no_numbers(weights)
    if texts is not None:
        raise DataError(f"{path}: the weights, column '{columns.weight}', are {texts}: expected numbers of 0 or more")
