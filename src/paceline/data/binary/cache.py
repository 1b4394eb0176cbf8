"""Cache parsed shards on disk, so that later passes need not parse text again.

Each shard has one file of blocks, which is renamed when it is complete. A file is replaced if it is truncated, damaged,
from another version of Paceline, or older than its source. Only the user may read the files.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from paceline.data.bad_lines import NUM_KEPT, BadLine
from paceline.data.batch import Batch
from paceline.data.binary.blocks import BlockFile, BlockWriter, bad_line_of, is_count
from paceline.data.streams import FileStatus
from paceline.output_files import process_mark, remove_leftovers

_serial = itertools.count()
_ASIDE = re.compile(r"[0-9a-f]{24}-\d+\.shard\.([0-9a-f]{16})\.\d+\.tmp")
_LEFTOVER_S = 3600.0  # older temporary files are deleted, even if a process in another container writes them


@dataclass(frozen=True, slots=True)
class CachedShard:
    """A cached shard: blocks, bad lines, and the number of shards in the data file (None if unknown)."""

    blocks: list[Batch]
    num_bad: int
    bad: list[BadLine]
    num_shards: int | None


class ShardCache:
    """The cache files of one dataset. Other datasets and processes may use the same folder."""

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder, _ASIDE, _LEFTOVER_S)
        self._folder = folder
        self._identity = identity

    def load(self, path: str, status: FileStatus, shard: int) -> CachedShard | None:
        """Return the parsed shard in new arrays; None if it is not cached for this status of the data file."""
        try:
            with BlockFile(self.path_of(path, shard)) as file:
                return _decode(file, self._describe(path, status, shard))
        except (OSError, ValueError, KeyError, TypeError):  # the cache file is missing or invalid, so parse again
            return None

    def writer(self, path: str, status: FileStatus, shard: int) -> CacheWriter:
        return CacheWriter(self.path_of(path, shard), self._describe(path, status, shard))

    def path_of(self, path: str, shard: int) -> Path:
        text = json.dumps([self._identity, path], sort_keys=True)
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}-{shard}.shard"

    def _describe(self, path: str, status: FileStatus, shard: int) -> dict[str, Any]:
        return {
            **self._identity,
            "path": path,
            "shard": shard,
            "size": status.num_bytes,
            "version": status.version,
        }


class CacheWriter:
    """Writes one shard's cache file block by block. Only :meth:`commit` makes the file visible."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path_of = path
        self._aside = path.with_name(f"{path.name}.{process_mark()}.{next(_serial)}.tmp")
        self._identity = identity
        self._num_bad = 0
        self._bad: list[BadLine] = []
        self._writer = BlockWriter(self._aside, 0o600)

    def add_bad(self, count: int, first: Sequence[BadLine]) -> None:
        self._num_bad += count
        self._bad += first[: NUM_KEPT - len(self._bad)]

    def append(self, batch: Batch) -> None:
        self._writer.append(batch)

    def commit(self, num_shards: int | None) -> None:
        bad = [astuple(line) for line in self._bad]
        self._writer.finish(
            {"identity": self._identity, "num_bad": self._num_bad, "bad": bad, "num_shards": num_shards}
        )
        os.replace(self._aside, self.path_of)

    def discard(self) -> None:
        self._writer.close()
        self._aside.unlink(missing_ok=True)


def _decode(file: BlockFile, identity: dict[str, Any]) -> CachedShard | None:
    """Return a cache file's content; None for another shard. Raises ValueError, KeyError or TypeError."""
    content = file.content
    if content["identity"] != identity:
        return None
    bad = [bad_line_of(line) for line in content["bad"]]
    num_bad, num_shards = content["num_bad"], content["num_shards"]
    if not is_count(num_bad) or not (num_shards is None or is_count(num_shards)):
        return None
    blocks = [block for at in range(len(file.entries)) if (block := file.read(at)) is not None]
    return CachedShard(blocks, num_bad, bad, num_shards) if len(blocks) == len(file.entries) else None
