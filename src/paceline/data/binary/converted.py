"""Converted data: one file of blocks with the examples of other files, and the description that a training needs.

:class:`DataWriter` writes the file, and :class:`ConvertedFile` reads it. The file has the unscaled numbers of its
sources. If a column's numbers are so large that their differences would be lost in float32, the writer subtracts a
constant: the column's centre. Scales are stored separately, and the reader applies them, so any model can use the file.
A shard is a range of rows. The reader skips a damaged block and counts its rows as malformed.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.data.bad_lines import BadLine
from paceline.data.batch import Batch
from paceline.data.binary.blocks import BlockFile, BlockWriter, NotBlocksError, Section, bad_line_of, is_count
from paceline.data.columns import Columns, Guess, Guesses
from paceline.data.reader import Report
from paceline.data.scales.scaling import ColumnScaling, Scale
from paceline.data.streams import check_local
from paceline.errors import DataError
from paceline.kernels.hashing import hash_bytes, name_seed

_KIND = "data"
_MOST_LABELS = 1000
_GUESSES = tuple[tuple[str, str, str, int, tuple[str, ...]], ...]
_HASH = hash_bytes(b"paceline", name_seed("hash"))
"""The hash of a fixed text. It shows whether a file's keys come from this hash function."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """Description of converted examples."""

    format: str
    """The format of the sources."""
    columns: Columns | None = None
    """The columns without scales, if the sources have columns."""
    scales: Mapping[str, tuple[Scale, ...]]
    """The scales of the numeric columns for each method of :func:`paceline.data.fit_scale`."""
    guesses: tuple[Guess, ...] = ()
    num_guessed_rows: int = 0
    sources: tuple[str, ...] = ()
    num_bad: int = 0
    """The number of malformed lines in the sources, which are not in the file."""
    bad: tuple[BadLine, ...] = ()
    fields: tuple[str, ...] = ()
    """The fields of sources without columns."""

    def to_fields(self) -> dict[str, Any]:
        """Return the description as JSON values."""
        return {
            "format": self.format,
            "columns": None if self.columns is None else self.columns.to_fields(),
            "scales": {how: [scale.to_fields() for scale in scales] for how, scales in self.scales.items()},
            "guesses": [astuple(guess) for guess in self.guesses],
            "num_guessed_rows": self.num_guessed_rows,
            "sources": list(self.sources),
            "num_bad": self.num_bad,
            "bad": [astuple(line) for line in self.bad],
            "fields": list(self.fields),
        }

    @property
    def centres(self) -> tuple[float, ...]:
        """For each numeric column, the number that is subtracted before rounding to float32."""
        return tuple(scale.centre for scale in next(iter(self.scales.values()), ()))

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Description:
        """Create the description from :meth:`to_fields`. Raises KeyError, TypeError, ValueError, AttributeError."""
        columns = None if fields["columns"] is None else Columns.from_fields(fields["columns"])
        for name in () if columns is None else columns.names:
            name_seed(name)  # raises TypeError unless the name is text
        width = 0 if columns is None else len(columns.numeric)
        scales = {how: tuple(map(Scale.from_fields, found)) for how, found in fields["scales"].items()}
        if any(len(found) != width for found in scales.values()):
            raise ValueError("the numbers of scales and numeric columns differ")
        return cls(
            format=str(fields["format"]),
            columns=columns,
            scales=scales,
            guesses=tuple(Guess(*guess) for guess in msgspec.convert(fields["guesses"], _GUESSES)),
            num_guessed_rows=msgspec.convert(fields["num_guessed_rows"], int),
            sources=msgspec.convert(fields["sources"], tuple[str, ...]),
            num_bad=msgspec.convert(fields["num_bad"], int),
            bad=tuple(map(bad_line_of, fields["bad"])),
            fields=msgspec.convert(fields.get("fields", ()), tuple[str, ...]),
        )


