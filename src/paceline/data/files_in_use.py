"""Checks that the files of a data set do not change while it is in use."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.data.formats.base import Format
from paceline.data.streams import FileStatus
from paceline.errors import DataError


class FilesInUse:
    """Checks that files do not change. `sizes` are the sizes in bytes on another host, None for any."""

    def __init__(self, files: Sequence[str], format: Format, sizes: Sequence[int] | None) -> None:
        self.sizes = None if sizes is None else list(sizes)
        self.num_shards: dict[int, int] = {}
        """The number of shards by file, once it is known."""
        self._files = tuple(files)
        self._format = format
        self._statuses: dict[int, FileStatus] = {}

    def check(self, file: int) -> FileStatus:
        """Return the status of a file. Raises DataError if it differs from the first call.

        A copy on another host must have the same size.
        """
        path = self._files[file]
        status = self._format.stat(path)
        first = self._statuses.setdefault(file, status)
        size = first.num_bytes if self.sizes is None else self.sizes[file]
        if status.num_bytes != size:
            raise DataError(
                f"{path} has changed during its use, from {size:,} to {status.num_bytes:,} bytes: the rows read so far "
                "may be of two versions. Run the command again when the file is complete"
            )
        if status != first:
            raise DataError(
                f"{path} was written to during its use: the rows read so far may be of two versions. Run the command "
                "again when the file is complete"
            )
        return status
