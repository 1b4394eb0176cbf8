"""Parquet, read with pyarrow (the extra ``paceline[parquet]``). A shard is a row group."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from typing_extensions import override

from paceline.data.bad_lines import shorten
from paceline.data.batch import Batch
from paceline.data.columns import Columns, Converter, category_texts, import_arrow, is_list
from paceline.data.formats.table_format import TableFormat, trimmed
from paceline.data.reader import ReadSettings, Report, ShardReader
from paceline.data.sampling import TextTable, json_text, spread
from paceline.data.streams import is_packed, is_url, open_url
from paceline.errors import DataError, UsageError

_PARQUET_ROWS = 32768
_NAME_ROWS = 16384
_SAMPLED_GROUPS = 16
_SAMPLED_ROWS = 16_000


class Parquet(TableFormat):
    """Parquet. Columns of structures, and of lists of structures, are skipped."""

    name = "parquet"
    magics = (b"PAR1",)
    is_random_access = True
    samples_beginnings = True

    @override
    def column_names(self, path: str, wanted: Sequence[str] = (), header: str = "auto") -> list[str]:
        if is_packed(path):
            raise UsageError(f"{path}: a parquet file cannot be read through gzip or zstd. Decompress the file")
        is_nested = import_arrow().types.is_nested
        with _open_parquet(path) as file:
            return [item.name for item in file.schema_arrow if is_list(item.type) or not is_nested(item.type)]

    @override
    def sample_table(self, files: Sequence[str], wanted: Sequence[str] = (), header: str = "auto") -> TextTable:
        names: tuple[str, ...] = ()
        types: tuple[str, ...] = ()
        rows: list[list[str]] = []
        chosen = spread(len(files), _SAMPLED_GROUPS)
        for at in chosen:
            with _open_parquet(files[at]) as file:
                schema = file.schema_arrow
                if not names:
                    names, types = tuple(schema.names), tuple(map(_kind_of, schema.types))
                groups = spread(file.metadata.num_row_groups, max(1, _SAMPLED_GROUPS // len(chosen)))
                num_rows = _SAMPLED_ROWS // max(len(groups) * len(chosen), 1)
                for group in groups:
                    for record_batch in file.iter_batches(num_rows, row_groups=[group], use_threads=False):
                        rows += _rows_of(record_batch, names)
                        break
        return TextTable(names, types, rows)

    @override
    def read_cells(self, files: Sequence[str], columns: Columns, name: str) -> Iterator[str]:
        for file in files:
            with _open_parquet(file) as opened:
                for batch in opened.iter_batches(_NAME_ROWS, columns=[name], use_threads=False):
                    column = batch.column(batch.schema.get_field_index(name))
                    texts = category_texts(column.flatten() if is_list(column.type) else column).to_pylist()
                    yield from ("" if text is None else trimmed(text, columns) for text in texts)

    @override
    def open_reader(self, path: str, settings: ReadSettings) -> ShardReader:
        return ParquetReader(path, settings)


def _rows_of(record_batch: Any, names: Sequence[str]) -> list[list[str]]:
    """Return the rows of an Arrow record batch as text; cells of missing columns are empty."""
    found = record_batch.schema.names
    cells = [
        [_as_text(cell) for cell in _cells(record_batch.column(found.index(name)))]
        if name in found
        else [""] * record_batch.num_rows
        for name in names
    ]
    return list(map(list, zip(*cells, strict=True)))


def _cells(column: Any) -> list[Any]:
    """Return an Arrow column's values. Times that Python cannot represent, such as the year 10000, are texts."""
    try:
        return list(column.to_pylist())
    except (OverflowError, ValueError):
        return list(column.cast("string").to_pylist())


def _as_text(cell: Any) -> str:
    if cell is None:
        return ""
    if isinstance(cell, list):
        return json.dumps([json_text(element) for element in cell if element is not None]) if cell else ""
    return str(cell).lower() if isinstance(cell, bool) else str(cell)


def _kind_of(type: Any) -> str:
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


@contextmanager
def _arrow_errors(path: str) -> Iterator[None]:
    arrow = import_arrow()
    try:
        yield
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        text = str(error).partition("\n")[0]
        if "magic bytes" in text or "smaller than the minimum file footer" in text:
            raise DataError(
                f"{path} is not a complete parquet file, because its end is missing. It is truncated or still being "
                "written. Copy it again"
            ) from error
        if "thrift" in text or "metadata" in text.lower():
            raise DataError(f"{path} is a damaged parquet file: its schema cannot be read. Write it again") from error
        raise DataError(f"{path} cannot be read as parquet: {shorten(text)}") from error


@contextmanager
def _open_parquet(path: str) -> Iterator[Any]:
    import_arrow()
    from pyarrow import parquet

    with ExitStack() as stack:
        stack.enter_context(_arrow_errors(path))
        source = stack.enter_context(closing(open_url(path))) if is_url(path) else path
        yield stack.enter_context(parquet.ParquetFile(source))


class ParquetReader:
    """Shards of a parquet file: its row groups."""

    def __init__(self, path: str, settings: ReadSettings) -> None:
        columns, needs_label = settings.columns, settings.needs_label
        assert columns is not None
        self._path = path
        self._columns = columns
        with _open_parquet(path) as file:
            self._has_label = needs_label or columns.label in file.schema_arrow.names
            self._converter = Converter(path, columns, needs_label=needs_label)
            columns.check_in(path, file.schema_arrow.names, needs_label=needs_label)
            for name in {*columns.names} - {*columns.categorical}:
                if name in file.schema_arrow.names and is_list(file.schema_arrow.field(name).type):
                    raise UsageError(
                        f"{path}: column '{name}' has lists, which are categories. Pass --categorical {name}"
                    )
            metadata = file.metadata
            self._first_rows = [0]
            for group in range(metadata.num_row_groups):
                self._first_rows.append(self._first_rows[-1] + metadata.row_group(group).num_rows)
        self.num_shards: int | None = metadata.num_row_groups

    def close(self) -> None:
        """Do nothing, because no file is open between shards."""

    def blocks(self, shard: int, report: Report) -> Iterator[Batch]:
        """Yield the rows of a row group, in batches of 32,768."""
        if shard >= len(self._first_rows) - 1:
            return
        row = self._first_rows[shard]
        names = self._columns.names if self._has_label else self._columns.names[1:]
        with _open_parquet(self._path) as file:
            parts = file.iter_batches(_PARQUET_ROWS, row_groups=[shard], columns=names, use_threads=False)
            for record_batch in parts:
                converted = self._converter.convert(self._selected(record_batch.select(names)), row)
                row += record_batch.num_rows
                report(converted.num_bad, converted.bad)
                if converted.batch.num_examples:
                    yield converted.batch

    def _selected(self, record_batch: Any) -> Any:
        """Return the columns in the order of :attr:`Columns.names`; a missing label is null."""
        if self._has_label:
            return record_batch
        arrow = import_arrow()
        label = arrow.nulls(record_batch.num_rows, arrow.float64())
        return arrow.RecordBatch.from_arrays([label, *record_batch.columns], names=self._columns.names)
