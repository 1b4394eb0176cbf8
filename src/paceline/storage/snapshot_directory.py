"""Manage directories of snapshots: remove old snapshots, and find the newest complete one.

Each snapshot has its own folder, such as ``snapshot-000123``, with its manifest and the parts written by servers. The
manifest is written last, so a folder without a manifest is incomplete. For unchanged buckets, an incremental snapshot
refers to parts in earlier folders. :mod:`paceline.ps.client.snapshots` decides which data to write, and when.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.errors import ModelError, UsageError
from paceline.protocol.buckets import Buckets
from paceline.storage.directory_lock import DirectoryLock
from paceline.storage.durable_io import is_no_space, make_directory, sync_directory
from paceline.storage.format import MANIFEST, SnapshotManifest, StoredPart, read_manifest, write_manifest
from paceline.storage.parts import read_part
from paceline.tables.types import Floats, Keys

_FOLDER = re.compile(r"snapshot-(\d{6,})")
_READERS = 2
_NAME_IN_ERRORS = "the snapshot"


class SnapshotWriteError(ModelError):
    """A snapshot could not be written; the training continues without it."""


def folder_name(number: int) -> str:
    return f"snapshot-{number:06d}"


def numbers_in(directory: Path) -> list[int]:
    try:
        names = os.listdir(directory)
    except OSError:  # a later read or write reports the error
        return []
    return sorted(int(found[1]) for found in map(_FOLDER.fullmatch, names) if found)


def read_snapshot(directory: Path, number: int) -> SnapshotManifest:
    folder = directory / folder_name(number)
    manifest = read_manifest(folder, SnapshotManifest)
    if manifest.number != number:
        raise ModelError(
            f"{folder / MANIFEST} belongs to snapshot {manifest.number}, but is in the folder of another snapshot"
        )
    return manifest


def describe_failure(directory: Path, error: OSError) -> str:
    if is_no_space(error):
        return f"no space left in {directory}"
    return f"cannot write in {directory}: {error.strerror or error}"


# Writing.


class SnapshotDirectory:
    """A directory of snapshots. It keeps the newest `keep` snapshots and the files that they refer to.

    Raises UsageError while another run writes snapshots to the directory.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 3) -> None:
        if keep < 1:
            raise UsageError(f"snapshots to keep: {keep}; expected at least 1")
        self.path = Path(os.path.abspath(directory))
        self._keep = keep
        self._lock: DirectoryLock | None = None
        with contextlib.suppress(OSError):  # make() raises the error again
            self._take_over()
        self._last = max(numbers_in(self.path), default=0)
        self._manifests: dict[int, SnapshotManifest] = {}
        for number in numbers_in(self.path):
            with contextlib.suppress(ModelError):  # a damaged snapshot is removed after the next complete one
                self._manifests[number] = read_snapshot(self.path, number)

    def next_number(self) -> int:
        self._last += 1
        return self._last

    def make(self, number: int) -> None:
        self._take_over()
        make_directory(self.path / folder_name(number))

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _take_over(self) -> None:
        if self._lock is None:
            make_directory(self.path)
            self._lock = DirectoryLock.take(self.path)

    def commit(self, manifest: SnapshotManifest) -> None:
        """Complete a snapshot and remove old ones. After an OSError the snapshot is incomplete."""
        folder = self.path / folder_name(manifest.number)
        write_manifest(folder, manifest)
        for directory in (folder, self.path):
            sync_directory(directory)
        self._manifests[manifest.number] = manifest
        for number in sorted(self._manifests)[: -self._keep]:
            del self._manifests[number]
        needed = {file for manifest in self._manifests.values() for file in manifest.files}
        for number in numbers_in(self.path):
            if number not in self._manifests:
                self._remove(number, needed)

    def discard(self, number: int) -> None:
        self._remove(number)

    def _remove(self, number: int, needed: Iterable[str] = ()) -> None:
        """Remove a snapshot: first its manifest, then its files that no other snapshot uses. Ignores errors."""
        folder = self.path / folder_name(number)
        with contextlib.suppress(OSError):
            (folder / MANIFEST).unlink(missing_ok=True)
            for path in list(folder.iterdir()):
                if f"{folder.name}/{path.name}" not in needed:
                    path.unlink(missing_ok=True)
            if not any(folder.iterdir()):
                folder.rmdir()


# Reading.


@dataclass(frozen=True)
class Snapshot:
    """A complete snapshot."""

    directory: Path
    manifest: SnapshotManifest

    def __str__(self) -> str:
        return f"{self.directory / folder_name(self.manifest.number)}"


def read_newest(directory: str | os.PathLike[str], warn: Callable[[str], None] = lambda text: None) -> Snapshot:
    """Return the newest snapshot of a directory whose files are all present and undamaged.

    `warn` receives a message for each newer snapshot that is incomplete. Raises ModelError if no snapshot is complete.
    """
    path = Path(directory)
    numbers = [number for number in numbers_in(path) if (path / folder_name(number) / MANIFEST).exists()]
    if not numbers:
        raise ModelError(f"{path} holds no complete snapshot to resume from")
    verified: set[str] = set()
    reasons: dict[int, str] = {}
    for number in reversed(numbers):
        try:
            manifest = read_snapshot(path, number)
            _check_files(path, manifest, verified)
        except ModelError as error:
            reasons[number] = str(error)
            continue
        for newer, reason in reasons.items():
            warn(f"{folder_name(newer)} cannot be used, so {folder_name(number)} is used instead: {reason}")
        return Snapshot(path, manifest)
    raise ModelError(f"{path} holds no complete snapshot to resume from: {'; '.join(reasons.values())}")


def _check_files(directory: Path, manifest: SnapshotManifest, verified: set[str]) -> None:
    """Raise ModelError unless a snapshot's files are complete. Files in `verified` are not read again."""
    parts = {part.file: part for table in manifest.tables for part in table.parts}
    unknown = [part for file, part in parts.items() if file not in verified]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="paceline-snapshot") as pool:
        checks = [(part, pool.submit(_check_part, directory, part)) for part in unknown]
        try:
            for part, check in checks:
                check.result()
                verified.add(part.file)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _check_part(directory: Path, part: StoredPart) -> None:
    read_part(directory, part, _NAME_IN_ERRORS)


def read_buckets(
    directory: Path, part: StoredPart, wanted: Buckets, *, with_passes: bool = False
) -> list[tuple[int, Keys, Floats]]:
    """Return number, keys and records of each wanted bucket that has rows. Raises the errors of :func:`read_part`.

    Unless `with_passes`, the pass number at the end of each record is removed.
    """
    keys, records = read_part(directory, part, _NAME_IN_ERRORS)
    if part.has_passes and not with_passes:
        records = np.ascontiguousarray(records[:, :-1])
    found, at = [], 0
    for bucket, rows in zip(part.buckets, part.rows, strict=True):
        if wanted >> bucket & 1 and rows:
            found.append((bucket, keys[at : at + rows], records[at : at + rows]))
        at += rows
    return found
