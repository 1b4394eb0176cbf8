"""Describe skipped lines for the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from paceline.data import FORMATS, BadLines, Dataset, line_number
from paceline.data.streams.standard_input import name_for_people
from paceline.errors import DataError
from paceline.kernels.text.codes import MISSING_LABEL, REASONS

_NUM_NAMED = 5
_LARGE_SHARE, _FEW = 0.1, 10


@dataclass(frozen=True)
class BadData:
    """The number of skipped lines, and the first few as text."""

    count: int
    first: list[str]
    are_unlabelled: bool = False
    """Whether the first lines are malformed only because they lack a label."""

    def sentence(self, num_good: int | None = None) -> str:
        """Return a warning with the first lines. If `num_good` is given, it also states a large skipped fraction."""
        share = 0.0 if num_good is None else self.count / max(self.count + num_good, 1)
        of_all = f", {share:.0%} of all," if share > _LARGE_SHARE else ""
        kind = "unlabelled" if self.are_unlabelled else "malformed"
        skipped = f"1 {kind} line{of_all} was" if self.count == 1 else f"{self.count:,} {kind} lines{of_all} were"
        listed = "".join(f"\n  {line}" for line in self.first)
        return f"{skipped} skipped (--strict stops at the first):{listed}"

    def check(self, num_good: int | None, limit: float, format: str | None) -> None:
        may_lack_labels = format is not None and FORMATS[format].may_lack_labels
        if not num_good or self.count <= _FEW or (may_lack_labels and self.are_unlabelled):
            return
        share = self.count / (self.count + num_good)
        if share > limit:
            raise DataError(
                f"{self.count:,} of the {self.count + num_good:,} rows read ({share:.1%}) are malformed, more than "
                f"--max-malformed {limit:g} allows. The first is {self.first[0]}. Correct the rows, or raise the limit"
            )


def plain_bad_lines(bad: BadLines, by_shard: Mapping[tuple[int, int], int]) -> tuple[list[list[int]], list[list[Any]]]:
    """Return the counts (file, shard, count) and the first lines, in the format for :func:`describe_bad_lines`."""
    return [[*where, count] for where, count in by_shard.items()], [list(astuple(line)) for line in bad.first]


def describe_bad_lines(
    found: Sequence[tuple[Sequence[Sequence[int]], Sequence[Sequence[Any]]]],
) -> BadData:
    """Merge several readers' results of :func:`plain_bad_lines`. A shard that two readers read counts once."""
    counts = {(file, shard): count for by_shard, _ in found for file, shard, count in by_shard}
    lines = {(line[0], line[1] or 0, line[2] or 0): line for _, first in found for line in first}
    described = []
    for _, (file, offset, row, text, reason) in sorted(lines.items())[:_NUM_NAMED]:
        where = f"line {line_number(file, offset):,}" if offset is not None else f"row {row:,}"
        described.append(f"{name_for_people(file)}, {where}: {reason}: '{text}'")
    are_unlabelled = bool(lines) and all(line[4] == REASONS[MISSING_LABEL] for line in lines.values())
    return BadData(sum(counts.values()), described, are_unlabelled)


def find_bad_lines(dataset: Dataset) -> BadData:
    return describe_bad_lines([plain_bad_lines(dataset.bad_lines, dataset.bad_lines_by_shard)])


def no_line_left(path: object, purpose: str, bad: BadData) -> DataError:
    """Return the error for data without a usable line. `purpose` completes "that can be", such as ``read``."""
    return DataError(f"{path} has no line that can be {purpose}" + (f": {bad.first[0]}" if bad.first else ""))
