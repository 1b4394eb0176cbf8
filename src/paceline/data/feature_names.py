"""What features are called: their keys are hashes, of which the text is found by reading the data again.

A category is called ``column=value``, a numeric column by its name. Criteo's fields are ``I1`` to ``I13`` and ``C1`` to
``C26``, and an integer's category is the range of numbers that fall into it, such as ``I3=8..11``.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.data.binary.converted import ConvertedFile
from paceline.data.columns import Columns, category_texts, is_list
from paceline.data.dialect import BLANKS, PREAMBLE, mark_blanks, read_dialect
from paceline.data.formats import CONVERTED
from paceline.data.sampling import json_text, walk_fields
from paceline.data.scales.bins import bin_names
from paceline.data.streams import ByteStream, open_stream
from paceline.errors import ModelError
from paceline.kernels.hashing import hash_bytes, name_seed
from paceline.kernels.text.criteo import (
    CRITEO_CATEGORIES,
    CRITEO_INTEGERS,
    field_seed,
    integer_category,
    log_thresholds,
)
from paceline.kernels.text.values import category_text, number_text, split_words
from paceline.storage.durable_io import replacing

CRITEO_NAMES = (
    *(f"I{number}" for number in range(1, CRITEO_INTEGERS + 1)),
    *(f"C{number}" for number in range(1, CRITEO_CATEGORIES + 1)),
)
"""The names of Criteo's fields, as they are called everywhere."""

FEATURE_NAMES = "feature-names.tsv"
"""The file in a model's directory that holds them."""

_ROWS = 16384
_LEAST_INTEGER = -16  # of Criteo's negative integers, of which each is a category, there are few

Keys = npt.NDArray[np.uint64]


def find_feature_names(files: Sequence[str], format: str, columns: Columns | None, wanted: Keys) -> dict[int, str]:
    """Return the names of those of the `wanted` keys that occur in the files; none of libsvm, where keys are numbers.

    All of the data is read, unless all names are found before.
    """
    finder = _NameFinder(wanted)
    for name, scale in zip(columns.numeric, columns.scales, strict=False) if columns is not None else ():
        for key, text in bin_names(name, scale.edges, scale.centre).items() if scale.edges else ():
            finder.add(key, text)
    if format == CONVERTED:
        return finder.names | _names_of_converted(files, wanted)
    if format == "criteo":
        finder.add_integers()
        seeds = [field_seed(field) for field in range(CRITEO_INTEGERS + 1, CRITEO_INTEGERS + CRITEO_CATEGORIES + 1)]
        finder.read(CRITEO_NAMES[CRITEO_INTEGERS:], seeds, _criteo_rows(files))
    elif format == "vw":
        finder.read_pairs(_vw_features(files))
    elif format == "libffm":
        triples = (word.split(":") for line in _lines(files, "\n") for word in line.split() if word.count(":") == 2)
        finder.read_pairs((field, name, f"{field}^{name}") for field, name, _ in triples)
    elif format == "jsonl":
        finder.read_pairs(_json_features(files, columns))
    elif columns is not None:
        for name in columns.numeric:
            finder.add(name_seed(name), name)
        if format == "csv":
            rows = _csv_rows(files, columns, columns.categorical)
            finder.read(columns.categorical, list(map(name_seed, columns.categorical)), rows)
        for name in columns.categorical if format == "parquet" else ():
            cells = _parquet_values(files, name)
            finder.read([name], [name_seed(name)], ([_trimmed(cell, columns)] for (cell,) in cells))
        for name in columns.text:
            cells = _parquet_values(files, name) if format == "parquet" else _csv_rows(files, columns, [name])
            words = ([_decoded(word)] for (cell,) in cells for word in split_words(_encoded(cell)))
            finder.read([name], [name_seed(name)], words)
    return finder.names


def _names_of_converted(files: Sequence[str], wanted: Keys) -> dict[int, str]:
    names: dict[int, str] = {}
    for path in files:
        with contextlib.closing(ConvertedFile(path)) as file:
            names |= file.names() or {}
    return {key: names[key] for key in wanted.tolist() if key in names}


class _NameFinder:
    """Names of wanted keys as far as they are known."""

    def __init__(self, wanted: Keys) -> None:
        self._wanted = set(wanted.tolist())
        self.names: dict[int, str] = {}

    def add(self, key: int, name: str) -> None:
        if key in self._wanted:
            self.names[key] = name

    def add_integers(self) -> None:
        """Add the categories of Criteo's integer fields, which are known beforehand."""
        thresholds = log_thresholds()
        ranges = {x: str(x) for x in range(_LEAST_INTEGER, 3)}
        for first, end in zip((3, *thresholds), (*thresholds, 10**18), strict=True):
            if first < end and first > 2:
                ranges[integer_category(first)] = str(first) if end == first + 1 else f"{first}..{end - 1}"
        for field, name in enumerate(CRITEO_NAMES[:CRITEO_INTEGERS], 1):
            seed = field_seed(field)
            self.add(hash_bytes(b"", seed), f"{name}=")
            for category, text in ranges.items():
                self.add(hash_bytes((category % 2**64).to_bytes(8, "little"), seed), f"{name}={text}")

    def read(self, names: Sequence[str], seeds: Sequence[int], rows: Iterator[Sequence[str]]) -> None:
        """Add the values of categorical columns, until there is no more of the data or nothing more is wanted."""
        seen: list[set[str]] = [set() for _ in names]
        while len(self.names) < len(self._wanted) and (block := list(islice(rows, _ROWS))):
            for column, (name, seed) in enumerate(zip(names, seeds, strict=True)):
                fresh = {row[column] for row in block} - seen[column]
                seen[column] |= fresh
                self._add_values(name, seed, sorted(fresh))

    def read_pairs(self, features: Iterator[tuple[str, str | None, str]]) -> None:
        """Add features, as long as some are wanted, that are named by seed's text, own text (None: the seed is the key)
        and name.
        """
        seen: set[tuple[str, str | None]] = set()
        for outer, inner, name in features:
            if len(self.names) == len(self._wanted):
                return
            if (outer, inner) not in seen:
                seen.add((outer, inner))
                seed = name_seed(outer)
                self.add(seed if inner is None else hash_bytes(_encoded(inner), seed), name)

    def _add_values(self, name: str, seed: int, values: list[str]) -> None:
        from paceline.kernels.text import lines as kernels

        if not values:
            return
        encoded = list(map(_encoded, values))
        offsets = np.zeros(len(values) + 1, np.int64)
        np.cumsum([len(each) for each in encoded], out=offsets[1:])
        data = np.frombuffer(b"".join(encoded) or b"\0", np.uint8)
        keys = np.empty(len(values), np.uint64)
        kernels.hash_strings(kernels.read_only(data), kernels.read_only(offsets), np.uint64(seed), keys, 0, 1)
        for key, value in zip(keys.tolist(), values, strict=True):
            self.add(key, f"{name}={value}")


