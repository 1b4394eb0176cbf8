"""Write files that survive a crash of the machine, and verify files when they are read. Disk errors are raised.

A manifest is untrusted. Its names must be plain names, and its files must be regular files of the given size. Names and
sizes are checked before any file is read or memory is allocated. Checksums of all contents are verified.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.errors import ModelError
from paceline.output_files import replacing

MAX_MANIFEST_BYTES = 1 << 28


def read_manifest_text(path: Path) -> bytes:
    number = _open(path)
    with open(number, "rb") as file:
        size = os.fstat(number).st_size
        if size > MAX_MANIFEST_BYTES:
            raise ModelError(f"{path} has {size} bytes: a manifest has at most {MAX_MANIFEST_BYTES}")
        return file.read(size)


def read_checked(path: Path, num_bytes: int, sha256: str, owner: str) -> npt.NDArray[np.uint8]:
    """Return a file's content (uint8 [num_bytes], 8-aligned). Raises ModelError if it differs from the manifest."""
    try:
        number = _open(path)
        with open(number, "rb", buffering=0) as file:
            size = os.fstat(number).st_size
            if size != num_bytes:
                raise ModelError(
                    f"{path} is truncated or was changed: it has {size} bytes, but its manifest records {num_bytes} "
                    f"(SHA-256 {sha256[:16]}…). Use another copy of {owner}"
                )
            data = np.empty(num_bytes, np.uint8)
            view, at = memoryview(data), 0  # type: ignore[arg-type]
            while at < size:
                at += file.readinto(view[at:]) or size
    except OSError as error:
        raise ModelError(f"cannot read {path}, a part of {owner}: {error.strerror or error}") from None
    found = hashlib.sha256(view).hexdigest()
    if found != sha256:
        raise ModelError(
            f"{path} is damaged: its SHA-256 is {found[:16]}…, its manifest records {sha256[:16]}…. Use another "
            f"copy of {owner}"
        )
    return data


def _open(path: Path) -> int:
    """Open a regular file. A pipe or a device raises ModelError instead of waiting for another process."""
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise ModelError(f"{path} is not a regular file. Use another copy")
    return number


_NOT_FOR_DIRECTORIES = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Errors of file systems that cannot sync a directory."""


def write_synced(path: Path, *buffers: bytes | memoryview) -> None:
    """Write a file. It is on disk when this function returns. Raises OSError."""
    with open(path, "wb", buffering=0) as file:
        for buffer in buffers:
            unwritten = memoryview(buffer).cast("B")
            while unwritten:
                unwritten = unwritten[os.write(file.fileno(), unwritten) :]
        os.fsync(file.fileno())


def replace_synced(path: Path, data: bytes) -> None:
    """Replace a file atomically. Only :func:`sync_directory` makes the rename durable. Raises OSError."""
    with replacing(path) as aside:
        write_synced(aside, data)


def sync_directory(folder: Path) -> None:
    """Make the renames in a directory durable, if the file system supports this. Raises OSError."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in _NOT_FOR_DIRECTORIES:
            raise
    finally:
        os.close(number)


def make_directory(folder: Path) -> list[Path]:
    """Create a directory and its parents durably. Return the new directories, the innermost first. Raises OSError."""
    missing = [directory for directory in (folder, *folder.parents) if not directory.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for directory in missing:
        sync_directory(directory.parent)
    return missing


def is_no_space(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