class DataWriter:
    """Writes converted data to `path` batch by batch. Only :meth:`finish` makes the file valid. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._writer = BlockWriter(path)
        self._labels: Counter[float] = Counter()
        self.num_examples = 0
        self.num_positives = 0

    def append(self, batch: Batch) -> None:
        """Write examples with the labels, values and weights of the sources."""
        labels, counts = np.unique(batch.labels, return_counts=True)
        for label, count in zip(labels.tolist(), counts.tolist(), strict=True):
            if label in self._labels or len(self._labels) < _MOST_LABELS:
                self._labels[label] += count
        self.num_examples += batch.num_examples
        self.num_positives += int((batch.labels > 0).sum())
        self._writer.append(batch)

    def finish(self, description: Description, names: Mapping[int, str] | None = None) -> None:
        """Write the description of the examples and the names of their features, then sync the file."""
        section = None
        if names is not None:
            text = "".join(f"{key}\t{json.dumps(name)}\n" for key, name in sorted(names.items())).encode()
            section = astuple(self._writer.write_section(text))
        content = {
            "kind": _KIND,
            "hash": _HASH,
            "num_examples": self.num_examples,
            "num_positives": self.num_positives,
            "labels": sorted(self._labels.items()),
            "names": section,
            **description.to_fields(),
        }
        self._writer.finish(content, sync=True)

    def close(self) -> None:
        self._writer.close()


class ConvertedFile:
    """An open file written by :class:`DataWriter`. Raises DataError for other files."""

    def __init__(self, path: str) -> None:
        self._path = path
        check_local(path, "converted")
        try:
            self.blocks = BlockFile(path)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
        except NotBlocksError as error:
            raise DataError(
                f"{path} was not written by 'paceline convert', and all files of a command must have one format: "
                "convert it too"
            ) from error
        except ValueError as error:
            raise self._damaged(str(error)) from error
        content = self.blocks.content
        try:
            if content.get("kind") != _KIND:
                raise DataError(f"{path} is a cache file (--cache), not data. Pass its source")
            if content["hash"] != _HASH:
                raise DataError(f"{path} has keys of another hash function. Convert its sources again")
            self.description = Description.from_fields(content)
            self.labels = {float(label): int(count) for label, count in content["labels"]}
            """The number of rows for each label of the sources, with at most 1,000 labels."""
            self.num_examples: int = content["num_examples"]
            self.num_positives: int = content["num_positives"]
            names = content["names"]
            self._names = None if names is None else Section.from_fields(names, content["end"])
            self.starts = [0, *accumulate(entry.num_rows for entry in self.blocks.entries)]
            if self.starts[-1] != self.num_examples or not all(map(is_count, (self.num_examples, self.num_positives))):
                raise ValueError("its number of rows is wrong")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            self.close()
            raise self._damaged(str(error)) from error
        except BaseException:
            self.close()
            raise

    def _damaged(self, why: str) -> DataError:
        return DataError(
            f"{self._path} is damaged, or from another version of Paceline ({why}). Convert its sources again"
        )

    def close(self) -> None:
        self.blocks.close()

    @property
    def has_names(self) -> bool:
        """Whether the file has the names of features."""
        return self._names is not None

    def names(self) -> dict[int, str] | None:
        """Return the features' names by key; None if the file has no names. Raises DataError."""
        if self._names is None:
            return None
        try:
            lines = self.blocks.read_section(self._names).decode().splitlines()
            pairs = (line.split("\t", 1) for line in lines)
            return {int(key): str(json.loads(name)) for key, name in pairs}
        except (OSError, ValueError) as error:
            raise self._damaged("the names of its features are damaged") from error


def describe_converted(path: str) -> ConvertedFile:
    """Read a converted file's description. Raises DataError."""
    file = ConvertedFile(path)
    file.close()
    return file


def check_columns(path: str, stored: Columns | None, wanted: Columns | None) -> None:
    if wanted is None or stored is None:
        return
    for kind, has, needs in (
        ("categorical", stored.categorical, wanted.categorical),
        ("numeric", stored.numeric, wanted.numeric),
        ("text", stored.text, wanted.text),
    ):
        if {*has} != {*needs}:
            odd = sorted({*has} ^ {*needs})
            raise DataError(
                f"{path} was converted with other {kind} columns ({', '.join(odd[:5])}). Convert its sources with the "
                "same --categorical and --numeric"
            )
    if wanted.weight and wanted.weight != stored.weight:
        raise DataError(f"{path} was converted without weights. Convert its sources with --weight {wanted.weight}")


def merge_guesses(files: Sequence[ConvertedFile]) -> Guesses | None:
    """Return the guessed kinds of the columns of the first file's sources; None if they have no columns."""
    first = files[0].description
    return None if first.columns is None else Guesses(first.columns, first.guesses, first.num_guessed_rows)


