"""CSV: rows of cells separated by commas, semicolons, tabs, bars or blanks.

A shard is a range of bytes of the decompressed text, with the rows that begin in this range. The start of a row depends
on all earlier quotes, so a reader that enters a file in the middle scans all earlier text. If the earlier text has no
quote and no carriage return, a row starts after the next newline, so scanning takes little longer than reading the
bytes.
"""

from __future__ import annotations

import csv
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from paceline.data.bad_lines import BadLine, shorten
from paceline.data.batch import Batch, fields_by_place, insert_lists
from paceline.data.columns import Columns
from paceline.data.dialect import BLANKS, PREAMBLE, Dialect, guess_dialect, mark_blanks, parse_rows, read_dialect
from paceline.data.feature_names import NameFinder, decoded, encoded, text_lines
from paceline.data.formats.table_format import TableFormat, trimmed
from paceline.data.reader import BLOCK_BYTES, ReadSettings, Report, ShardReader
from paceline.data.sampling import TextTable, places_of, text_pieces
from paceline.data.streams import line_number, text_size
from paceline.data.text import MAX_LINE_BYTES, Parsed, TextWindow, call_kernel
from paceline.errors import DataError
from paceline.kernels.hashing import name_seed

Text = npt.NDArray[np.uint8]
ParseRows = Callable[[Text, int, int, int, bool], Parsed]

_LEAST_CELL_BYTES = 3


class Csv(TableFormat):
    """CSV (RFC 4180), with or without a header."""

    name = "csv"
    scans_to_enter = True
    cells_are_text = True
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


