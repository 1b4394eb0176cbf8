"""LIBSVM's format: each line has a label and ``index:value`` pairs. The index is the key."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from paceline.data.batch import Batch
from paceline.data.dialect import NUMBER
from paceline.data.formats.base import LineFormat, share_of_lines
from paceline.data.reader import ReadSettings, ShardReader
from paceline.data.text import Parse, Parsed, TextReader, call_kernel

_LINE = re.compile(rf"[ \t]*{NUMBER.pattern}(?:[ \t]+(?:qid:[0-9]+|[0-9]+:{NUMBER.pattern}))*[ \t]*(?:#.*)?")


class Libsvm(LineFormat):
    """LIBSVM's format."""

    name = "libsvm"
    is_keyed = True
    has_numbered_features = True

    @override
    def matches(self, path: str, lines: Sequence[str]) -> bool:
        data = without_comments(lines)
        return share_of_lines(data, _LINE.fullmatch) > 0.5 and any(":" in line for line in data)

    @override
    def open_reader(self, path: str, settings: ReadSettings) -> ShardReader:
        parse = _libsvm_parser(needs_label=settings.needs_label)
        return TextReader(path, self.name, parse, settings)


def without_comments(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if not line.lstrip().startswith("#")]


def _libsvm_parser(*, needs_label: bool) -> Parse:
    from paceline.kernels.text import lines as kernels
    from paceline.kernels.text.values import powers_of_ten

    powers = powers_of_ten()

    def parse(text: npt.NDArray[np.uint8], start: int, stop: int) -> Parsed:
        row_capacity, pair_capacity = (stop - start) // 16 + 16, (stop - start) // 4 + 1  # a pair has at least 4 bytes
        labels, indptr = np.empty(row_capacity, np.float32), np.empty(row_capacity + 1, np.int64)
        keys, values = np.empty(pair_capacity, np.uint64), np.empty(pair_capacity, np.float32)
        arrays = (labels, indptr, keys, values)
        (rows, num_bad, position, pairs, all_ones), bad = call_kernel(
            *(kernels.parse_libsvm, kernels.NUM_COUNTS, text, start, stop, int(needs_label), powers, *arrays)
        )
        batch = Batch(labels[:rows], indptr[: rows + 1], keys[:pairs], None if all_ones else values[:pairs])
        return Parsed(batch, position, num_bad, bad)

    return parse
