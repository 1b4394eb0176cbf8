"""Files and renames that outlast a crash of the machine."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_synced(path: Path, data: bytes) -> None:
    """Write a file; it is on the disk when this returns. Raises OSError."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(folder: Path) -> None:
    """Make the renames in a directory last, where directories can be synced."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
