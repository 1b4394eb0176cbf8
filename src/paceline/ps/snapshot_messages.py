"""Control messages between the coordinator of snapshots and the servers.

A snapshot or load takes seconds. One call starts a snapshot and another call requests the state, so that no call
occupies a connection for long.
"""

from __future__ import annotations

import msgspec

from paceline.errors import UsageError
from paceline.protocol.bounds import BucketMask, Natural, Version
from paceline.storage.format import Directory, FolderName, StoredPart
from paceline.tables.bounds import Clock, TableNumber


class TakeSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write buckets to `folder` of `directory` in the background. The answer is SnapshotStarted.

    The server skips buckets that it does not lead; the coordinator requests them from their primary in another round. A
    bucket that is unchanged since a snapshot in `complete` is not written again. With `boundary` (sequential
    consistency) the server writes the state after this number of iterations.
    """

    number: Natural
    directory: Directory
    folder: FolderName
    tables: tuple[TableNumber, ...]
    buckets: BucketMask
    complete: tuple[Natural, ...] = ()
    boundary: Clock | None = None
    round: Natural = 0
    """The number of the round in this snapshot; rounds have different names of files."""


class SnapshotStarted(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to TakeSnapshot: whether the snapshot started, and the highest clock of a worker.

    The snapshot does not start if a worker may already have ended iteration `boundary`.
    """

    is_started: bool
    clock: int


class GetSnapshotState(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Request the state of a snapshot; the answer is SnapshotState."""

    directory: Directory
    number: int


class UnchangedBuckets(msgspec.Struct, frozen=True, kw_only=True):
    """The buckets of a table that have not changed since snapshot `number`."""

    table: TableNumber
    number: Natural
    buckets: BucketMask


class SnapshotState(msgspec.Struct, frozen=True, kw_only=True):
    """One server's progress in a snapshot. With `done`, all `parts` are on the disk."""

    done: bool
    error: str
    parts: tuple[StoredPart, ...]
    unchanged: tuple[UnchangedBuckets, ...]


class DropSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Cancel a snapshot that is not complete, and remove its files."""

    directory: Directory
    number: int


class LoadParts(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start to load the server's buckets of parts of a table from the disk. GetLoadState has the progress.

    A server whose view has another version raises StaleEpochError.
    """

    version: Version
    table: TableNumber
    directory: Directory
    parts: tuple[StoredPart, ...]
    buckets: tuple[BucketMask, ...]

    def __post_init__(self) -> None:
        if len(self.buckets) != len(self.parts):
            raise UsageError(
                f"a load of {len(self.parts)} parts has {len(self.buckets)} sets of buckets: expected one for each part"
            )


class GetLoadState(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Request the state of a load; the answer is LoadState."""


class LoadState(msgspec.Struct, frozen=True, kw_only=True):
    """One server's progress in a load; `error` is the text of a ModelError."""

    done: bool
    error: str
    rows: Natural
    is_seen: bool
    """Whether the server finds the files; if not, it has loaded nothing."""


ToServer = TakeSnapshot | GetSnapshotState | DropSnapshot | LoadParts | GetLoadState