def csv_parser(dialect: Dialect, columns: Columns, *, needs_label: bool) -> ParseRows:
    """Return a parser for the rows of ``text[start:end]`` that begin before `limit`. See ``kernels.parse_csv``."""
    from paceline.kernels.text import csv as kernels
    from paceline.kernels.text.codes import LABEL_SLOT, OPTIONAL_LABEL_SLOT, SKIPPED_SLOT, TEXT_SLOT, WEIGHT_SLOT
    from paceline.kernels.text.values import powers_of_ten

    features = [*columns.categorical, *columns.numeric]
    places = {name: slot for slot, name in enumerate(features)}
    places |= {name: TEXT_SLOT - number for number, name in enumerate(columns.text)}
    text_seeds = np.array([name_seed(name) for name in columns.text], np.uint64)
    places[columns.label] = LABEL_SLOT if needs_label else OPTIONAL_LABEL_SLOT
    if columns.weight:
        places[columns.weight] = WEIGHT_SLOT
    slots = np.array([places.get(name, SKIPPED_SLOT) for name in dialect.names], np.int64)
    seeds = np.array([name_seed(name) for name in features], np.uint64)
    classes = np.array([name_seed(word) for word in columns.classes], np.uint64)
    scales = np.zeros((4, len(columns.numeric)), np.float64)
    for at, scale in enumerate(columns.scales):
        scales[:, at] = scale.as_array()
    separator, powers = ord(dialect.separator), powers_of_ten()
    bins = columns.bins
    scratch = np.empty(0, np.uint8)

    def parse(text: Text, start: int, end: int, limit: int, last: bool) -> Parsed:
        nonlocal scratch
        if len(scratch) < len(text):
            scratch = np.empty(len(text), np.uint8)
        capacity = (end - start) // (_LEAST_CELL_BYTES * len(slots)) + 16
        labels, indptr = np.full(capacity, np.nan, np.float32), np.empty(capacity + 1, np.int64)
        weights = np.empty(capacity if columns.weight else 0, np.float32)
        keys = np.empty(capacity * len(seeds), np.uint64)
        values = np.empty(len(keys) if columns.numeric else 0, np.float32)
        words = np.empty((end - start) // 2 + 1 if columns.text else 0, np.uint64)
        word_fields, word_ends = np.empty(len(words), np.uint32), np.empty(capacity + 1, np.int64)
        (rows, num_bad, position, pairs), bad = call_kernel(
            *(kernels.parse_csv, kernels.NUM_COUNTS, text, start, end, limit, int(last), separator),
            *(int(columns.trims), slots, seeds, scales, powers, classes, text_seeds, scratch),
            *(labels, weights, indptr, keys, values, words, word_fields, word_ends),
        )
        batch = Batch(
            labels[:rows],
            indptr[: rows + 1],
            keys[:pairs],
            values[:pairs] if columns.numeric else None,
            weights[:rows] if columns.weight else None,
        )
        if columns.text:
            batch.fields = fields_by_place(batch, columns.categorical)
            num_words, num_numbers = np.diff(word_ends[: rows + 1]), np.diff(batch.indptr) - len(columns.categorical)
            used = slice(word_ends[rows])
            batch = insert_lists(batch, word_fields[used], num_words, words[used], num_numbers)
        if bins is not None:
            batch = bins.apply(batch)
        return Parsed(batch, position, num_bad, bad)

    return parse


def describe_bad_row(why: int, dialect: Dialect, columns: Columns, line: str = "") -> str:
    from paceline.kernels.text.codes import BAD_QUOTE, BAD_WIDTH, DETAIL, NO_LABEL, NO_WEIGHT

    detail, kind = divmod(why, DETAIL)
    if kind == BAD_QUOTE:
        return "a quote is opened and not closed"
    if kind == BAD_WIDTH:
        reason = f"it has {detail} cell{'s' * (detail != 1)} where the first row has {len(dialect.names)}"
        is_quoted = any(cell.startswith("'") for cell in line.split(dialect.separator))
        return reason + (". The quote of csv is \", not '" if is_quoted else "")
    return columns.describe_fault(dialect.names[detail], is_missing=kind in (NO_LABEL, NO_WEIGHT))


class CsvReader:
    """Shards of a csv file.

    Invariant: the window begins with the first row (other than the header) that begins at byte `low` or later. Some
    starts of rows are recorded, so that the same text is not scanned again.
    """

    def __init__(self, path: str, settings: ReadSettings) -> None:
        from paceline.kernels.text.csv import skip_rows

        columns, needs_label = settings.columns, settings.needs_label
        assert columns is not None
        self._path = path
        self._columns = columns
        self._dialect = read_dialect(path, columns.names, columns.header)
        columns.check_in(path, self._dialect.names, needs_label=needs_label)
        self._shard_bytes = settings.shard_bytes
        self._parse = csv_parser(self._dialect, columns, needs_label=needs_label)
        self._skip_rows = skip_rows
        self._window = TextWindow(path)
        self._low = 0
        self._row_starts: list[int] = []
        self._is_judged = False
        size = text_size(path, settings.num_bytes)
        self.num_shards = None if size is None else -(-size // self._shard_bytes)
        self._go_to_first_row()

    def close(self) -> None:
        self._window.close()

    def blocks(self, shard: int, report: Report) -> Iterator[Batch]:
        start = shard * self._shard_bytes
        stop = start + self._shard_bytes
        self._go_to(start)
        window = self._window
        while window.position < stop:
            window.fill(min(BLOCK_BYTES, max(stop - window.position + 4096, 65536)))
            while True:
                text, end, last = self._text()
                before = window.position
                parsed = self._parse(text, window.begin, end, stop - window.base, False)
                if last and parsed.position == window.begin < window.end:
                    self._check_open_quote()
                    parsed = self._parse(text, window.begin, end, stop - window.base, True)
                base = window.base
                window.begin = min(parsed.position, window.end)
                self._low = min(window.position, stop)
                if window.position > before or last:
                    break
                self._grow()
            self._record_row_start()
            if parsed.num_bad:
                self._judge(parsed)
                report(parsed.num_bad, [self._describe(base, at, why) for at, why in parsed.bad])
            self._is_judged = True
            if parsed.batch.num_examples:
                yield parsed.batch
            elif last and window.begin == window.end:
                break
        if self.num_shards is None and window.num_bytes is not None:
            self.num_shards = -(-window.num_bytes // self._shard_bytes)

    def _text(self) -> tuple[Text, int, bool]:
        """Return the window's buffer, the end of its text, and whether the file ends there."""
        window = self._window
        last = window.num_bytes is not None
        end = window.end
        if last and end > window.begin and window.buffer[end - 1] != 10:
            window.buffer[end] = 10
            end += 1
        window.buffer[end] = 10
        if self._dialect.separator == BLANKS:
            stop = window.buffer.rfind(b"\n", window.begin, end) + 1 or window.begin
            window.buffer[window.begin : stop] = mark_blanks(window.buffer[window.begin : stop])
        return np.frombuffer(window.buffer, np.uint8), end, last

    def _check_open_quote(self) -> None:
        window = self._window
        num_lines = window.buffer.count(b"\n", window.begin, window.end - 1)
        if num_lines:
            raise DataError(
                f"{self._path}: the row at line {line_number(self._path, window.position):,} opens a quote that is "
                f"never closed, so it would include {num_lines:,} more line{'s' * (num_lines > 1)}. Close the quote, "
                'or write a " within a text twice and the text in quotes'
            )

    def _grow(self) -> None:
        window = self._window
        held = window.end - window.begin
        if held >= MAX_LINE_BYTES:
            raise DataError(
                f"{self._path} has a row of more than {MAX_LINE_BYTES >> 20} MiB, from byte {window.position:,} on. "
                "Check for a quote that is opened there and never closed"
            )
        window.fill(min(2 * held + 65536, MAX_LINE_BYTES))

    def _go_to_first_row(self) -> None:
        window = self._window
        window.seek(0)
        window.fill(65536)
        preamble = PREAMBLE.match(window.buffer)
        window.begin = preamble.end() if preamble else 0
        while window.begin < window.end and window.buffer[window.begin] in b"\r\n":
            window.begin += 1
        if self._dialect.has_header:
            self._skip_to(window.position + 1)
        self._low = 0

    def _go_to(self, start: int) -> None:
        known = bisect_right(self._row_starts, start)
        if start < self._low or (known and self._row_starts[known - 1] > self._window.position):
            if known:
                self._window.seek(self._row_starts[known - 1])
            else:
                self._go_to_first_row()
        self._skip_to(start)
        self._low = min(start, self._window.position)

    def _skip_to(self, position: int) -> None:
        window = self._window
        while window.position < position:
            window.fill(min(BLOCK_BYTES, position - window.position + 65536))
            before = window.position
            wanted = position - window.base
            newline = 0
            if all(window.buffer.find(byte, window.begin, window.end) < 0 for byte in (b'"', b"\r")):
                if wanted <= window.end:
                    newline = window.buffer.find(b"\n", wanted - 1, window.end) + 1
                newline = newline or window.buffer.rfind(b"\n", window.begin, window.end) + 1
            if newline:
                window.begin = newline
            else:
                text, end, last = self._text()
                scratch = np.empty(len(text), np.uint8)
                reached = self._skip_rows(text, window.begin, end, wanted, ord(self._dialect.separator), scratch)
                window.begin = min(reached, window.end)
                if last:
                    if reached < wanted:
                        window.begin = window.end
                    return
            if window.position == before:
                self._grow()
            self._record_row_start()

    def _record_row_start(self) -> None:
        position = self._window.position
        if not self._row_starts or position > self._row_starts[-1]:
            self._row_starts.append(position)

    def _judge(self, parsed: Parsed) -> None:
        if not self._is_judged and not parsed.batch.num_examples and parsed.num_bad >= 10:
            reason = describe_bad_row(parsed.bad[0][1], self._dialect, self._columns)
            raise DataError(
                f"{self._path} has no valid row at its start: {reason}. Correct the rows, or describe the columns with "
                "--label, --numeric, --categorical or --ignore"
            )

    def _describe(self, base: int, at: int, why: int) -> BadLine:
        buffer = self._window.buffer
        line = bytes(buffer[at : buffer.find(b"\n", at)][:1000])
        text = shorten(line)
        return BadLine(self._path, base + at, None, text, describe_bad_row(why, self._dialect, self._columns, text))
