"""Converted data: examples of other files in one file of blocks, with all that a training must know beforehand.

What :class:`DataWriter` writes :class:`ConvertedFile` reads. Numbers stand in it as they stood in its sources, less a
centre where float32 would lose what they differ by: scales are kept beside them and are applied as the file is read, so
that any model can be trained or predicted from it. A shard
is a range of rows. A block that is damaged is left out, and its rows are reported as malformed.
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
from paceline.data.scales.column_scaling import ColumnScaling
from paceline.data.scales.scaling import Scale
from paceline.data.streams import check_local
from paceline.errors import DataError
from paceline.kernels.hashing import hash_bytes, name_seed

_KIND = "data"
_MOST_LABELS = 1000
_GUESSES = tuple[tuple[str, str, str, int, tuple[str, ...]], ...]
_HASH = hash_bytes(b"paceline", name_seed("hash"))
"""What a file says of the hash of its keys: it is the same wherever the hash is."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """What is known of converted examples.

    `format` is that of the sources, `columns` (of those that have any) without scales, and `scales` what
    :func:`paceline.data.fit_scale` makes of them; `guesses` is what the sources were described by; `num_bad` lines were
    left out, of which `bad` are the first; `fields` are those of sources without columns.
    """

    format: str
    columns: Columns | None = None
    scales: Mapping[str, tuple[Scale, ...]]
    guesses: tuple[Guess, ...] = ()
    num_guessed_rows: int = 0
    sources: tuple[str, ...] = ()
    num_bad: int = 0
    bad: tuple[BadLine, ...] = ()
    fields: tuple[str, ...] = ()

    def to_fields(self) -> dict[str, Any]:
        """This description as JSON can carry it."""
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
        """What was taken from the numbers of each numeric column before they were rounded to float32."""
        return tuple(scale.centre for scale in next(iter(self.scales.values()), ()))

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Description:
        """The description that :meth:`to_fields` made. Raises KeyError, TypeError, ValueError, AttributeError."""
        columns = None if fields["columns"] is None else Columns.from_fields(fields["columns"])
        for name in () if columns is None else columns.names:
            name_seed(name)  # which of nothing but a text there is
        width = 0 if columns is None else len(columns.numeric)
        scales = {how: tuple(map(Scale.from_fields, found)) for how, found in fields["scales"].items()}
        if any(len(each) != width for each in scales.values()):
            raise ValueError("there are not as many scales as numeric columns")
        return cls(
            format=str(fields["format"]),
            columns=columns,
            scales=scales,
            guesses=tuple(Guess(*each) for each in msgspec.convert(fields["guesses"], _GUESSES)),
            num_guessed_rows=msgspec.convert(fields["num_guessed_rows"], int),
            sources=msgspec.convert(fields["sources"], tuple[str, ...]),
            num_bad=msgspec.convert(fields["num_bad"], int),
            bad=tuple(map(bad_line_of, fields["bad"])),
            fields=msgspec.convert(fields.get("fields", ()), tuple[str, ...]),
        )


class DataWriter:
    """Writes converted data to `path`, batch by batch; :meth:`finish` makes the file whole. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._writer = BlockWriter(path)
        self._labels: Counter[float] = Counter()
        self.num_examples = 0
        self.num_positives = 0

    def append(self, batch: Batch) -> None:
        """Write examples whose labels, values and weights are as they stand in the sources."""
        labels, counts = np.unique(batch.labels, return_counts=True)
        for label, count in zip(labels.tolist(), counts.tolist(), strict=True):
            if label in self._labels or len(self._labels) < _MOST_LABELS:
                self._labels[label] += count
        self.num_examples += batch.num_examples
        self.num_positives += int((batch.labels > 0).sum())
        self._writer.append(batch)

    def finish(self, description: Description, names: Mapping[int, str] | None = None) -> None:
        """Write what is known of the examples, and the names of their features, and sync the file."""
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
        """Close the file."""
        self._writer.close()


