"""Record malformed lines: the first few in full, and the total number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import printable

NUM_KEPT = 5
"""The number of bad lines to record in full. Further bad lines are only counted."""

_MAX_TEXT = 80


@dataclass(frozen=True, slots=True)
class BadLine:
    """A malformed line, or a malformed row of a binary file."""

    file: str
    offset: int | None
    """The offset of the line's first byte in the decompressed text; None in binary files."""
    row: int | None
    """The row's number, from 1, in binary files; otherwise None."""
    text: str
    """The shortened line."""
    reason: str


@dataclass(frozen=True, slots=True)
class BadLines:
    """The number of skipped lines, and descriptions of the first few."""

    count: int
    first: tuple[BadLine, ...]


def shorten(text: bytes | str) -> str:
    """Return a line in a form for messages: decoded, printable, at most 80 characters."""
    if isinstance(text, bytes):
        text = text[: 4 * _MAX_TEXT].decode("utf-8", errors="replace")
    return printable(text[: 2 * _MAX_TEXT].rstrip("\r\n"), _MAX_TEXT)


class BadLineLog:
    """Counts the bad lines of each shard, so that a shard that is read several times counts once."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int], int] = {}
        self._first: list[tuple[tuple[int, int], BadLine]] = []

    def begin(self, file: int, shard: int) -> None:
        """Drop the lines that an earlier read of this shard recorded."""
        if self._counts.pop((file, shard), 0):
            self._first = [(where, line) for where, line in self._first if where != (file, shard)]

    def add(self, file: int, shard: int, count: int, first: Sequence[BadLine]) -> None:
        if count:
            where = (file, shard)
            self._counts[where] = self._counts.get(where, 0) + count
            self._first += [(where, line) for line in first[: NUM_KEPT - len(self._first)]]

    def by_shard(self) -> dict[tuple[int, int], int]:
        """Return the number of bad lines of each shard, by file and shard, if it is not 0."""
        return dict(self._counts)

    def total(self) -> BadLines:
        return BadLines(sum(self._counts.values()), tuple(line for _, line in self._first))
