"""The files of snapshots: parts that servers write and read, and the manifest that makes a snapshot of them.

A directory of snapshots holds a folder for each, ``snapshot-000123``. In it lie the parts that servers wrote for it,
safetensors files of `keys` and `records` as in a saved model, bucket after bucket, and ``manifest.json``, which is
written last: a folder without one is no snapshot. An incremental snapshot names parts of earlier folders for the
buckets that have not changed since. Who decides what is written, and when, is :mod:`paceline.ps.client.snapshots`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from paceline.errors import ModelError, UsageError
from paceline.ps.client.saving import MANIFEST
from paceline.ps.messages.snapshots import JobAccount, SnapshotPart
from paceline.storage.checked_files import read_checked, read_manifest_text
from paceline.storage.durable_io import sync_directory, write_synced
from paceline.tables.bounds import Bucket, Natural
from paceline.tables.sparse_store import Floats, Keys
from paceline.tables.spec import TableSpec
from paceline.transport import known

FORMAT = "paceline-snapshot"
FORMAT_VERSION = 1
PART_BYTES = 64 << 20
"""A part is closed when it has so many bytes; one bucket never lies in two."""
_PAGE_BYTES = 4096
_FOLDER = re.compile(r"snapshot-(\d{6,})")


class PartUse(msgspec.Struct, frozen=True, kw_only=True):
    """A part that a snapshot consists of, and which of its buckets are of this snapshot (others were superseded)."""

    part: SnapshotPart
    buckets: tuple[Bucket, ...]

    def __post_init__(self) -> None:
        if not set(self.buckets) <= set(self.part.buckets):
            raise UsageError(f"{self.part.file} does not hold all the buckets that are used of it")


class SnapshotTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table of a snapshot: each of its buckets is used from exactly one part."""

    spec: TableSpec
    rows: Natural
    num_buckets: Natural
    uses: tuple[PartUse, ...]

    def __post_init__(self) -> None:
        used = [bucket for use in self.uses for bucket in use.buckets]
        if len(set(used)) != len(used):
            raise UsageError(f"table {self.spec.name!r} has a bucket twice")
        for part in (use.part for use in self.uses):
            if part.words != self.spec.record_words:
                raise UsageError(f"{part.file} has records of {part.words} float32, table {self.spec} has others")


class SnapshotManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a snapshot consists of, what was done by then, and of what training it is."""

    format: str
    version: int
    paceline: str
    number: Natural
    full: bool
    iteration: Natural | None
    """Sequential consistency: it is the state after so many iterations of that run. Else None: buckets, each consistent
    in itself, were copied one after the other."""
    tables: tuple[SnapshotTable, ...]
    account: JobAccount | None = None
    training: dict[str, Any] = {}


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


# Parts.


class PartBuffer:
    """The buckets of a part, copied together; the memory is used again for the next part.

    In two pieces, however many buckets there are: each call that hashes or writes waits for the interpreter's lock.
    It is made in a thread: the system takes its time to find `num_bytes` of memory.
    """

    def __init__(self, num_bytes: int) -> None:
        self._memory = np.empty(num_bytes + num_bytes // 4, np.uint8)  # a part's last bucket may go beyond
        self._memory[:num_bytes:_PAGE_BYTES] = 0
        self.begin(1)

    def begin(self, words: int) -> None:
        """Forget the buckets; the next ones have records of so many float32."""
        self.buckets: list[int] = []
        self.rows: list[int] = []
        self._num_rows = 0
        self._words = words
        most = self._memory.nbytes // (8 + 4 * words)
        self._keys: Keys = self._memory[: 8 * most].view(np.uint64)
        self._records: Floats = self._memory[8 * most : (8 + 4 * words) * most].view(np.float32).reshape(most, words)

    @property
    def keys(self) -> Keys:
        """Keys of all buckets (uint64 [n])."""
        return self._keys[: self._num_rows]

    @property
    def records(self) -> Floats:
        """Records of all buckets (float32 [n, words])."""
        return self._records[: self._num_rows]

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and records."""
        return (8 + 4 * self._words) * self._num_rows

    def add(self, bucket: int, keys: Keys, records: Floats) -> None:
        """Copy a bucket's keys (uint64 [n]) and records (float32 [n, words])."""
        start, stop = self._num_rows, self._num_rows + len(keys)
        if stop > len(self._keys):
            more = max(start, 2 * len(keys))
            self._keys = np.concatenate([self.keys, np.empty(more, np.uint64)])
            self._records = np.concatenate([self.records, np.empty((more, self._words), np.float32)])
        self._keys[start:stop], self._records[start:stop] = keys, records
        self._num_rows = stop
        self.buckets.append(bucket)
        self.rows.append(len(keys))


