"""Convert frames, dicts of columns, and rows as dicts to batches. The keys are the same as for files.

A frame has `columns` and returns a column by name. Examples are pandas, polars and a plain dict. This module imports
neither pandas nor polars.
"""

from __future__ import annotations

import json
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, final

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from paceline.data import Batch, Columns
from paceline.data.columns import Converter, are_integers, find_double, import_arrow, is_list
from paceline.data.formats.criteo import CRITEO_NAMES, criteo_parser
from paceline.data.formats.json_lines import json_parser
from paceline.data.text import Parse
from paceline.errors import UsageError, printable
from paceline.kernels.text.codes import REASONS

_ROWS = 32768
_LOOKED_AT = 256
_TEXT, _FLOATS = {str, type(None)}, {float, type(None)}
_PADDING = 64  # the parser may read eight bytes beyond the end

IsKnown = Callable[[npt.NDArray[np.uint64]], npt.NDArray[np.bool_]]


def is_frame(X: Any) -> bool:
    """Return whether `X` has named columns: a DataFrame of pandas or polars, or an Arrow table."""
    return hasattr(X, "columns") and hasattr(X, "__getitem__") and hasattr(X, "__len__")


def names_of(frame: Any) -> list[Any]:
    """Return the columns' names of a frame or a dict of columns. Raises UsageError if a name is repeated."""
    names = getattr(frame, "column_names", None) or (frame if isinstance(frame, Mapping) else frame.columns)
    double = find_double(names)
    if double is not None:
        raise UsageError(f"the frame has more than one column {double!r}. Rename all except one")
    return list(names)