@dataclass(frozen=True)
class _ColumnOrder:
    """Reorders the pairs of each row to another order of columns."""

    categorical: npt.NDArray[np.int64]
    """The new position of each categorical column."""
    numeric: Mapping[int, int]
    """The new position of each numeric column, by the column's single key."""

    @classmethod
    def between(cls, stored: Columns, wanted: Columns) -> _ColumnOrder | None:
        """Return the reordering from `stored` to `wanted` columns; None if the order is the same."""
        if stored.is_open or (stored.categorical, stored.numeric) == (wanted.categorical, wanted.numeric):
            return None
        places = {name: place for place, name in enumerate((*wanted.categorical, *wanted.numeric))}
        return cls(
            np.array([places[name] for name in stored.categorical], np.int64),
            {name_seed(name): places[name] for name in stored.numeric},
        )

    def apply(self, batch: Batch) -> Batch:
        """Return the examples with pairs in the new order. Pairs from lists come after those of categories."""
        lengths = np.diff(batch.indptr)
        row = np.repeat(np.arange(batch.num_examples), lengths)
        at = np.arange(len(batch.keys)) - np.repeat(batch.indptr[:-1], lengths)
        place = np.append(self.categorical, len(self.categorical))[np.minimum(at, len(self.categorical))]
        for key, numeric in self.numeric.items():
            place[batch.keys == np.uint64(key)] = numeric
        order = np.lexsort((place, row))
        values = None if batch.values is None else batch.values[order]
        fields = None if batch.fields is None else batch.fields[order]
        return replace(batch, keys=batch.keys[order], values=values, fields=fields)


class ConvertedReader:
    """Shards of a converted file: ranges of rows, on average of the given size in bytes.

    `columns` must have the same features as the file. They determine the order of features, the scales and the weights.
    """

    def __init__(self, path: str, columns: Columns | None, shard_bytes: int) -> None:
        self._path = path
        self._file = ConvertedFile(path)
        stored = self._file.description.columns
        check_columns(path, stored, columns)
        self._is_weighted = columns is None or bool(columns.weight)
        self._order = None if columns is None or stored is None else _ColumnOrder.between(stored, columns)
        self._scaling: ColumnScaling | None = None
        scales = () if columns is None else columns.scales
        centres = self._file.description.centres
        if stored is not None and (scales or any(centres)):
            unscaled = (Scale(0.0, 0.0, 0.0),) * len(stored.numeric)
            by_name = dict(zip((columns or stored).numeric, scales or unscaled, strict=True))
            self._scaling = ColumnScaling(
                stored.numeric, centres or (0.0,) * len(stored.numeric), [by_name[name] for name in stored.numeric]
            )
        self._bins = None if columns is None else columns.bins
        num_bytes = sum(entry.num_bytes for entry in self._file.blocks.entries)
        num_rows = self._file.num_examples
        self._shard_rows = max(num_rows * shard_bytes // max(num_bytes, 1), 1)
        self.num_shards: int | None = -(-num_rows // self._shard_rows)

    def close(self) -> None:
        self._file.close()

    def blocks(self, shard: int, report: Report) -> Iterator[Batch]:
        starts = self._file.starts
        row, stop = self._first_row(shard), self._first_row(shard + 1)
        while row < stop:
            at = bisect_right(starts, row) - 1
            first, end = starts[at], min(starts[at + 1], stop)
            batch = self._file.blocks.read(at)
            if batch is None:
                report(end - row, [self._describe_damaged(at)])
            else:
                yield self._prepared(batch.slice(row - first, end - first))
            row = end

    def _first_row(self, shard: int) -> int:
        """Return a shard's first row. If possible, a block starts there, so that few blocks are read twice."""
        starts = self._file.starts
        row = min(shard * self._shard_rows, starts[-1])
        start = starts[bisect_right(starts, row) - 1]
        return start if start > row - self._shard_rows else row

    def _prepared(self, batch: Batch) -> Batch:
        if self._scaling is not None:
            self._scaling.apply_in_place(batch)
        if self._order is not None:
            batch = self._order.apply(batch)
        if self._bins is not None and batch.values is not None:
            batch = self._bins.apply(batch)
        return batch if self._is_weighted else replace(batch, weights=None)

    def _describe_damaged(self, at: int) -> BadLine:
        entry, first = self._file.blocks.entries[at], self._file.starts[at]
        place = f"bytes {entry.offset:,} to {entry.offset + entry.num_bytes:,}"
        reason = f"the block of rows {first + 1:,} to {first + entry.num_rows:,} has a wrong checksum"
        return BadLine(self._path, None, first + 1, place, reason)
