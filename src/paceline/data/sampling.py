"""A look at the data before it is read: pieces of the files, spread over them, for files may be sorted.

The same files give the same sample. Of a gzip file it is the beginning: the rest is not
reached without unpacking all before it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data.dialect import PREAMBLE
from paceline.data.labels import find_classes, read_label
from paceline.data.streams import ByteStream, open_stream, stat_file, text_size
from paceline.kernels.text.values import number_text

_PIECES = 64
_PIECE_BYTES = 32 << 10
_LONG_LINES_BYTES = 16 << 20  # more is read beyond the pieces only to find the ends of their lines
_MOST_CLASSES = 64


@dataclass(frozen=True, slots=True)
class TextTable:
    """Rows of csv or parquet files, as text; a missing cell is empty, a list the JSON of the texts of its elements.

    `types` says of each column what a parquet file says of it: ``integer``, ``float``, ``boolean``, ``text``,
    ``list`` or ``nested``; of csv it is empty, for nothing is said there.
    """

    names: tuple[str, ...]
    types: tuple[str, ...]
    rows: list[list[str]]
    has_header: bool = True
    """Whether the first file has the names; else they are places."""
    _places: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_places", places_of(self.names))

    def column(self, name: str) -> list[str]:
        """The cells of a column."""
        at = self._places[name]
        return [row[at] for row in self.rows]

    def counts(self, name: str) -> Counter[str]:
        """How often each value comes in a column, empty cells aside; of lists each element."""
        cells = [cell for cell in self.column(name) if cell]
        if self.types[self._places[name]] == "list":
            cells = [each for cell in cells for each in json.loads(cell)]
        return Counter(cells)

    def classes(self, name: str) -> tuple[str, ...]:
        """The words that labels in a column are, if they are."""
        return find_classes(self.column(name))

    def labels(self, name: str) -> npt.NDArray[np.float64] | None:
        """The labels in a column, NaN where there is none; None for 3 to 64 values: they may be classes or counts."""
        classes = self.classes(name)
        found = [read_label(cell, classes) for cell in self.column(name)]
        if 2 < len({label for label in found if label is not None}) <= _MOST_CLASSES:
            return None
        return np.array([math.nan if label is None else label for label in found])


def places_of(names: Sequence[str]) -> dict[str, int]:
    """Return where each column is, of several with one name the first."""
    return {name: at for at, name in reversed(list(enumerate(names)))}


def json_text(value: Any) -> str:
    """A category as its key is made of it."""
    if isinstance(value, bool):
        return str(value).lower()
    return number_text(repr(value)) if isinstance(value, float) else str(value)


def spread(count: int, most: int) -> list[int]:
    """At most `most` of the numbers below `count`, first and last included, evenly spread."""
    if count <= most:
        return list(range(count))
    return [at * (count - 1) // (most - 1) for at in range(most)] if most > 1 else [0]


def text_pieces(files: Sequence[str]) -> Iterator[tuple[int, int, bytes]]:
    """Whole lines from places spread over the files: the file's number, where they begin, and the lines."""
    chosen = spread(len(files), _PIECES)
    each = max(1, _PIECES // len(chosen))
    budget = _LONG_LINES_BYTES
    for file in chosen:
        path = files[file]
        size = text_size(path, stat_file(path).num_bytes)
        stream = open_stream(path)
        try:
            if size is None or size <= each * _PIECE_BYTES:
                starts, length = [0], each * _PIECE_BYTES
            else:
                starts = [at * (size - _PIECE_BYTES) // max(each - 1, 1) for at in range(each)]
                length = _PIECE_BYTES
            for start in starts:
                stream.seek(start)
                piece = _read(stream, length)
                begin = _first_line(piece, start)
                while not 0 <= begin < piece.rfind(b"\n") + 1 and len(piece) < budget:
                    more = _read(stream, len(piece))  # of a line that is longer
                    piece += more
                    begin = _first_line(piece, start)
                    if not more:
                        break
                budget -= len(piece) - length
                end = piece.rfind(b"\n") + 1 or len(piece)
                preamble = PREAMBLE.match(piece) if start == 0 else None
                if 0 <= begin < end:
                    yield file, start + begin, piece[max(begin, preamble.end() if preamble else 0) : end]
        finally:
            stream.close()


def _first_line(piece: bytes, start: int) -> int:
    """Where the first whole line of a piece begins; -1 for none."""
    newline = piece.find(b"\n")
    return 0 if start == 0 else newline + 1 if 0 <= newline < len(piece) - 1 else -1


def _read(stream: ByteStream, length: int) -> bytes:
    buffer = bytearray(length)
    filled = 0
    while filled < length and (count := stream.readinto(memoryview(buffer)[filled:])):
        filled += count
    return bytes(buffer[:filled])