def list_names(names: Sequence[Any], most: int = 5) -> str:
    return ", ".join(map(str, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


class FrameReader(ABC):
    """Converts frames to batches."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._cells = itemgetter(*names, names[0])  # two names or more, because itemgetter returns no tuple for one

    def batches(self, frame: Any) -> Iterator[Batch]:
        """Yield the rows of a frame or a dict of columns. Raises UsageError for a missing column."""
        names = names_of(frame)
        trimmed = {name.strip() if isinstance(name, str) else name: name for name in names}
        found = {name: name if name in names else trimmed.get(name) for name in self._names}
        missing = [name for name in self._names if found[name] is None]
        if missing:
            raise UsageError(
                f"the frame has no column {list_names(missing)}. The model needs {list_names(self._names)}, but "
                f"the frame has {list_names(names) or 'none'}"
            )
        columns = {name: frame[found[name]] for name in self._names}
        lengths = {name: len(column) for name, column in columns.items()}
        if len({*lengths.values()}) > 1:
            raise UsageError(f"the columns have different lengths: {lengths}")
        return self._batches(columns)

    def row_batches(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[Batch]:
        """Yield rows given as dicts by column name. Raises UsageError if a row lacks one of the columns."""
        try:
            columns = list(zip(*map(self._cells, rows), strict=True))[:-1]
            return self._batches(dict(zip(self._names, columns, strict=True)))
        except KeyError:
            at, name = next((at, name) for at, row in enumerate(rows) for name in self._names if name not in row)
            raise UsageError(
                f"row {at} has no {name!r}: expected {list_names(self._names)}. A missing value is None (null in JSON)"
            ) from None

    @abstractmethod
    def _batches(self, columns: dict[str, Any]) -> Iterator[Batch]: ...


@final
class ColumnReader(FrameReader):
    """Reads frames for a model trained on a CSV (`from_text`) or Parquet file.

    `is_known` returns which keys the model has; it is None during training. A category in a CSV file is a text. Only
    text and whole numbers have a unique text, so a model of CSV data rejects categories of other types. It also rejects
    booleans in a numeric column, because they are malformed in a CSV file. In a Parquet file, booleans are 0 and 1.
    """

    def __init__(self, columns: Columns, *, from_text: bool, is_known: IsKnown | None) -> None:
        self._columns = columns = replace(columns.unweighted, classes=())  # labels of frames are not read
        super().__init__(columns.names[1:])
        self._from_text = from_text
        self._is_known = is_known
        self._arrow = import_arrow()
        self._converter = Converter("the frame", columns)

    @override
    def _batches(self, columns: dict[str, Any]) -> Iterator[Batch]:
        arrays = [self._to_arrow(name, columns[name]) for name in self._names]
        labels = self._arrow.array(np.zeros(len(arrays[0])))
        rows = self._arrow.RecordBatch.from_arrays([labels, *arrays], names=self._columns.names)
        for start in range(0, rows.num_rows, _ROWS):
            converted = self._converter.convert(rows.slice(start, _ROWS), start)
            if converted.num_bad:
                bad = converted.bad[0]
                assert bad.row is not None
                raise UsageError(f"row {bad.row - 1:,} of the frame: {bad.reason}")
            if start == 0:
                self._warn_unknown(rows.slice(0, _LOOKED_AT))
            yield converted.batch

    def _to_arrow(self, name: str, column: Any) -> Any:
        arrow, types = self._arrow, self._arrow.types
        kinds = {*map(type, column)} if type(column) is tuple else {object}
        try:
            if kinds <= _TEXT:  # faster for a few rows
                return arrow.array(column, arrow.string())
            if kinds <= _FLOATS and name in self._columns.numeric:
                return arrow.array(column, arrow.float64())
            array = column.to_arrow() if hasattr(column, "to_arrow") else arrow.array(column, from_pandas=True)
            if isinstance(array, arrow.ChunkedArray):
                array = array.combine_chunks()
        except (arrow.ArrowException, TypeError, ValueError, AttributeError, OverflowError) as error:
            text = str(error).partition("\n")[0]
            raise UsageError(
                _describe_kinds(name, column) or f"column {name!r} does not hold text or numbers: {text}"
            ) from None
        found = array.type.value_type if types.is_dictionary(array.type) else array.type
        is_text = types.is_string(found) or types.is_large_string(found) or str(found) == "string_view"
        if name in self._columns.categorical:
            if types.is_nested(found) and (self._from_text or not is_list(found)):
                raise UsageError(f"column {name!r} is categorical, but {found} here: expected text or whole numbers")
            is_certain = (
                is_text or types.is_integer(found) or types.is_null(found) or self._holds_integers(array, found)
            )
            if self._from_text and not is_certain:
                raise UsageError(
                    f"column {name!r} is categorical, but {found} here. Pass the text of the CSV file (read it with "
                    "dtype=str)"
                )
            return array
        if name in self._columns.text:
            if not (is_text or types.is_null(found)):
                raise UsageError(f"column {name!r} is text, but {found} here. Pass text")
            return array
        numbers = (types.is_integer, types.is_floating, types.is_decimal, types.is_null)
        is_number = any(test(found) for test in numbers) or (types.is_boolean(found) and not self._from_text)
        if not (is_text or is_number):
            raise UsageError(f"column {name!r} is numeric, but {found} here: expected numbers")
        return array.cast(arrow.float64()) if types.is_null(found) else array

    def _holds_integers(self, array: Any, type: Any) -> bool:
        """Return whether all floats are integers. Pandas stores integers as floats if some are missing."""
        if not self._arrow.types.is_floating(type):
            return False
        values = array.dictionary if self._arrow.types.is_dictionary(array.type) else array
        return bool(are_integers(values.drop_null().cast(self._arrow.float64()).to_numpy()).all())

    def _warn_unknown(self, rows: Any) -> None:
        """Warn about columns whose first values are all unknown, probably because they are written in another form."""
        if self._is_known is None or rows.num_rows < _LOOKED_AT:
            return
        for name in self._columns.categorical:
            alone = Columns(self._columns.label, (name,), trims=self._columns.trims)
            batch = Converter("the frame", alone).convert(rows.select(alone.names), 0).batch
            if not self._is_known(batch.keys).any():
                value = rows.column(rows.schema.get_field_index(name))[0].as_py()
                warnings.warn(
                    f"the model knows none of the first {_LOOKED_AT} values of column {name!r}, such as {value!r}, and "
                    "ignores them. Check that they are written as in training",
                    stacklevel=6,
                )


@final
class CriteoReader(FrameReader):
    """Reads frames for a model of Criteo's format. Columns I1 to I13 and C1 to C26 are converted to lines."""

    def __init__(self) -> None:
        super().__init__(CRITEO_NAMES)
        self._parse = criteo_parser()

    @override
    def _batches(self, columns: dict[str, Any]) -> Iterator[Batch]:
        for start in range(0, len(columns[CRITEO_NAMES[0]]), _ROWS):
            fields = [
                ["" if value is None else value if type(value) is str else _cell(name, value) for value in column]
                for name, column in ((name, columns[name][start : start + _ROWS]) for name in CRITEO_NAMES)
            ]
            lines = ["\t".join(row) for row in zip(*fields, strict=True)]
            for row, line in enumerate(lines):
                if line.count("\t") >= len(CRITEO_NAMES) or "\n" in line or "\r" in line:
                    raise UsageError(f"row {row + start:,} of the frame holds a tab or a newline within a field")
            yield from _parse_lines(self._parse, "0\t" + "\n0\t".join(lines) + "\n", start)


@final
class JsonReader(FrameReader):
    """Reads frames for a model of JSON lines. Each row is an object with any fields."""

    def __init__(self, columns: Columns) -> None:
        super().__init__([columns.label])
        self._parse = json_parser(columns.unweighted, needs_label=False)

    @override
    def batches(self, frame: Any) -> Iterator[Batch]:
        names = names_of(frame)
        cells = [list(frame[name]) for name in names]
        return self.row_batches([dict(zip(names, row, strict=True)) for row in zip(*cells, strict=True)])

    @override
    def row_batches(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[Batch]:
        for start in range(0, len(rows), _ROWS):
            try:
                lines = [json.dumps(row, default=_plain_value) + "\n" for row in rows[start : start + _ROWS]]
            except (TypeError, ValueError) as error:
                raise UsageError(f"a row cannot be written as a JSON object: {error}") from None
            yield from _parse_lines(self._parse, "".join(lines), start)

    @override
    def _batches(self, columns: dict[str, Any]) -> Iterator[Batch]:
        return self.batches(columns)


def _parse_lines(parse: Parse, lines: str, first_row: int) -> Iterator[Batch]:
    """Yield the rows of lines. `first_row` is the number of the first line. Raises UsageError for an invalid row."""
    text = lines.encode()
    buffer = np.zeros(len(text) + _PADDING, np.uint8)
    buffer[: len(text)] = np.frombuffer(text, np.uint8)
    position = 0
    while position < len(text):
        parsed = parse(buffer, position, len(text))
        if parsed.num_bad:
            at, why = parsed.bad[0]
            row = text.count(b"\n", 0, at) + first_row
            raise UsageError(f"row {row:,} of the frame: {REASONS[why]}")
        position = parsed.position
        yield parsed.batch


def _describe_kinds(name: str, column: Any) -> str | None:
    """Return a message with the first values of two types in a column; None if all values have the same type."""
    first: dict[str, str] = {}
    for row, value in enumerate(column):
        if value is not None:
            first.setdefault(type(value).__name__, f"{printable(repr(value), 40)} in row {row:,}")
    if len(first) < 2:
        return None
    return f"column {name!r} holds {' and '.join(list(first.values())[:2])}: expected values of one type, or None"


def _plain_value(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{value!r} is a {type(value).__name__}")


def _cell(name: str, value: Any) -> str:
    if type(value) is int and name[0] == "I":
        return str(value)
    if value is None or (isinstance(value, float) and math.isnan(value)) or type(value).__name__ == "NAType":
        return ""
    if isinstance(value, float | np.floating) and float(value).is_integer():
        value = int(value)  # pandas stores whole numbers as floats if some are missing
    if isinstance(value, int | np.integer) and name.startswith("C"):
        raise UsageError(f"column {name!r} holds the number {value}: expected the text in the file")
    return str(value)
