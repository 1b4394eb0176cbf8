"""Describe the columns of data files, and convert Arrow columns to batches."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data.bad_lines import NUM_KEPT, BadLine, shorten
from paceline.data.batch import Batch, insert_lists
from paceline.data.dialect import LABEL_NAMES, is_missing
from paceline.data.scales.bins import ColumnBins
from paceline.data.scales.scaling import Scale
from paceline.errors import UsageError
from paceline.kernels.hashing import field_of, name_seed
from paceline.kernels.text.values import LABEL_WORDS, MAX_FLOAT32, MISSING, powers_of_ten

_MOST_NAMES, _MOST_CLASSES_SHOWN = 30, 5
_PLACE = re.compile(r"-?[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns (csv, parquet) or fields (JSON lines) to read."""

    label: str
    categorical: tuple[str, ...] = ()
    """Categorical columns. Each value, as text, is a feature with value 1; a missing value is a feature too."""
    numeric: tuple[str, ...] = ()
    """Numeric columns. Each is one feature, whose value is the number. A row without the number lacks the feature."""
    scales: tuple[Scale, ...] = ()
    """The scale of each numeric column; without scales numbers are unchanged."""
    weight: str = ""
    """The column with the examples' weights; "" for no weights."""
    is_open: bool = False
    """Whether all other fields of JSON lines are read too. Numbers are categories only in the `categorical` fields."""
    classes: tuple[str, ...] = ()
    """The words that are labels; word i is the label i. Empty if labels are numbers."""
    text: tuple[str, ...] = ()
    """Text columns; each word is a feature."""
    header: str = "auto"
    """Whether the first row of csv files has column names: yes, no, or auto."""
    trims: bool = True
    """Whether blanks around categories are removed. In columns that an older version stored, the value is False."""

    def __post_init__(self) -> None:
        assert len(self.scales) in (0, len(self.numeric))
        names = self.names
        if len(names) - bool(self.weight) < 2 and not self.is_open:
            raise UsageError("columns name a label but no feature. Name a categorical, numeric or text column too")
        double = find_double(names)
        if double is not None:
            raise UsageError(
                f"column '{double}' is named twice. Choose one of label, weight, categorical, numeric and text"
            )

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Columns:
        """Create the columns from :meth:`to_fields`."""
        scales = tuple(map(Scale.from_fields, fields.get("scales", ())))
        categorical, numeric, classes, text = (
            tuple(fields.get(name, ())) for name in ("categorical", "numeric", "classes", "text")
        )
        weight, is_open, header = fields.get("weight", ""), fields.get("is_open", False), fields.get("header", "auto")
        trims = fields.get("trims", False)
        return cls(fields["label"], categorical, numeric, scales, weight, is_open, classes, text, header, trims)

    def to_fields(self) -> dict[str, Any]:
        """Return the nonempty fields as values for JSON and msgpack."""
        fields = {"label": self.label, "categorical": list(self.categorical), "numeric": list(self.numeric)}
        scales = [scale.to_fields() for scale in self.scales]
        optional = {"scales": scales, "weight": self.weight, "is_open": self.is_open, "classes": list(self.classes)}
        optional |= {"text": list(self.text), "header": self.header.replace("auto", ""), "trims": self.trims}
        return {**fields, **{name: value for name, value in optional.items() if value}}

    @property
    def bins(self) -> ColumnBins | None:
        """The bins of all numeric columns; None if no column has bins."""
        if not any(scale.edges for scale in self.scales):
            return None
        return ColumnBins(self.categorical, self.numeric, [scale.edges for scale in self.scales])

    @property
    def unweighted(self) -> Columns:
        """The columns that predictions need: all except the weight."""
        return replace(self, weight="")

    @property
    def names(self) -> list[str]:
        """All columns, in the order in which they are read."""
        return [self.label, *self.categorical, *self.numeric, *self.text, *([self.weight] if self.weight else [])]

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of each column."""
        kinds = {self.weight: "weight", self.label: "label"} | dict.fromkeys(self.categorical, "categorical")
        return kinds | dict.fromkeys(self.numeric, "numeric") | dict.fromkeys(self.text, "text")

    def describe_fault(self, name: str, *, is_missing: bool) -> str:
        """Return the reason why a row is malformed if its cell in column `name` is invalid or missing."""
        subject = f"its {'label' if name == self.label else 'weight' if name == self.weight else 'column'} '{name}'"
        if is_missing:
            return f"{subject} is missing"
        if name == self.label and self.classes:
            more = ", ..." if len(self.classes) > _MOST_CLASSES_SHOWN else ""
            return f"{subject} is none of {', '.join(self.classes[:_MOST_CLASSES_SHOWN])}{more}"
        if name == self.label:
            return f"{subject} is neither a finite number nor one of {', '.join(LABEL_WORDS)}"
        return f"{subject} is not a finite number" + (" of 0 or more" if name == self.weight else "")

    def check_in(self, path: str, names: Sequence[str], *, needs_label: bool = True) -> None:
        """Raise UsageError unless a file with columns `names` has each of these columns exactly once."""
        known, wanted = set(names), dict.fromkeys(self.names)
        for name in wanted:
            if name not in known and (name != self.label or needs_label):
                role = "label" if name == self.label else "weight" if name == self.weight else "column"
                raise UsageError(f"{path} has no {role} '{shorten(name)}': its columns are {shown_names(names)}")
        check_distinct(path, [name for name in names if name in wanted])


@dataclass(frozen=True, slots=True)
class Guess:
    """The guessed kind of a column: ``label``, ``weight``, ``categorical``, ``numeric``, ``text`` or ``left out``."""

    name: str
    kind: str
    reason: str
    num_distinct: int
    """The number of distinct values in the sampled rows, without missing values."""
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Guesses:
    """The guessed kinds of the columns of files."""

    columns: Columns
    guesses: tuple[Guess, ...]
    num_rows: int
    """The number of sampled rows."""


def import_arrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise UsageError(
            "reading parquet and frames needs pyarrow, which is not installed: pip install 'paceline[parquet]'"
        ) from error
    return pyarrow


def is_list(type: Any) -> bool:
    """Return whether an Arrow type is a list of texts, numbers or booleans."""
    types = import_arrow().types
    tests = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    return any(test(type) for test in tests) and not types.is_nested(type.value_type)


def shown_names(names: Sequence[str]) -> str:
    """Return the first column names for a message, each with at most 80 printable characters."""
    more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(map(shorten, names[:_MOST_NAMES])) + more


def find_double(names: Iterable[Any]) -> Any:
    return next((name for name, count in Counter(list(names)).items() if count > 1), None)


def check_distinct(path: str, names: Sequence[str]) -> None:
    double = find_double(names)
    if double is not None:
        raise UsageError(f"{path} has more than one column '{shorten(double)}' in its header. Rename all but one")


def category_texts(column: Any) -> Any:
    """Return an Arrow column's values as texts. Whole numbers of any type have no decimal point."""
    arrow = import_arrow()
    if arrow.types.is_string(column.type):
        return column
    texts = column.cast(arrow.string())
    if not arrow.types.is_floating(column.type):
        return texts
    from pyarrow.compute import coalesce

    numbers = column.cast(arrow.float64()).to_numpy(zero_copy_only=False)
    is_integer = are_integers(numbers)
    integers = arrow.array(np.where(is_integer, numbers, 0.0).astype(np.int64), mask=~is_integer)
    return coalesce(integers.cast(arrow.string()), texts)


