"""What a coordinator of snapshots and the servers say to each other; control messages like those of `messages`.

A snapshot and a loading take seconds. They are begun by one call and asked after by another, so that no connection is
held by one that waits.
"""

from __future__ import annotations

import msgspec

from paceline.errors import UsageError
from paceline.protocol.bounds import BucketMask, Natural, Version
from paceline.storage.format import Directory, FolderName, StoredPart
from paceline.tables.bounds import Clock, TableNumber


class TakeSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write your buckets to `folder` of `directory`, beside serving. Answered by SnapshotBegun.

    One that is not (any more) on this server is left out: its coordinator asks whoever leads it then, in another round.
    A bucket that has not changed since snapshot n, one of `whole`, is not written again. With `boundary` (sequential
    consistency) what is written is the state after so many iterations.
    """

    number: Natural
    directory: Directory
    folder: FolderName
    tables: tuple[TableNumber, ...]
    buckets: BucketMask
    """The set of buckets that are this server's to write."""
    whole: tuple[Natural, ...] = ()
    boundary: Clock | None = None
    round: Natural = 0
    """Which one it is of this snapshot: files of different rounds have different names."""


class SnapshotBegun(msgspec.Struct, frozen=True, kw_only=True):
    """Whether it was (not if a worker may have ended iteration `boundary`), and the highest clock of a worker."""

    begun: bool
    clock: int


class GetSnapshotState(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask how far a snapshot is; answered by SnapshotState."""

    directory: Directory
    number: int


class KeptBuckets(msgspec.Struct, frozen=True, kw_only=True):
    """Buckets of a table that are as snapshot `number` has them."""

    table: TableNumber
    number: Natural
    buckets: BucketMask


class SnapshotState(msgspec.Struct, frozen=True, kw_only=True):
    """How far one server is. When it is `done`, `parts` are on the disk."""

    done: bool
    error: str
    parts: tuple[StoredPart, ...]
    kept: tuple[KeptBuckets, ...]


class DropSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Give up a snapshot, if it is still being taken, and remove what was written of it."""

    directory: Directory
    number: int


class LoadParts(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Read buckets of parts of a table from the disk, those that you hold, and set their rows.

    It is begun; GetLoadState tells the rest. A server whose map is not of `version` raises StaleEpochError.
    """

    version: Version
    table: TableNumber
    directory: Directory
    parts: tuple[StoredPart, ...]
    buckets: tuple[BucketMask, ...]
    """Of each part, the set of buckets to set."""

    def __post_init__(self) -> None:
        if len(self.buckets) != len(self.parts):
            raise UsageError(f"{len(self.parts)} parts are to be read, and buckets of {len(self.buckets)}")


class GetLoadState(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask how far a loading is; answered by LoadState."""


class LoadState(msgspec.Struct, frozen=True, kw_only=True):
    """How far one server is; an `error` is a ModelError's text."""

    done: bool
    error: str
    rows: Natural
    is_seen: bool
    """Whether the files are there at all, as the server sees the directory; if not, it has loaded nothing."""


ToServer = TakeSnapshot | GetSnapshotState | DropSnapshot | LoadParts | GetLoadState
