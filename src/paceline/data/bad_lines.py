"""What was wrong with the lines that were skipped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import printable

NUM_KEPT = 5
"""So many bad lines are kept in full; the rest is counted."""

_MAX_TEXT = 80


@dataclass(frozen=True, slots=True)
class BadLine:
    """One malformed line.

    `file`: its path; `offset`: where it begins, in bytes of (decompressed) text; of parquet
    None, and `row` is its number among the file's rows, from 1, None elsewhere. `text` is
    shortened.
    """

    file: str
    offset: int | None
    row: int | None
    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class BadLines:
    """How many lines were skipped, and the first few of them."""

    count: int
    first: tuple[BadLine, ...]


def shorten(text: bytes | str) -> str:
    """A line as a message can show it: decoded, printable, at most 80 characters."""
    if isinstance(text, bytes):
        text = text[: 4 * _MAX_TEXT].decode("utf-8", errors="replace")
    return printable(text[: 2 * _MAX_TEXT].rstrip("\r\n"), _MAX_TEXT)


class BadLineLog:
    """Counts each shard's bad lines once, however often the shard is read."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int], int] = {}
        self._first: list[tuple[tuple[int, int], BadLine]] = []

    def begin(self, file: int, shard: int) -> None:
        """Forget what an earlier reading of this shard found."""
        if self._counts.pop((file, shard), 0):
            self._first = [(where, line) for where, line in self._first if where != (file, shard)]

    def add(self, file: int, shard: int, count: int, first: Sequence[BadLine]) -> None:
        """Count `count` bad lines, of which `first` are described."""
        if count:
            where = (file, shard)
            self._counts[where] = self._counts.get(where, 0) + count
            self._first += [(where, line) for line in first[: NUM_KEPT - len(self._first)]]

    def by_shard(self) -> dict[tuple[int, int], int]:
        """The counts of the shards that have bad lines."""
        return dict(self._counts)

    def total(self) -> BadLines:
        """All shards together."""
        return BadLines(sum(self._counts.values()), tuple(line for _, line in self._first))
