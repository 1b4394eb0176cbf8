"""Gather, write, read and verify parts: the files of rows in models and snapshots.

A part is a safetensors file of `keys` (uint64 [n]) and `records` (float32 [n, words]), in this order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from paceline.errors import ModelError
from paceline.storage.durable_io import read_checked, write_synced
from paceline.storage.format import StoredFile, StoredPart
from paceline.tables.types import Floats, Keys

PART_BYTES: Final = 64 << 20
"""Size limit of a part. Rows that are added together stay in one part."""
_PAGE_BYTES = 4096


class PartBuffer:
    """Gathers the rows of a part. The next part reuses the memory.

    All rows are in two arrays, because each call that hashes or writes an array waits for the interpreter's lock.
    The constructor allocates `num_bytes`. This takes time, so call it in a background thread if other work must not
    wait.
    """

    def __init__(self, num_bytes: int) -> None:
        self._memory = np.empty(num_bytes + num_bytes // 4, np.uint8)  # the last addition may exceed the limit
        self._memory[:num_bytes:_PAGE_BYTES] = 0
        self.begin(1)

    def begin(self, words: int, *, has_passes: bool = False) -> None:
        """Remove all rows. The next records have `words` float32 values. If `has_passes`, the last one is the pass."""
        self.has_passes = has_passes
        self.buckets: list[int] = []
        self.rows: list[int] = []
        self._num_rows = 0
        self._words = words
        self._divide()

    def _divide(self) -> None:
        most = self._memory.nbytes // (8 + 4 * self._words)
        records = self._memory[8 * most : (8 + 4 * self._words) * most]
        self._keys: Keys = self._memory[: 8 * most].view(np.uint64)
        self._records: Floats = records.view(np.float32).reshape(most, self._words)

    @property
    def keys(self) -> Keys:
        return self._keys[: self._num_rows]

    @property
    def records(self) -> Floats:
        return self._records[: self._num_rows]

    @property
    def num_bytes(self) -> int:
        return (8 + 4 * self._words) * self._num_rows

    @property
    def is_full(self) -> bool:
        return self.num_bytes >= PART_BYTES

    def add(self, keys: Keys, records: Floats, bucket: int | None = None) -> None:
        start, stop = self._num_rows, self._num_rows + len(keys)
        if stop > len(self._keys):
            before = self.keys, self.records
            self._memory = np.empty((8 + 4 * self._words) * max(stop + len(keys), 2 * start), np.uint8)
            self._divide()
            self._keys[:start], self._records[:start] = before
        self._keys[start:stop], self._records[start:stop] = keys, records
        self._num_rows = stop
        if bucket is not None:
            self.buckets.append(bucket)
            self.rows.append(len(keys))


def write_part(directory: Path, file: str, table: str, gathered: PartBuffer) -> StoredPart:
    """Write the gathered rows to a file. It is on disk when this function returns. Raises OSError.

    Hashing and writing release the interpreter's lock, so that other threads run.
    """
    # safetensors.numpy.save would create one string while holding the interpreter's lock.
    keys, records = gathered.keys, gathered.records
    head = json.dumps(_layout(*records.shape), separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    buffers = [memoryview(len(head).to_bytes(8, "little") + head)]
    buffers += [memoryview(array).cast("B") for array in (keys, records.reshape(-1)) if array.size]  # type: ignore[arg-type]
    return StoredPart(
        file=file,
        num_bytes=sum(map(len, buffers)),
        sha256=_write(directory / file, buffers),
        table=table,
        buckets=tuple(gathered.buckets),
        rows=tuple(gathered.rows) if gathered.buckets else (len(keys),),
        words=records.shape[1],
        has_passes=gathered.has_passes,
    )


def write_file(directory: Path, file: str, data: bytes) -> StoredFile:
    return StoredFile(file=file, num_bytes=len(data), sha256=_write(directory / file, [memoryview(data)]))


def _write(path: Path, buffers: Sequence[memoryview]) -> str:
    digest = hashlib.sha256()
    for buffer in buffers:
        digest.update(buffer)
    write_synced(path, *buffers)
    return digest.hexdigest()


def read_part(directory: Path, part: StoredPart, owner: str) -> tuple[Keys, Floats]:
    """Return the verified keys (uint64 [n]) and records (float32 [n, words]) of a part.

    `owner` names the model or snapshot in errors. Raises ModelError if the file is damaged, missing or different.
    """
    path, rows = directory / part.file, part.num_rows
    data = read_checked(path, part.num_bytes, part.sha256, owner)
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    try:
        layout = json.loads(data[8:start].tobytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not a safetensors file: {error}") from None
    if layout != _layout(rows, part.words) or start + rows * (8 + 4 * part.words) != part.num_bytes or start % 8:
        raise ModelError(
            f"{path} differs from its manifest, which records {rows} rows of {part.words} float32 for table "
            f"{part.table!r}. Use another copy of {owner}"
        )
    keys = data[start : start + 8 * rows].view(np.uint64)
    return keys, data[start + 8 * rows :].view(np.float32).reshape(rows, part.words)


def _layout(rows: int, words: int) -> dict[str, Any]:
    at = 8 * rows
    return {
        "keys": {"dtype": "U64", "shape": [rows], "data_offsets": [0, at]},
        "records": {"dtype": "F32", "shape": [rows, words], "data_offsets": [at, at + 4 * rows * words]},
    }
