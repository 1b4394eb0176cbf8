"""The files of a data set as long as it is in use: each is to stay what it was when it was first looked at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.data.binary.arrays import stat_arrays
from paceline.data.streams import FileStatus, stat_file
from paceline.errors import DataError


def stat_source(path: str | Path, format: str) -> FileStatus:
    """The status of a data file, of arrays with that of their labels beside; :exc:`DataError` without it."""
    return stat_arrays(str(path)) if format == "numpy" else stat_file(path)


class FilesInUse:
    """What is known of files by their number; `sizes`, in bytes, are those that they had elsewhere (None: any)."""

    def __init__(self, files: Sequence[str], format: str, sizes: Sequence[int] | None) -> None:
        self.sizes = None if sizes is None else list(sizes)
        self.num_shards: dict[int, int] = {}
        """Of those of which it is known."""
        self._files = tuple(files)
        self._format = format
        self._statuses: dict[int, FileStatus] = {}

    def check(self, file: int) -> FileStatus:
        """Return the status of a file. Raises DataError unless it is the one that it had when it was first asked for.

        Of a copy that another host has the size must be the same.
        """
        path = self._files[file]
        status = stat_source(path, self._format)
        first = self._statuses.setdefault(file, status)
        size = first.num_bytes if self.sizes is None else self.sizes[file]
        if status.num_bytes != size:
            raise DataError(
                f"{path} has changed while it was in use, from {size:,} to {status.num_bytes:,} bytes: what was read "
                "is of two versions; begin again once nobody writes to it"
            )
        if status != first:
            raise DataError(
                f"{path} has been written to while it was in use: what was read of it may be of two versions; begin "
                "again once nobody writes to it"
            )
        return status