def _criteo_rows(files: Sequence[str]) -> Iterator[Sequence[str]]:
    for line in _lines(files, "\n"):
        fields = line.rstrip("\r\n").split("\t")
        if len(fields) == 1 + len(CRITEO_NAMES):
            yield fields[1 + CRITEO_INTEGERS :]


def _vw_features(files: Sequence[str]) -> Iterator[tuple[str, str | None, str]]:
    for line in _lines(files, "\n"):
        for namespace in line.split("|")[1:]:
            name, *features = namespace.rstrip("\r\n").replace("\t", " ").replace("\r", " ").split(" ")
            outer = name.partition(":")[0]
            numbers = map(str, itertools.count())
            for feature in filter(None, features):
                inner = feature.partition(":")[0] or next(numbers)
                yield outer, inner, f"{outer}^{inner}" if outer else inner


def _json_features(files: Sequence[str], columns: Columns | None) -> Iterator[tuple[str, str | None, str]]:
    for line in _lines(files, "\n"):
        try:
            found = json.loads(line, parse_int=_NumberText, parse_float=_NumberText)
        except (ValueError, RecursionError):
            continue
        for path, value, in_list in walk_fields(found) if isinstance(found, dict) else ():
            as_text = in_list or (columns is not None and path in columns.categorical)
            if isinstance(value, _NumberText) and not as_text:
                yield path, None, path
            elif value is not None:
                text = number_text(value) if isinstance(value, _NumberText) else json_text(value)
                yield path, _decoded(category_text(_encoded(text))), f"{path}={text}"


class _NumberText(str):
    """A number as it is written."""


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "surrogateescape")


def _trimmed(cell: str, columns: Columns) -> str:
    return cell.strip(" ") if columns.trims else cell


def _csv_rows(files: Sequence[str], columns: Columns, names: Sequence[str]) -> Iterator[Sequence[str]]:
    for file in files:
        dialect = read_dialect(file, columns.names, columns.header)
        places = [dialect.names.index(name) for name in names]
        lines = (line for at, line in enumerate(_lines([file], "")) if at or not PREAMBLE.fullmatch(_encoded(line)))
        if dialect.separator == BLANKS:
            lines = (_decoded(mark_blanks(_encoded(line))) for line in lines)
        rows = csv.reader(lines, delimiter=dialect.separator)
        for row in islice(rows, int(dialect.has_header), None):
            if len(row) == len(dialect.names):
                yield [_trimmed(row[at], columns) for at in places]


def _parquet_values(files: Sequence[str], name: str) -> Iterator[Sequence[str]]:
    """Yield the texts of a column, and of a column of lists those of the elements, each as a row of one."""
    from paceline.data.tables import open_parquet

    for file in files:
        with open_parquet(file) as opened:
            for batch in opened.iter_batches(_ROWS, columns=[name], use_threads=False):
                column = batch.column(batch.schema.get_field_index(name))
                texts = category_texts(column.flatten() if is_list(column.type) else column).to_pylist()
                yield from (("" if text is None else text,) for text in texts)


def _lines(files: Sequence[str], newline: str) -> Iterator[str]:
    for file in files:
        with io.BufferedReader(_TextFile(open_stream(file)), 1 << 20) as raw:
            yield from io.TextIOWrapper(raw, "utf-8-sig", "surrogateescape", newline=newline)


class _TextFile(io.RawIOBase):
    """A stream of a data file, as Python's own classes read it."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        with memoryview(buffer).cast("B") as view:  # type: ignore[arg-type]
            return self._stream.readinto(view)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


# Names beside a model.


def write_feature_names(directory: Path, names: Mapping[int, str]) -> None:
    """Keep names beside a model: a line of key, tab and name (as JSON writes a text) for each. Raises OSError."""
    lines = [f"{key}\t{json.dumps(name, ensure_ascii=False)}\n" for key, name in sorted(names.items())]
    with replacing(directory / FEATURE_NAMES) as aside:
        aside.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")


def read_feature_names(directory: Path) -> dict[int, str]:
    """Return the names that are kept beside a model; none where there is no such file. Raises ModelError."""
    names: dict[int, str] = {}
    try:
        with open(directory / FEATURE_NAMES, encoding="utf-8") as lines:
            for line in lines:
                key, _, name = line.partition("\t")
                names[int(key)] = str(json.loads(name))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        raise ModelError(f"{directory / FEATURE_NAMES} holds no names of features: {error}") from None
    return names
