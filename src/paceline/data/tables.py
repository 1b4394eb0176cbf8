"""The reader of parquet, on pyarrow (the extra ``paceline[parquet]``). A shard is a row group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from paceline.data.bad_lines import shorten
from paceline.data.batch import Batch
from paceline.data.columns import Columns, Converter, import_arrow, is_list
from paceline.data.dialect import read_dialect
from paceline.data.reader import Report
from paceline.data.streams import is_packed, is_url, open_url
from paceline.errors import DataError, UsageError

_PARQUET_ROWS = 32768


@contextmanager
def _arrow_errors(path: str) -> Iterator[None]:
    """Arrow's complaints about a file's content as :exc:`DataError`."""
    arrow = import_arrow()
    try:
        yield
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        text = str(error).partition("\n")[0]
        if "magic bytes" in text or "smaller than the minimum file footer" in text:
            raise DataError(
                f"{path} is no whole parquet file: it does not end as one does; it may have been cut off, or is still "
                "being written: copy it again"
            ) from error
        if "thrift" in text or "metadata" in text.lower():
            raise DataError(
                f"{path} is a damaged parquet file: what it says of its columns cannot be read; write it again"
            ) from error
        raise DataError(f"{path} cannot be read as parquet: {shorten(text)}") from error


def parquet_schema(path: str) -> Any:
    """The names and types of a parquet file's columns."""
    if is_packed(path):
        raise UsageError(f"{path}: a parquet file is not read through gzip or zstd: unpack it")
    with open_parquet(path) as file:
        return file.schema_arrow


@contextmanager
def open_parquet(path: str) -> Iterator[Any]:
    """A parquet file for the length of a ``with``; what is wrong with it is a DataError."""
    import_arrow()
    from pyarrow import parquet

    with ExitStack() as stack:
        stack.enter_context(_arrow_errors(path))
        source = stack.enter_context(closing(open_url(path))) if is_url(path) else path
        yield stack.enter_context(parquet.ParquetFile(source))


def column_names(path: str, format: str, wanted: Sequence[str] = (), header: str = "auto") -> list[str]:
    """The names of a csv or parquet file's columns; `wanted` and `header` as for :func:`guess_dialect`.

    Columns of a parquet file that hold structures, or lists of them, have no name here: they are not read.
    """
    if format == "csv":
        return list(read_dialect(path, wanted, header).names)
    is_nested = import_arrow().types.is_nested
    return [each.name for each in parquet_schema(path) if is_list(each.type) or not is_nested(each.type)]


class ParquetReader:
    """Shards of a parquet file: its row groups."""

    def __init__(self, path: str, columns: Columns, *, needs_label: bool = True) -> None:
        self._path = path
        self._columns = columns
        with open_parquet(path) as file:
            self._has_label = needs_label or columns.label in file.schema_arrow.names
            self._converter = Converter(path, columns, needs_label=needs_label)
            columns.check_in(path, file.schema_arrow.names, needs_label=needs_label)
            for name in {*columns.names} - {*columns.categorical}:
                if name in file.schema_arrow.names and is_list(file.schema_arrow.field(name).type):
                    raise UsageError(
                        f"{path}: column '{name}' holds lists: they are categories, say --categorical {name}"
                    )
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
        names = self._columns.names if self._has_label else self._columns.names[1:]
        with open_parquet(self._path) as file:
            parts = file.iter_batches(_PARQUET_ROWS, row_groups=[shard], columns=names, use_threads=False)
            for record_batch in parts:
                converted = self._converter.convert(self._selected(record_batch.select(names)), row)
                row += record_batch.num_rows
                report(converted.num_bad, converted.bad)
                if converted.batch.num_examples:
                    yield converted.batch

    def _selected(self, record_batch: Any) -> Any:
        """The columns in the order of :attr:`Columns.names`, with nothing for a label that is missing."""
        if self._has_label:
            return record_batch
        arrow = import_arrow()
        label = arrow.nulls(record_batch.num_rows, arrow.float64())
        return arrow.RecordBatch.from_arrays([label, *record_batch.columns], names=self._columns.names)
