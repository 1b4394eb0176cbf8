"""The reader of parquet, on pyarrow (the extra ``paceline[parquet]``). A shard is a row group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.data.bad_lines import shorten
from paceline.data.batch import Batch
from paceline.data.columns import Columns, Converter, import_arrow
from paceline.data.reader import Report
from paceline.errors import DataError

_PARQUET_ROWS = 32768


@contextmanager
def _arrow_errors(path: str) -> Iterator[None]:
    """Arrow's complaints about a file's content as :exc:`DataError`."""
    arrow = import_arrow()
    try:
        yield
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        text = shorten(str(error).partition("\n")[0])
        raise DataError(f"{path} cannot be read as parquet: {text}") from error


def parquet_schema(path: str) -> Any:
    """The names and types of a parquet file's columns."""
    with open_parquet(path) as file:
        return file.schema_arrow


@contextmanager
def open_parquet(path: str) -> Iterator[Any]:
    """A parquet file for the length of a ``with``; what is wrong with it is a DataError."""
    import_arrow()
    from pyarrow import parquet

    with _arrow_errors(path), parquet.ParquetFile(path) as file:
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
