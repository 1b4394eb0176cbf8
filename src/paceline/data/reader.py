"""What every format's reader offers to the dataset, and the readers that wait there, each with an open file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.data.bad_lines import BadLine
from paceline.data.batch import Batch
from paceline.data.streams import FileStatus

Report = Callable[[int, Sequence[BadLine]], None]
"""Takes a number of bad lines and descriptions of the first of them."""

BLOCK_BYTES = 1 << 20
"""So much text is read and parsed at a time."""

_MAX_IDLE = 4


class ShardReader(Protocol):
    """Reads shards of one file; it keeps its place, so rising shard numbers cost nothing twice."""

    num_shards: int | None
    """None as long as it is unknown."""

    def blocks(self, shard: int, report: Report) -> Iterator[Batch]:
        """The shard's rows in batches of the reader's own size, labels as the file has them; none behind the end."""

    def close(self) -> None:
        """Close the file."""


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file's reader, and the status of the file before it was opened."""

    status: FileStatus
    reader: ShardReader


class IdleFiles:
    """Files that stay open until they are read further, the last few of them."""

    def __init__(self) -> None:
        self._idle: dict[int, OpenFile] = {}

    def take(self, file: int) -> OpenFile | None:
        """The file of this number, if it is there; it is the caller's."""
        return self._idle.pop(file, None)

    def give_back(self, file: int, opened: OpenFile) -> None:
        """Keep a file open, in place of another one of that number, or of the one that has waited longest."""
        older = self.take(file)
        if older is not None:
            older.reader.close()
        self._idle[file] = opened
        while len(self._idle) > _MAX_IDLE:
            self._idle.pop(next(iter(self._idle))).reader.close()

    def close(self) -> None:
        """Close them all."""
        while self._idle:
            self._idle.popitem()[1].reader.close()
