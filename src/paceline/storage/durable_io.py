"""Files and renames that outlast a crash of the machine. Errors of the disk are raised: nothing is safe by luck."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_NOT_FOR_DIRECTORIES = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
"""What a file system answers that has no way to sync a directory."""


def write_synced(path: Path, data: bytes) -> None:
    """Write a file; it is on the disk when this returns. Raises OSError."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(folder: Path) -> None:
    """Make the renames in a directory last, where directories can be synced. Raises OSError."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in _NOT_FOR_DIRECTORIES:
            raise
    finally:
        os.close(number)


def make_directory(folder: Path) -> list[Path]:
    """Make a directory, and those above it; they last. Return those made, inmost first. Raises OSError."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_directory(each.parent)
    return missing
