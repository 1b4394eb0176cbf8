"""The readers of the column formats, csv and parquet, on pyarrow (the extra ``paceline[parquet]``).

A shard of a parquet file is a row group. A csv file cannot be entered in the middle (a newline may stand
inside quotes), so it is read from its start, like a gzip file: shard i is the i-th run of record batches,
each of about 1 MiB of text, and how many shards there are is known at the end.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.data.bad_lines import NUM_KEPT, BadLine, shorten
from paceline.data.batch import Batch
from paceline.data.columns import Columns, Converter, import_arrow
from paceline.data.dialect import Dialect, read_dialect
from paceline.data.reader import BLOCK_BYTES, Report
from paceline.data.streams import ByteStream, open_stream
from paceline.errors import DataError

_PARQUET_ROWS = 32768


@contextmanager
def _arrow_errors(path: str, format: str) -> Iterator[None]:
    """Arrow's complaints about a file's content as :exc:`DataError`."""
    arrow = import_arrow()
    try:
        yield
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, DataError) else None
        text = shorten(str(cause or error).partition("\n")[0])
        raise cause or DataError(f"{path} cannot be read as {format}: {text}") from error


class _File(io.RawIOBase):
    """A :class:`ByteStream` as the file object that Arrow reads from."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with memoryview(buffer).cast("B") as view:
            return self._stream.readinto(view)

    def read(self, size: int = -1) -> bytes:
        assert size >= 0
        buffer = bytearray(size)
        return bytes(memoryview(buffer)[: self.readinto(buffer)])


def _open_csv(
    path: str, stream: ByteStream, dialect: Dialect, columns: Columns, block_bytes: int, skipped: list[BadLine]
) -> Any:
    """A streaming reader that puts the rows with too few or too many cells in `skipped`."""
    import_arrow()
    from pyarrow import csv

    def skip(row: Any) -> str:
        reason = f"it has {row.actual_columns} cells where the first row has {row.expected_columns}"
        skipped.append(BadLine(path, None, None, shorten(row.text), reason))
        return "skip"

    convert = csv.ConvertOptions(
        include_columns=columns.names,
        column_types=dict.fromkeys(columns.names, import_arrow().string()),
        check_utf8=False,
    )
    return csv.open_csv(
        import_arrow().PythonFile(_File(stream), mode="r"),
        read_options=csv.ReadOptions(
            block_size=block_bytes,
            use_threads=False,
            column_names=list(dialect.names),
            skip_rows_after_names=int(dialect.has_header),
        ),
        parse_options=csv.ParseOptions(delimiter=dialect.separator, newlines_in_values=True, invalid_row_handler=skip),
        convert_options=convert,
    )


class CsvReader:
    """Shards of a csv file; reading an earlier one starts over."""

    def __init__(self, path: str, columns: Columns, shard_bytes: int) -> None:
        self._path = path
        self._columns = columns
        self._block_bytes = min(max(shard_bytes, 4096), BLOCK_BYTES)
        self._batches_per_shard = max(1, shard_bytes // self._block_bytes)
        self._converter = Converter(path, columns)
        self._stream: ByteStream | None = None
        self._csv: Any = None
        self._next_batch = self._next_row = 0
        self._skipped: list[BadLine] = []
        self.num_shards: int | None = None

    def close(self) -> None:
        """Close the file."""
        if self._csv is not None:
            self._csv.close()
            self._csv = None
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def blocks(self, shard: int, report: Report) -> Iterator[Batch]:
        """The shard's rows, a record batch at a time."""
        first = shard * self._batches_per_shard
        if self._csv is None or first < self._next_batch:
            self._open()
        while self._next_batch < first + self._batches_per_shard:
            before = self._next_row
            record_batch = self._read()
            if record_batch is None:
                self.num_shards = -(-self._next_batch // self._batches_per_shard)
                break
            if self._next_batch <= first:
                self._skipped.clear()
                continue
            converted = self._converter.convert(record_batch, before)
            if before == 0 and not converted.batch.num_examples and converted.num_bad >= 10:
                raise DataError(f"{self._path} has no good row at its start: {converted.bad[0].reason}")
            bad = self._skipped + converted.bad
            report(len(self._skipped) + converted.num_bad, bad[:NUM_KEPT])
            self._skipped.clear()
            if converted.batch.num_examples:
                yield converted.batch
        if self._skipped and self.num_shards is not None and shard == self.num_shards - 1:
            report(len(self._skipped), self._skipped[:NUM_KEPT])

    def _open(self) -> None:
        self.close()
        self._stream = open_stream(self._path)
        self._next_batch = self._next_row = 0
        self._skipped.clear()
        with _arrow_errors(self._path, "csv"):
            dialect = read_dialect(self._path, self._columns.names)
            self._columns.check_in(self._path, dialect.names)
            self._csv = _open_csv(self._path, self._stream, dialect, self._columns, self._block_bytes, self._skipped)

    def _read(self) -> Any:
        with _arrow_errors(self._path, "csv"):
            try:
                record_batch = self._csv.read_next_batch()
            except StopIteration:
                return None
        self._next_batch += 1
        self._next_row += record_batch.num_rows
        return record_batch


def parquet_schema(path: str) -> Any:
    """The names and types of a parquet file's columns."""
    with open_parquet(path) as file:
        return file.schema_arrow


@contextmanager
def open_parquet(path: str) -> Iterator[Any]:
    """A parquet file for the length of a ``with``; what is wrong with it is a DataError."""
    import_arrow()
    from pyarrow import parquet

    with _arrow_errors(path, "parquet"), parquet.ParquetFile(path) as file:
        yield file


class ParquetReader:
    """Shards of a parquet file: its row groups."""

    def __init__(self, path: str, columns: Columns) -> None:
        self._path = path
        self._columns = columns
        self._converter = Converter(path, columns)
        with open_parquet(path) as file:
            columns.check_in(path, file.schema_arrow.names)
            metadata = file.metadata
            self._first_rows = [0]
            for group in range(metadata.num_row_groups):
                self._first_rows.append(self._first_rows[-1] + metadata.row_group(group).num_rows)
        self.num_shards: int | None = metadata.num_row_groups

    def close(self) -> None:
        """Nothing is held open between shards."""

    def blocks(self, shard: int, report: Report) -> Iterator[Batch]:
        """The row group's rows, 32,768 at a time."""
        if shard >= len(self._first_rows) - 1:
            return
        row = self._first_rows[shard]
        names = self._columns.names
        with open_parquet(self._path) as file:
            parts = file.iter_batches(_PARQUET_ROWS, row_groups=[shard], columns=names, use_threads=False)
            for record_batch in parts:
                converted = self._converter.convert(record_batch.select(names), row)
                row += record_batch.num_rows
                report(converted.num_bad, converted.bad)
                if converted.batch.num_examples:
                    yield converted.batch
