"""A look at the data before it is read: pieces of the files, spread over them, for files may be sorted.

The same files give the same sample. Of a gzip file it is the beginning: the rest is not
reached without unpacking all before it.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data.binary.arrays import ArrayFile
from paceline.data.binary.converted import describe_converted
from paceline.data.columns import Columns, import_arrow, is_list
from paceline.data.dialect import PREAMBLE, Dialect, parse_rows, read_dialect
from paceline.data.formats import CONVERTED, TEXT_FORMATS
from paceline.data.labels import count_labels, find_classes, read_label
from paceline.data.streams import ByteStream, open_stream, stat_file, text_size
from paceline.kernels.text.values import number_text

_PIECES = 64
_PIECE_BYTES = 32 << 10
_LONG_LINES_BYTES = 16 << 20  # more is read beyond the pieces only to find the ends of their lines
_SAMPLED_GROUPS = 16
_SAMPLED_ROWS = 16_000
_MOST_CLASSES = 64
_FIELDS = {"vw": re.compile(rb"\|([^\s:|]*)"), "libffm": re.compile(rb"(?:^|[ \t])([^\s:|]+):[^\s:|]+:", re.MULTILINE)}


@dataclass(frozen=True, slots=True)
class Sample:
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
        object.__setattr__(self, "_places", _places_of(self.names))

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


def _places_of(names: Sequence[str]) -> dict[str, int]:
    """Return where each column is, of several with one name the first."""
    return {name: at for at, name in reversed(list(enumerate(names)))}


def sample_rows(files: Sequence[str], format: str, wanted: Sequence[str] = (), header: str = "auto") -> Sample:
    """Rows from places spread over the files; `wanted` and `header` as for :func:`guess_dialect`."""
    if format == "parquet":
        return _sample_parquet(files)
    names: tuple[str, ...] = ()
    rows: list[list[str]] = []
    dialects: dict[int, Dialect] = {}
    for file, start, lines in text_pieces(files):
        if file not in dialects:
            dialects[file] = read_dialect(files[file], wanted, header)
        dialect = dialects[file]
        names = names or dialect.names
        found = parse_rows(lines.decode("utf-8", errors="replace"), dialect.separator)
        at_names = _places_of(dialect.names)
        places = [at_names.get(name, -1) for name in names]
        for row in found[1:] if start == 0 and dialect.has_header else found:
            if len(row) == len(dialect.names):
                rows.append([row[at] if at >= 0 else "" for at in places])
    return Sample(names, ("",) * len(names), rows, next((each.has_header for each in dialects.values()), True))


def _sample_parquet(files: Sequence[str]) -> Sample:
    """Rows from row groups spread over the files."""
    from paceline.data.tables import open_parquet

    names: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    rows: list[list[str]] = []
    chosen = spread(len(files), _SAMPLED_GROUPS)
    for at in chosen:
        with open_parquet(files[at]) as file:
            schema = file.schema_arrow
            if not names:
                names, types = tuple(schema.names), tuple(map(_kind_of, schema.types))
            groups = spread(file.metadata.num_row_groups, max(1, _SAMPLED_GROUPS // len(chosen)))
            of_each = _SAMPLED_ROWS // max(len(groups) * len(chosen), 1)
            for group in groups:
                for record_batch in file.iter_batches(of_each, row_groups=[group], use_threads=False):
                    there = record_batch.schema.names
                    cells = [
                        [_as_text(cell) for cell in record_batch.column(there.index(name)).to_pylist()]
                        if name in there
                        else [""] * record_batch.num_rows
                        for name in names
                    ]
                    rows += map(list, zip(*cells, strict=True))
                    break
    return Sample(names, types, rows)


def _as_text(cell: Any) -> str:
    if cell is None:
        return ""
    if isinstance(cell, list):
        return json.dumps([json_text(each) for each in cell if each is not None]) if cell else ""
    return str(cell).lower() if isinstance(cell, bool) else str(cell)


def _kind_of(type: Any) -> str:
    """What a column of a parquet file holds, in the words of :class:`Sample`."""
    types = import_arrow().types
    if is_list(type):
        return "list"
    if types.is_nested(type):
        return "nested"
    if types.is_boolean(type):
        return "boolean"
    if types.is_integer(type):
        return "integer"
    return "float" if types.is_floating(type) or types.is_decimal(type) else "text"


def sample_labels(files: Sequence[str], format: str, columns: Columns | None = None) -> dict[float, int]:
    """The labels in rows spread over the files (of converted data: in all), and how often each was seen."""
    if columns is not None and format in ("csv", "parquet"):
        sample = sample_rows(files, format, columns.names, columns.header)
        is_there = columns.label in sample.names
        return count_labels(sample.column(columns.label), columns.classes) if is_there else {}
    if format == "numpy":
        found = [file.y for file in map(ArrayFile, files) if file.y is not None]
        return dict(Counter(float(label) for y in found for label in y[:: len(y) // _SAMPLED_ROWS + 1]))
    if format == CONVERTED:
        counts: Counter[float] = Counter()
        for file in files:
            counts.update(describe_converted(file).labels)
        return dict(sorted(counts.items()))
    if format in TEXT_FORMATS:
        words = (
            line.split(None, 1)[0] for _, _, lines in text_pieces(files) for line in lines.split(b"\n") if line.strip()
        )
        cells = [word.decode("utf-8", errors="replace") for word in words]
        if format == "jsonl":
            assert columns is not None
            cells = json_cells(sample_objects(files), columns.label)
        if format == "criteo":
            cells = [cell for cell in cells if cell in ("0", "1")]  # its reader takes no others
    else:
        assert columns is not None
        cells = sample_rows(files, format, columns.names).column(columns.label)
    return count_labels(cells, columns.classes if columns is not None else ())


def sample_namespaces(files: Sequence[str], format: str = "vw") -> tuple[str, ...]:
    """The names of the namespaces in lines of Vowpal Wabbit, or fields of libffm, spread over the files, as they come;
    "" has none.
    """
    names: dict[str, None] = {}
    for _, _, lines in text_pieces(files):
        for found in _FIELDS[format].findall(lines):
            names.setdefault(found.decode("utf-8", errors="surrogateescape"))
    return tuple(names)


def sample_objects(files: Sequence[str]) -> list[dict[str, Any]]:
    """Objects of JSON lines spread over the files."""
    objects = []
    for _, _, lines in text_pieces(files):
        for line in lines.split(b"\n"):
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict):
                objects.append(found)
    return objects


def json_cells(objects: Sequence[Mapping[str, Any]], wanted: str) -> list[str]:
    """The values of a field in the objects that have it, as text."""
    return [json_text(value) for each in objects for name, value, _ in walk_fields(each) if name == wanted]


def walk_fields(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any, bool]]:
    """Yield the dotted name of each value that is no object and no list, the value, and whether it stands in a list."""
    for name, each in value.items():
        yield from _walk(each, f"{path}.{name}" if path else name, in_list=False)


def _walk(value: Any, path: str, *, in_list: bool) -> Iterator[tuple[str, Any, bool]]:
    if isinstance(value, dict):
        yield from walk_fields(value, path)
    elif isinstance(value, list):
        for each in value:
            yield from _walk(each, path, in_list=True)
    else:
        yield path, value, in_list


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
