"""CSV: rows of cells that are separated by commas, semicolons, tabs, bars or blanks."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from itertools import islice

from typing_extensions import override

from paceline.data.columns import Columns
from paceline.data.csv_text import CsvReader
from paceline.data.dialect import BLANKS, PREAMBLE, Dialect, guess_dialect, mark_blanks, parse_rows, read_dialect
from paceline.data.feature_names import NameFinder, decoded, encoded, text_lines
from paceline.data.formats.table_format import TableFormat, trimmed
from paceline.data.reader import ReadSettings, ShardReader
from paceline.data.sampling import TextTable, places_of, text_pieces
from paceline.kernels.hashing import name_seed


class Csv(TableFormat):
    """CSV (RFC 4180), with or without a header."""

    name = "csv"
    scans_to_enter = True
    column_options = (*TableFormat.column_options, "--header")

    @override
    def matches(self, path: str, lines: Sequence[str]) -> bool:
        return not lines[0].lstrip().startswith("{") and guess_dialect("\n".join(lines)) is not None

    @override
    def column_names(self, path: str, wanted: Sequence[str] = (), header: str = "auto") -> list[str]:
        return list(read_dialect(path, wanted, header).names)

    @override
    def sample_table(self, files: Sequence[str], wanted: Sequence[str] = (), header: str = "auto") -> TextTable:
        names: tuple[str, ...] = ()
        rows: list[list[str]] = []
        dialects: dict[int, Dialect] = {}
        for file, start, lines in text_pieces(files):
            if file not in dialects:
                dialects[file] = read_dialect(files[file], wanted, header)
            dialect = dialects[file]
            names = names or dialect.names
            found = parse_rows(lines.decode("utf-8", errors="replace"), dialect.separator)
            at_names = places_of(dialect.names)
            places = [at_names.get(name, -1) for name in names]
            for row in found[1:] if start == 0 and dialect.has_header else found:
                if len(row) == len(dialect.names):
                    rows.append([row[at] if at >= 0 else "" for at in places])
        has_header = next((dialect.has_header for dialect in dialects.values()), True)
        return TextTable(names, ("",) * len(names), rows, has_header)

    @override
    def read_cells(self, files: Sequence[str], columns: Columns, name: str) -> Iterator[str]:
        return (cell for (cell,) in _read_rows(files, columns, [name]))

    @override
    def add_categories(self, finder: NameFinder, files: Sequence[str], columns: Columns) -> None:
        rows = _read_rows(files, columns, columns.categorical)
        finder.read(columns.categorical, list(map(name_seed, columns.categorical)), rows)

    @override
    def open_reader(self, path: str, settings: ReadSettings) -> ShardReader:
        return CsvReader(path, settings)


def _read_rows(files: Sequence[str], columns: Columns, names: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the cells of the named columns of each row."""
    for file in files:
        dialect = read_dialect(file, columns.names, columns.header)
        places = [dialect.names.index(name) for name in names]
        lines = (line for at, line in enumerate(text_lines([file], "")) if at or not PREAMBLE.fullmatch(encoded(line)))
        if dialect.separator == BLANKS:
            lines = (decoded(mark_blanks(encoded(line))) for line in lines)
        rows = csv.reader(lines, delimiter=dialect.separator)
        for row in islice(rows, int(dialect.has_header), None):
            if len(row) == len(dialect.names):
                yield [trimmed(row[at], columns) for at in places]
