"""Criteo's format: a label, 13 integers and 26 categories, separated by tabs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from paceline.data.batch import Batch
from paceline.data.columns import Columns
from paceline.data.dialect import read_lines
from paceline.data.feature_names import NameFinder, text_lines
from paceline.data.formats.base import LineFormat, share_of_lines
from paceline.data.labels import count_labels
from paceline.data.reader import ReadSettings, ShardReader
from paceline.data.text import Parse, Parsed, TextReader, call_kernel
from paceline.kernels.hashing import hash_bytes
from paceline.kernels.text.criteo import (
    CRITEO_CATEGORIES,
    CRITEO_INTEGERS,
    field_seed,
    integer_category,
    log_thresholds,
)

CRITEO_NAMES = (
    *(f"I{number}" for number in range(1, CRITEO_INTEGERS + 1)),
    *(f"C{number}" for number in range(1, CRITEO_CATEGORIES + 1)),
)

_LEAST_INTEGER = -16  # smaller integers are rare, so no names are stored for them


class Criteo(LineFormat):
    """Criteo's format. Integers are categories: each is read as a range of numbers, such as ``I3=8..11``."""

    name = "criteo"
    fixed_columns = CRITEO_NAMES
    has_numbers = False
    has_binary_labels = True

    @override
    def matches(self, path: str, lines: Sequence[str]) -> bool:
        return share_of_lines(lines, _is_criteo) > 0.5

    @override
    def matches_unlabelled(self, path: str) -> bool:
        lines = [line for line in read_lines(path)[0].decode("utf-8", errors="replace").split("\n") if line.strip()]
        return share_of_lines(lines, _is_criteo) <= 0.5 < share_of_lines(lines, lambda line: line.count("\t") == 38)

    @override
    def sample_labels(self, files: Sequence[str], columns: Columns | None) -> dict[float, int]:
        return count_labels(word for word in self.label_words(files) if word in ("0", "1"))

    @override
    def add_names(self, finder: NameFinder, files: Sequence[str], columns: Columns | None) -> None:
        _add_integers(finder)
        seeds = [field_seed(field) for field in range(CRITEO_INTEGERS + 1, CRITEO_INTEGERS + CRITEO_CATEGORIES + 1)]
        finder.read(CRITEO_NAMES[CRITEO_INTEGERS:], seeds, _categories(files))

    @override
    def open_reader(self, path: str, settings: ReadSettings) -> ShardReader:
        has_label = settings.needs_label or not self.matches_unlabelled(path)
        parse = criteo_parser(has_label=has_label)
        return TextReader(path, self.name, parse, settings)


def _is_criteo(line: str) -> bool:
    return line.count("\t") == 39 and line[:2] in ("0\t", "1\t")


def criteo_parser(*, has_label: bool = True) -> Parse:
    from paceline.kernels.text import lines as kernels
    from paceline.kernels.text.criteo import CRITEO_FEATURES, criteo_tables

    tables = criteo_tables()

    def parse(text: npt.NDArray[np.uint8], start: int, stop: int) -> Parsed:
        capacity = (stop - start) // 128 + 16
        labels = np.empty(capacity, np.float32)
        keys = np.empty(capacity * CRITEO_FEATURES, np.uint64)
        (rows, num_bad, position, pairs, _), bad = call_kernel(
            *(kernels.parse_criteo, kernels.NUM_COUNTS, text, start, stop, int(has_label), *tables, labels, keys)
        )
        indptr = np.arange(0, pairs + 1, CRITEO_FEATURES, dtype=np.int64)
        batch = Batch(labels[:rows], indptr, keys[:pairs])
        return Parsed(batch, position, num_bad, bad)

    return parse


def _add_integers(finder: NameFinder) -> None:
    thresholds = log_thresholds()
    ranges = {x: str(x) for x in range(_LEAST_INTEGER, 3)}
    for first, end in zip((3, *thresholds), (*thresholds, 10**18), strict=True):
        if first < end and first > 2:
            ranges[integer_category(first)] = str(first) if end == first + 1 else f"{first}..{end - 1}"
    for field, name in enumerate(CRITEO_NAMES[:CRITEO_INTEGERS], 1):
        seed = field_seed(field)
        finder.add(hash_bytes(b"", seed), f"{name}=")
        for category, text in ranges.items():
            finder.add(hash_bytes((category % 2**64).to_bytes(8, "little"), seed), f"{name}={text}")


def _categories(files: Sequence[str]) -> Iterator[Sequence[str]]:
    for line in text_lines(files):
        fields = line.rstrip("\r\n").split("\t")
        if len(fields) == 1 + len(CRITEO_NAMES):
            yield fields[1 + CRITEO_INTEGERS :]