def are_integers(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = (np.abs(numbers) < 2.0**63) & (numbers == np.rint(numbers))
    return found


def usual_label(names: Sequence[str]) -> str | None:
    """Return the column with the first usual name of a label, or None. Names in lower case come first."""
    found = (name for usual in LABEL_NAMES for name in sorted(names, reverse=True) if name.strip().lower() == usual)
    return next(found, None)


def find_label(path: str, names: Sequence[str]) -> str:
    """Return the column whose name is usual for a label. Raises UsageError if there is none."""
    label = usual_label(names)
    if label is None:
        raise UsageError(
            f"{path} has no column named {', '.join(LABEL_NAMES)}: its columns are {shown_names(names)}. Name the "
            "label with --label"
        )
    return label


def resolve_column(path: str, names: Sequence[str], column: str, option: str) -> str:
    """Return the column with this name (ignoring blanks) or number (from 0; negative: from the end).

    Raises UsageError, which names the `option`, if there is no such column.
    """
    if column in names:
        return column
    if _PLACE.fullmatch(column) and -len(names) <= int(column) < len(names):
        return names[int(column)]
    between_blanks = [name for name in names if name.strip() == column]
    if len(between_blanks) == 1:
        return between_blanks[0]
    raise UsageError(f"{option} {shorten(column)}: {path} has no such column. Its columns are {shown_names(names)}")


@dataclass(slots=True)
class Converted:
    """The result of converting Arrow rows: a batch of the valid rows, and the malformed rows."""

    batch: Batch
    num_bad: int
    bad: list[BadLine] = field(default_factory=list)


class Converter:
    """Converts Arrow record batches, whose columns are in the order of ``columns.names``, to :class:`Batch`."""

    def __init__(self, path: str, columns: Columns, *, needs_label: bool = True) -> None:
        from paceline.kernels.features.scaling import scale_numbers
        from paceline.kernels.text import lines as kernels

        self._path = path
        self._columns = columns
        self._needs_label = needs_label
        self._arrow = import_arrow()
        self._kernels = kernels
        self._powers = powers_of_ten()
        self._scales = [scale.as_array() for scale in columns.scales]
        self._scale = scale_numbers
        self._seeds = [np.uint64(name_seed(name)) for name in (*columns.categorical, *columns.numeric)]
        self._text_seeds = [np.uint64(name_seed(name)) for name in columns.text]
        self._bins = columns.bins

    def convert(self, record_batch: Any, first_row: int) -> Converted:
        """Convert a record batch that begins with row `first_row` of the file, counted from 0."""
        converted = self._convert(record_batch, first_row)
        return converted if self._bins is None else replace(converted, batch=self._bins.apply(converted.batch))

    def _convert(self, record_batch: Any, first_row: int) -> Converted:
        num_rows, num_categorical = record_batch.num_rows, len(self._columns.categorical)
        labels, label_ok, label_missing = self._labels(record_batch.column(0))
        label = labels.astype(np.float32)
        label_ok &= ~label_missing | (not self._needs_label)
        label[label_missing] = np.nan
        good = label_ok.copy()
        width = len(self._seeds)
        keys = np.empty((num_rows, width), np.uint64)
        present = np.ones((num_rows, width), np.bool_)
        values = np.ones((num_rows, width), np.float32) if self._columns.numeric else None
        faults = [(self._columns.label, label_ok)]
        lists: list[tuple[str, npt.NDArray[np.int64], npt.NDArray[np.uint64]]] = []
        for at, name in enumerate(self._columns.names[1 : width + 1]):
            column = record_batch.column(at + 1)
            if at < num_categorical and is_list(column.type):
                present[:, at] = False
                lists.append((name, *self._hash_lists(column, self._seeds[at])))
            elif at < num_categorical:
                self._hash(column, self._seeds[at], keys.reshape(-1), at, width)
            else:
                assert values is not None
                keys[:, at] = self._seeds[at]
                numbers, ok, missing = self._numbers(column, {})
                values[:, at] = self._scaled(numbers, at - num_categorical)
                present[:, at] = ~missing
                good &= ok
                faults.append((name, ok))
        for at, (name, seed) in enumerate(zip(self._columns.text, self._text_seeds, strict=True), width + 1):
            lists.append((name, *self._hash_words(record_batch.column(at), seed)))
        weights = None
        if self._columns.weight:
            numbers, ok, missing = self._numbers(record_batch.column(len(self._columns.names) - 1), {})
            ok &= ~missing & (numbers >= 0)
            weights = numbers.astype(np.float32)
            good &= ok
            faults.append((self._columns.weight, ok))
        if good.all() and present.all() and not lists:
            indptr = np.arange(0, num_rows * width + 1, width, dtype=np.int64)
            return Converted(Batch(label, indptr, keys.reshape(-1), _flat(values), weights), 0)
        present &= good[:, np.newaxis]
        indptr = np.zeros(int(good.sum()) + 1, np.int64)
        np.cumsum(present.sum(axis=1)[good], out=indptr[1:])
        values, weights = (
            None if array is None else array[mask] for array, mask in ((values, present), (weights, good))
        )
        batch = Batch(label[good], indptr, keys[present], values, weights)
        num_numbers = present[good, num_categorical:].sum(axis=1)
        if lists:
            by_column = np.array(self._seeds).astype(np.uint32)  # the lower 32 bits
            batch.fields = np.broadcast_to(by_column, present.shape)[present]
        for name, lengths, elements in lists:
            batch = insert_lists(batch, field_of(name), lengths[good], elements[np.repeat(good, lengths)], num_numbers)
        bad_rows = np.flatnonzero(~good)
        bad = [self._describe(record_batch, int(row), first_row, faults) for row in bad_rows[:NUM_KEPT]]
        return Converted(batch, len(bad_rows), bad)

    def _describe(
        self, record_batch: Any, row: int, first_row: int, faults: list[tuple[str, npt.NDArray[np.bool_]]]
    ) -> BadLine:
        name = next(name for name, ok in faults if not ok[row])
        value = record_batch.column(record_batch.schema.get_field_index(name))[row].as_py()
        cells = [column[row].as_py() for column in record_batch.columns]
        text = ",".join("" if cell is None else str(cell) for cell in cells)
        reason = self._columns.describe_fault(name, is_missing=value is None or value == "")
        return BadLine(self._path, None, first_row + row + 1, shorten(text), reason)

    def _hash(self, column: Any, seed: np.uint64, out: npt.NDArray[np.uint64], first: int, stride: int) -> None:
        """Write the keys of a column's values to each `stride`-th element of `out`."""
        if self._arrow.types.is_dictionary(column.type) and len(column.dictionary) <= len(column):
            strings = self._arrow.concat_arrays([self._text(column.dictionary), self._arrow.array([""])])
            known = np.empty(len(strings), np.uint64)
            self._kernels.hash_strings(*self._buffers(strings), seed, known, 0, 1)
            indices = column.indices.fill_null(len(strings) - 1) if column.null_count else column.indices
            out[first::stride] = known[indices.to_numpy(zero_copy_only=False)]
            return
        self._kernels.hash_strings(*self._buffers(self._text(column)), seed, out, first, stride)

    def _hash_lists(self, column: Any, seed: np.uint64) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """Return the number of elements in each list of a column, and the keys of all elements except missing ones."""
        from pyarrow.compute import list_value_length

        elements = column.flatten()
        lengths = list_value_length(column).fill_null(0).to_numpy().astype(np.int64)
        if elements.null_count:
            is_valid = elements.is_valid().to_numpy(zero_copy_only=False)
            rows = np.repeat(np.arange(len(column)), lengths)[is_valid]
            lengths = np.bincount(rows, minlength=len(column)).astype(np.int64)
            elements = elements.drop_null()
        keys = np.empty(len(elements), np.uint64)
        self._hash(elements, seed, keys, 0, 1)
        return lengths, keys

    def _hash_words(self, column: Any, seed: np.uint64) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """Return the number of words in each text of a column, and the keys of all words."""
        data, offsets = self._buffers(self._text(column))
        most = (len(data) + len(column)) // 2  # a text of n bytes has at most (n + 1) / 2 words
        lengths, words = np.empty(len(column), np.int64), np.empty(most, np.uint64)
        return lengths, words[: self._kernels.split_strings(data, offsets, seed, words, lengths)]

    def _text(self, column: Any) -> Any:
        from pyarrow.compute import utf8_trim

        column = category_texts(column)
        if self._columns.trims:
            column = utf8_trim(column, characters=" ")
        return column.fill_null("") if column.null_count else column

    def _buffers(self, strings: Any) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """Return the bytes and offsets of an Arrow string array, with the types of the kernels."""
        _, offset_buffer, data_buffer = strings.buffers()
        if offset_buffer is None or not len(strings):
            offsets = np.zeros(1, np.int64)
        else:
            part = slice(strings.offset, strings.offset + len(strings) + 1)
            offsets = np.frombuffer(offset_buffer, np.int32)[part].astype(np.int64)
        data = np.empty(0, np.uint8)
        if data_buffer is not None and data_buffer.size:
            data = np.frombuffer(data_buffer, np.uint8)
        return self._kernels.read_only(data), self._kernels.read_only(offsets)

    def _scaled(self, numbers: npt.NDArray[np.float64], column: int) -> npt.NDArray[np.float32]:
        if not self._scales:
            return numbers.astype(np.float32)
        scaled = np.empty(len(numbers), np.float32)
        self._scale(numbers, self._scales[column], scaled)
        return scaled

    def _labels(self, column: Any) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        classes = self._columns.classes
        if not classes:
            return self._numbers(column, LABEL_WORDS)
        from pyarrow.compute import index_in, is_in, utf8_lower, utf8_trim

        words = utf8_trim(self._text(column), characters=" \t\r\n")
        places = index_in(words, value_set=self._arrow.array(classes)).fill_null(-1)
        found = places.to_numpy(zero_copy_only=False).astype(np.float64)
        is_none = is_in(utf8_lower(words), value_set=self._arrow.array(sorted(MISSING)))
        missing = is_none.to_numpy(zero_copy_only=False) & (found < 0)
        return np.maximum(found, 0), missing | (found >= 0), missing

    def _numbers(
        self, column: Any, words: dict[str, float]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return a column as float64, a mask of the rows that are valid or missing, and a mask of the missing rows."""
        types = self._arrow.types
        is_text = (types.is_string, types.is_large_string, types.is_dictionary)
        if any(test(column.type) for test in is_text):
            return self._parsed_numbers(self._text(column), words)
        doubles = column.cast(self._arrow.float64(), safe=False).to_numpy(zero_copy_only=False)
        missing = np.isnan(doubles)
        ok = missing | (np.abs(doubles) <= MAX_FLOAT32)
        return np.where(ok & ~missing, doubles, 0.0), ok, missing

    def _parsed_numbers(
        self, strings: Any, words: dict[str, float]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        numbers, status = np.empty(len(strings), np.float64), np.empty(len(strings), np.uint8)
        self._kernels.parse_floats(*self._buffers(strings), self._powers, numbers, status)
        for row in np.flatnonzero(status == self._kernels.FLOAT_BAD).tolist():
            word = strings[row].as_py().strip().lower()
            if word and is_missing(word):
                status[row] = self._kernels.FLOAT_MISSING
            elif word in words:
                numbers[row], status[row] = words[word], self._kernels.FLOAT_OK
        return numbers, status != self._kernels.FLOAT_BAD, status == self._kernels.FLOAT_MISSING


def _flat(values: npt.NDArray[np.float32] | None) -> npt.NDArray[np.float32] | None:
    return None if values is None else values.reshape(-1)
