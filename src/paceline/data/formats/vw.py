"""The formats of Vowpal Wabbit (features in namespaces) and libffm (features in fields)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from paceline.data.columns import Columns
from paceline.data.dialect import LAST_SEPARATOR, NUMBER, guess_dialect
from paceline.data.feature_names import NameFinder, text_lines
from paceline.data.formats.base import LineFormat, share_of_lines
from paceline.data.formats.libsvm import without_comments
from paceline.data.reader import ReadSettings, ShardReader
from paceline.data.sampling import text_pieces
from paceline.data.text import Parse, Parsed, SparseArrays, TextReader, call_kernel
from paceline.errors import DataError

_FFM = re.compile(rf"[ \t]*(?:{NUMBER.pattern}(?=[ \t]))?(?:[ \t]*[^\s:|]+:[^\s:|]+:{NUMBER.pattern}(?!\S))+[ \t]*")
_BANDIT = re.compile(rf"[ \t]*(?:[0-9]+:{NUMBER.pattern}(?::{NUMBER.pattern})?[ \t]*)+\||shared[ \t]*\|")
_VW = re.compile(
    rf"[ \t]*(?:{NUMBER.pattern}(?:[ \t]+{NUMBER.pattern}){{0,2}}[ \t]*)?(?:'[^ \t|]*[ \t]+|'?[^ \t|]*)?\|"
)


class _FieldedFormat(LineFormat):
    """A format whose features belong to namespaces or fields."""

    is_keyed = True
    _field: ClassVar[re.Pattern[bytes]]
    _is_ffm: ClassVar[bool] = False

    @override
    def sample_fields(self, files: Sequence[str]) -> tuple[str, ...]:
        names = (name for _, _, lines in text_pieces(files) for name in self._field.findall(lines))
        return tuple(dict.fromkeys(name.decode("utf-8", errors="surrogateescape") for name in names))

    @override
    def open_reader(self, path: str, settings: ReadSettings) -> ShardReader:
        parse = vw_parser(needs_label=settings.needs_label, is_ffm=self._is_ffm)
        return TextReader(path, self.name, parse, settings)


class Libffm(_FieldedFormat):
    """libffm's format: lines with a label and ``field:feature:value`` triples."""

    name = "libffm"
    _is_ffm = True
    _field = re.compile(rb"(?:^|[ \t])([^\s:|]+):[^\s:|]+:", re.MULTILINE)

    @override
    def matches(self, path: str, lines: Sequence[str]) -> bool:
        return share_of_lines(without_comments(lines), _FFM.fullmatch) > 0.5

    @override
    def add_names(self, finder: NameFinder, files: Sequence[str], columns: Columns | None) -> None:
        triples = (word.split(":") for line in text_lines(files) for word in line.split() if word.count(":") == 2)
        finder.read_pairs((field, name, f"{field}^{name}") for field, name, _ in triples)


class VowpalWabbit(_FieldedFormat):
    """Vowpal Wabbit's format, except its variants for contextual bandits."""

    name = "vw"
    may_lack_labels = True
    _field = re.compile(rb"\|([^\s:|]*)")

    @override
    def matches(self, path: str, lines: Sequence[str]) -> bool:
        if share_of_lines(lines, _BANDIT.match) > 0.5 or lines[0].startswith("shared |"):
            raise DataError(
                f"{path} has the contextual bandit format of Vowpal Wabbit, which is not supported. Write lines with "
                "one label, such as '1 | a b'"
            )
        return share_of_lines(lines, _VW.match) > 0.5 and not _is_bar_separated(lines)

    @override
    def add_names(self, finder: NameFinder, files: Sequence[str], columns: Columns | None) -> None:
        finder.read_pairs(_features(files))


def _is_bar_separated(lines: Sequence[str]) -> bool:
    """Return whether lines that look like vw are CSV: the first line has names, or no line has a feature."""
    if re.fullmatch(r"[^\s|]+(?:\|[^\s|]+)+", lines[0]) is None:
        return False
    dialect = guess_dialect("\n".join(lines))
    if dialect is None:
        return False
    has_names = dialect.has_header and dialect.separator == LAST_SEPARATOR
    return has_names or not any(re.search(r"\|\S*[ \t]+[^\s|]", line) for line in lines)


def vw_parser(*, needs_label: bool, is_ffm: bool = False) -> Parse:
    from paceline.kernels.text import vw as kernels
    from paceline.kernels.text.values import powers_of_ten

    powers = powers_of_ten()

    def parse(text: npt.NDArray[np.uint8], start: int, stop: int) -> Parsed:
        arrays = SparseArrays((stop - start) // 2 + 1)
        (rows, num_bad, position, pairs, all_ones, unweighted), bad = call_kernel(
            *(kernels.parse_vw, kernels.NUM_VW_COUNTS, text, start, stop, int(is_ffm), int(needs_label), powers),
            *arrays.all,
        )
        batch = arrays.batch(rows, pairs, all_ones=bool(all_ones), is_weighted=not unweighted)
        return Parsed(batch, position, num_bad, bad)

    return parse


def _features(files: Sequence[str]) -> Iterator[tuple[str, str | None, str]]:
    for line in text_lines(files):
        for namespace in line.split("|")[1:]:
            name, *features = namespace.rstrip("\r\n").replace("\t", " ").replace("\r", " ").split(" ")
            outer = name.partition(":")[0]
            numbers = map(str, itertools.count())
            for feature in filter(None, features):
                inner = feature.partition(":")[0] or next(numbers)
                yield outer, inner, f"{outer}^{inner}" if outer else inner
