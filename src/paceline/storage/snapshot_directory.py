"""Snapshots on disk: a directory of them, in which each new one takes the place of the oldest, and the newest is found.

A directory of snapshots holds a folder for each, ``snapshot-000123``. In it lie the parts that servers wrote for it and
its manifest, which is put in place last: a folder without one is no snapshot. An incremental snapshot names parts of
earlier folders for the buckets that have not changed since. Who decides what is written, and when, is
:mod:`paceline.ps.client.snapshots`.
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
from paceline.storage.format import SnapshotManifest, StoredPart
from paceline.storage.manifests import MANIFEST, read_manifest, write_manifest
from paceline.storage.parts import read_part
from paceline.tables.types import Floats, Keys

_FOLDER = re.compile(r"snapshot-(\d{6,})")
_READERS = 2
_WHOLE = "the snapshot"


class SnapshotWriteError(ModelError):
    """A snapshot could not be written; the training does not depend on it."""


def folder_name(number: int) -> str:
    """Return the name of a snapshot's folder."""
    return f"snapshot-{number:06d}"


def numbers_in(directory: Path) -> list[int]:
    """Return the numbers of the folders in a directory, whole snapshots or not, rising."""
    try:
        names = os.listdir(directory)
    except OSError:  # whoever wants to read or write something there is told why it cannot
        return []
    return sorted(int(found[1]) for found in map(_FOLDER.fullmatch, names) if found)


def read_snapshot(directory: Path, number: int) -> SnapshotManifest:
    """Read a snapshot's manifest. Raises ModelError if there is none, or it cannot be read."""
    folder = directory / folder_name(number)
    manifest = read_manifest(folder, SnapshotManifest)
    if manifest.number != number:
        raise ModelError(
            f"{folder / MANIFEST} is that of snapshot {manifest.number}, copied into the folder of another one"
        )
    return manifest


def describe_failure(directory: Path, error: OSError) -> str:
    """Say why a snapshot could not be written."""
    if is_no_space(error):
        return f"no space left in {directory}"
    return f"cannot write in {directory}: {error.strerror or error}"


# Writing.


class SnapshotDirectory:
    """A directory of snapshots, of which the newest `keep` stay, and the files that they refer to.

    It is one run's at a time: raises UsageError while another one takes snapshots there.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 3) -> None:
        if keep < 1:
            raise UsageError(f"snapshots to keep: {keep}; expected at least 1")
        self.path = Path(os.path.abspath(directory))
        self._keep = keep
        self._lock: DirectoryLock | None = None
        with contextlib.suppress(OSError):  # who begins a snapshot is told
            self._take_over()
        self._last = max(numbers_in(self.path), default=0)
        self._manifests: dict[int, SnapshotManifest] = {}
        for number in numbers_in(self.path):
            with contextlib.suppress(ModelError):  # cut off or damaged: it goes when there is a whole one in its place
                self._manifests[number] = read_snapshot(self.path, number)

    def next_number(self) -> int:
        """Return a number that no snapshot had."""
        self._last += 1
        return self._last

    def make(self, number: int) -> None:
        """Make a snapshot's folder. Raises OSError."""
        self._take_over()
        make_directory(self.path / folder_name(number))

    def close(self) -> None:
        """Let another run have the directory. Idempotent."""
        if self._lock is not None:
            self._lock.release()

    def _take_over(self) -> None:
        if self._lock is None:
            make_directory(self.path)
            self._lock = DirectoryLock.take(self.path)

    def commit(self, manifest: SnapshotManifest) -> None:
        """Make a snapshot of what was written for it; let older ones go. Raises OSError, and then it is none."""
        folder = self.path / folder_name(manifest.number)
        write_manifest(folder, manifest)
        for each in (folder, self.path):
            sync_directory(each)
        self._manifests[manifest.number] = manifest
        for number in sorted(self._manifests)[: -self._keep]:
            del self._manifests[number]
        needed = {file for kept in self._manifests.values() for file in kept.files}
        for number in numbers_in(self.path):
            if number not in self._manifests:
                self._remove(number, needed)

    def discard(self, number: int) -> None:
        """Remove what was written of a snapshot that did not come about."""
        self._remove(number)

    def _remove(self, number: int, needed: Iterable[str] = ()) -> None:
        """Remove a snapshot: its manifest first, then its files except those needed. What cannot be removed stays."""
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
    """A snapshot that was found whole."""

    directory: Path
    manifest: SnapshotManifest

    def __str__(self) -> str:
        return f"{self.directory / folder_name(self.manifest.number)}"


def read_newest(directory: str | os.PathLike[str], warn: Callable[[str], None] = lambda text: None) -> Snapshot:
    """Return the newest snapshot of a directory whose files are all there and undamaged.

    `warn` is told of each newer one that is not, with the checksum found. Raises ModelError if none is whole.
    """
    path = Path(directory)
    numbers = [number for number in numbers_in(path) if (path / folder_name(number) / MANIFEST).exists()]
    if not numbers:
        raise ModelError(f"{path} holds no whole snapshot to resume from")
    whole: set[str] = set()
    reasons: dict[int, str] = {}
    for number in reversed(numbers):
        try:
            manifest = read_snapshot(path, number)
            _check_files(path, manifest, whole)
        except ModelError as error:
            reasons[number] = str(error)
            continue
        for newer, reason in reasons.items():
            warn(f"{folder_name(newer)} is not used, {folder_name(number)} is: {reason}")
        return Snapshot(path, manifest)
    raise ModelError(f"{path} holds no whole snapshot to resume from: {'; '.join(reasons.values())}")


def _check_files(directory: Path, manifest: SnapshotManifest, whole: set[str]) -> None:
    """Raise ModelError unless a snapshot's files are whole; those that are known to be are not read again."""
    parts = {part.file: part for table in manifest.tables for part in table.parts}
    unknown = [part for file, part in parts.items() if file not in whole]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="paceline-snapshot") as pool:
        checks = [(part, pool.submit(_check_part, directory, part)) for part in unknown]
        try:
            for part, check in checks:
                check.result()
                whole.add(part.file)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _check_part(directory: Path, part: StoredPart) -> None:
    read_part(directory, part, _WHOLE)


def read_buckets(
    directory: Path, part: StoredPart, wanted: Buckets, *, with_passes: bool = False
) -> list[tuple[int, Keys, Floats]]:
    """Return the keys and records of each wanted bucket of a part that has rows. Raises as :func:`read_part`.

    The number of the pass that records may end with is left out, unless they are asked for `with_passes`.
    """
    keys, records = read_part(directory, part, _WHOLE)
    if part.has_passes and not with_passes:
        records = np.ascontiguousarray(records[:, :-1])
    found, at = [], 0
    for bucket, rows in zip(part.buckets, part.rows, strict=True):
        if wanted >> bucket & 1 and rows:
            found.append((bucket, keys[at : at + rows], records[at : at + rows]))
        at += rows
    return found