def write_part(directory: Path, file: str, table: str, gathered: PartBuffer) -> SnapshotPart:
    """Write buckets, each with its keys and records, as one file, and see it onto the disk.

    It is for a thread of its own: hashing and writing let others run meanwhile. Raises OSError.
    """
    # Not safetensors.numpy.save: it makes one string of all of it, and nobody else can run while it does.
    keys, records = gathered.keys, gathered.records
    layout = {
        "keys": {"dtype": "U64", "shape": [keys.size], "data_offsets": [0, keys.nbytes]},
        "records": {
            "dtype": "F32",
            "shape": records.shape,
            "data_offsets": [keys.nbytes, keys.nbytes + records.nbytes],
        },
    }
    head = json.dumps(layout, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    buffers = [memoryview(len(head).to_bytes(8, "little") + head)]
    buffers += [memoryview(array).cast("B") for array in (keys, records.reshape(-1)) if array.size]  # type: ignore[arg-type]
    digest = hashlib.sha256()
    with open(directory / file, "wb", buffering=0) as out:
        for buffer in buffers:
            digest.update(buffer)
        _write_all(out.fileno(), buffers)
        os.fsync(out.fileno())
    return SnapshotPart(
        file=file,
        table=table,
        buckets=tuple(gathered.buckets),
        rows=tuple(gathered.rows),
        words=records.shape[1],
        num_bytes=sum(map(len, buffers)),
        sha256=digest.hexdigest(),
    )


def _write_all(file: int, buffers: Sequence[memoryview]) -> None:
    for buffer in buffers:
        while buffer:
            buffer = buffer[os.write(file, buffer) :]


def read_part(directory: Path, part: SnapshotPart) -> tuple[Keys, Floats]:
    """Return the keys and records of a part, its checksum verified. Raises ModelError if it is damaged or not there."""
    path = directory / part.file
    data = read_checked(path, part.num_bytes, part.sha256, "the snapshot")
    rows = sum(part.rows)
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    if start + rows * (8 + 4 * part.words) != part.num_bytes or start % 8:
        raise ModelError(f"{path} does not hold what the manifest says, {rows} rows of {part.words} float32")
    keys = data[start : start + 8 * rows].view(np.uint64)
    return keys, data[start + 8 * rows :].view(np.float32).reshape(rows, part.words)


def check_part(directory: Path, part: SnapshotPart) -> None:
    """Raise ModelError unless a part is there and whole."""
    read_part(directory, part)


# Manifests.


def read_manifest(directory: Path, number: int) -> SnapshotManifest:
    """Read a snapshot's manifest. Raises ModelError if there is none, or it cannot be read."""
    path = directory / folder_name(number) / MANIFEST
    try:
        text = read_manifest_text(path)
        head = json.loads(text)
    except (FileNotFoundError, NotADirectoryError):
        raise ModelError(f"{path.parent} is no whole snapshot: there is no {MANIFEST} in it") from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: {error}") from None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise ModelError(f"{path} is no manifest of a snapshot")
    if head.get("version") != FORMAT_VERSION:
        raise ModelError(
            f"{path} has format version {head.get('version')}, this Paceline reads {FORMAT_VERSION}: "
            f"use Paceline {head.get('paceline')}, which wrote it"
        )
    digest = head.pop("sha256", None)
    try:
        manifest = msgspec.convert(head, known(SnapshotManifest))
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise ModelError(f"{path} is damaged: {error}") from None
    found = _digest(manifest)
    if found != digest:
        raise ModelError(f"{path} is damaged: its SHA-256 is {found[:16]}…, it says {str(digest)[:16]}…")
    if manifest.number != number:
        raise ModelError(f"{path} is that of snapshot {manifest.number}, copied into the folder of another one")
    return manifest


def write_manifest(directory: Path, manifest: SnapshotManifest) -> None:
    """Make a snapshot of what its folder holds: from now on it is there. Raises OSError."""
    folder = directory / folder_name(manifest.number)
    fields = {**msgspec.to_builtins(manifest), "sha256": _digest(manifest)}
    aside = folder / f".{MANIFEST}.new"
    write_synced(aside, msgspec.json.format(msgspec.json.encode(fields), indent=1))
    os.replace(aside, folder / MANIFEST)
    for each in (folder, directory):
        sync_directory(each)


def _digest(manifest: SnapshotManifest) -> str:
    return hashlib.sha256(msgspec.json.encode(manifest)).hexdigest()


# What goes.


def remove_folder(directory: Path, number: int, kept: Iterable[str] = ()) -> None:
    """Remove a snapshot: its manifest first, then its parts except those `kept`. What cannot be removed stays."""
    folder, needed = directory / folder_name(number), set(kept)
    with contextlib.suppress(OSError):
        (folder / MANIFEST).unlink(missing_ok=True)
        for path in list(folder.iterdir()):
            if f"{folder.name}/{path.name}" not in needed:
                path.unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()


def files_of(manifests: Iterable[SnapshotManifest]) -> set[str]:
    """Return the files that snapshots consist of."""
    return {use.part.file for manifest in manifests for table in manifest.tables for use in table.uses}


def describe_failure(directory: Path, error: OSError) -> str:
    """Say why a snapshot could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left in {directory}"
    return f"cannot write in {directory}: {error.strerror or error}"
