"""Define the interface and the settings of readers, and keep readers open for the next shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.data.bad_lines import BadLine
from paceline.data.batch import Batch
from paceline.data.columns import Columns
from paceline.data.streams import FileStatus
from paceline.errors import DataError

Report = Callable[[int, Sequence[BadLine]], None]
"""A callback that receives the number of malformed lines, and descriptions of the first few."""

BLOCK_BYTES = 1 << 20
"""The size of a block of text, which is read and parsed in one step."""

_MAX_IDLE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSettings:
    """Settings of the reader of one file."""

    shard_bytes: int
    num_bytes: int
    columns: Columns | None = None
    needs_label: bool = True
    """Whether a row without a label is malformed. If False, its label is NaN."""


class OtherFormatError(DataError):
    """None of a file's first lines is valid, so the file has another format than the reader."""


class ShardReader(Protocol):
    """Reads shards of one file. The reader keeps its position, so shards in ascending order need no search."""

    num_shards: int | None

    def blocks(self, shard: int, report: Report) -> Iterator[Batch]:
        """Yield the shard's rows in batches of any size. Yield nothing for a shard after the last one."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file's reader, and the file's status before it was opened."""

    status: FileStatus
    reader: ShardReader


class IdleFiles:
    """The most recently read files, which stay open."""

    def __init__(self) -> None:
        self._idle: dict[int, OpenFile] = {}

    def take(self, file: int) -> OpenFile | None:
        """Remove and return the file with this number, if open. The caller then owns the file."""
        return self._idle.pop(file, None)

    def give_back(self, file: int, opened: OpenFile) -> None:
        """Keep a file open. Close an older reader of this file, and the least recently used files above the limit."""
        older = self.take(file)
        if older is not None:
            older.reader.close()
        self._idle[file] = opened
        while len(self._idle) > _MAX_IDLE:
            self._idle.pop(next(iter(self._idle))).reader.close()

    def close(self) -> None:
        while self._idle:
            self._idle.popitem()[1].reader.close()