class ConvertedFile:
    """A file that :class:`DataWriter` wrote, open. Raises DataError in a sentence for any other."""

    def __init__(self, path: str) -> None:
        self._path = path
        check_local(path, "converted")
        try:
            self.blocks = BlockFile(path)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
        except NotBlocksError as error:
            raise DataError(
                f"{path} was not written by 'paceline convert': all files of a command are of one format, convert it "
                "too"
            ) from error
        except ValueError as error:
            raise self._damaged(str(error)) from error
        content = self.blocks.content
        try:
            if content.get("kind") != _KIND:
                raise DataError(f"{path} is a part of a cache (--cache), not data: convert or train the source itself")
            if content["hash"] != _HASH:
                raise DataError(f"{path} has keys of another hash than this version's: convert its sources again")
            self.description = Description.from_fields(content)
            self.labels = {float(label): int(count) for label, count in content["labels"]}
            """The labels as they stand, of which there are at most 1,000, and how often each is there."""
            self.num_examples: int = content["num_examples"]
            self.num_positives: int = content["num_positives"]
            names = content["names"]
            self._names = None if names is None else Section.from_fields(names, content["end"])
            self.starts = [0, *accumulate(entry.num_rows for entry in self.blocks.entries)]
            if self.starts[-1] != self.num_examples or not all(map(is_count, (self.num_examples, self.num_positives))):
                raise ValueError("its rows are not as many as it says")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            self.close()
            raise self._damaged(str(error)) from error
        except BaseException:
            self.close()
            raise

    def _damaged(self, why: str) -> DataError:
        return DataError(
            f"{self._path} is not whole, or written by another version of Paceline ({why}): convert its sources again"
        )

    def close(self) -> None:
        """Close the file."""
        self.blocks.close()

    @property
    def has_names(self) -> bool:
        """Whether the names of features were kept."""
        return self._names is not None

    def names(self) -> dict[int, str] | None:
        """The names of features by key; None if they were not kept. Raises DataError."""
        if self._names is None:
            return None
        try:
            lines = self.blocks.read_section(self._names).decode().splitlines()
            pairs = (line.split("\t", 1) for line in lines)
            return {int(key): str(json.loads(name)) for key, name in pairs}
        except (OSError, ValueError) as error:
            raise self._damaged("the names of its features are damaged") from error


def describe_converted(path: str) -> ConvertedFile:
    """What is known of a converted file, which is closed. Raises DataError."""
    file = ConvertedFile(path)
    file.close()
    return file


def check_columns(path: str, stored: Columns | None, wanted: Columns | None) -> None:
    """Raise DataError unless the features of the columns that were converted are those that are wanted."""
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
                f"{path} was converted with other {kind} columns than are wanted ({', '.join(odd[:5])}): convert its "
                "sources with the same --categorical and --numeric"
            )
    if wanted.weight and wanted.weight != stored.weight:
        raise DataError(f"{path} was converted without weights: convert its sources with --weight {wanted.weight}")


def merge_guesses(files: Sequence[ConvertedFile]) -> Guesses | None:
    """What the sources of the first file were described by, if they have columns."""
    first = files[0].description
    return None if first.columns is None else Guesses(first.columns, first.guesses, first.num_guessed_rows)


@dataclass(frozen=True)
class _ColumnOrder:
    """How the pairs of rows are brought to the order of other columns than those that were converted."""

    categorical: npt.NDArray[np.int64]
    """The new place of each categorical column."""
    numeric: Mapping[int, int]
    """The new place of each numeric column, which has one key."""

    @classmethod
    def between(cls, stored: Columns, wanted: Columns) -> _ColumnOrder | None:
        """The order of the `wanted` columns, which are the `stored` ones; None if it is the same, or there is none."""
        if stored.is_open or (stored.categorical, stored.numeric) == (wanted.categorical, wanted.numeric):
            return None
        places = {name: place for place, name in enumerate((*wanted.categorical, *wanted.numeric))}
        return cls(
            np.array([places[name] for name in stored.categorical], np.int64),
            {name_seed(name): places[name] for name in stored.numeric},
        )

    def apply(self, batch: Batch) -> Batch:
        """The examples with their pairs in the new order; those of lists, which have no place, follow categories."""
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
    """Shards of a converted file: ranges of rows that are as large as wanted on average.

    `columns`, whose features are those of the file, says in which order they are, which scales numbers are brought to
    and whether weights count.
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
            as_stand = (Scale(0.0, 0.0, 0.0),) * len(stored.numeric)
            by_name = dict(zip((columns or stored).numeric, scales or as_stand, strict=True))
            self._scaling = ColumnScaling(
                stored.numeric, centres or (0.0,) * len(stored.numeric), [by_name[name] for name in stored.numeric]
            )
        self._bins = None if columns is None else columns.bins
        num_bytes = sum(entry.num_bytes for entry in self._file.blocks.entries)
        num_rows = self._file.num_examples
        self._shard_rows = max(num_rows * shard_bytes // max(num_bytes, 1), 1)
        self.num_shards: int | None = -(-num_rows // self._shard_rows)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def blocks(self, shard: int, report: Report) -> Iterator[Batch]:
        """The shard's rows, block by block."""
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
        """The first row of a shard: that of a block, where there is one, so that few are read for two shards."""
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
        reason = f"the block of rows {first + 1:,} to {first + entry.num_rows:,} is damaged: its checksum does not fit"
        return BadLine(self._path, None, first + 1, place, reason)
