"""Checked reads of models and snapshots: only files as their manifest describes them.

A manifest is untrusted. Its names must be plain names, its files regular files of the given size before they are read
or allocated, and all contents are verified.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.errors import ModelError

MAX_MANIFEST_BYTES = 1 << 28


def read_manifest_text(path: Path) -> bytes:
    """Return a manifest's text. Raises OSError, or ModelError if it is not a regular file."""
    number = _open(path)
    with open(number, "rb") as file:
        size = os.fstat(number).st_size
        if size > MAX_MANIFEST_BYTES:
            raise ModelError(f"{path} has {size} bytes: a manifest has at most {MAX_MANIFEST_BYTES}")
        return file.read(size)


def read_checked(path: Path, num_bytes: int, sha256: str, owner: str) -> npt.NDArray[np.uint8]:
    """Return a file's content (uint8 [num_bytes], 8-aligned). Raises ModelError if it differs from the manifest.

    `owner` names the model or snapshot in errors.
    """
    try:
        number = _open(path)
        with open(number, "rb", buffering=0) as file:
            size = os.fstat(number).st_size
            if size != num_bytes:
                raise ModelError(
                    f"{path} is cut off or was changed: it has {size} bytes, its manifest records {num_bytes} "
                    f"(SHA-256 {sha256[:16]}…); take another copy of {owner}"
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
            f"{path} is damaged: its SHA-256 is {found[:16]}…, its manifest records {sha256[:16]}…; take another copy "
            f"of {owner}"
        )
    return data


def _open(path: Path) -> int:
    """Open a regular file. Does not wait for others (a pipe, a device), which raise ModelError."""
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise ModelError(f"{path} is not a regular file: take another copy")
    return number
