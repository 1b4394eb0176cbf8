"""Fuzz models, snapshots and caches with wrong contents and valid checksums."""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from paceline.data.batch import Batch
from paceline.data.binary.blocks import TRAILER
from paceline.data.binary.cache import ShardCache
from paceline.data.streams import stat_file
from paceline.errors import PacelineError
from paceline.ps import SGD, Adagrad, Zeros, messages, read_model
from paceline.storage.format import MANIFEST, PartUse, SnapshotManifest, StoredTable, digest_of, write_manifest
from paceline.storage.model_directory import save_model
from paceline.storage.parts import PartBuffer, read_part, write_part
from paceline.storage.snapshot_directory import folder_name, read_snapshot
from paceline.tables.settings import to_fields

from .listening import Episode, FoundError
from .mutations import Frame

SPARSE = messages.TableSpec(
    name="s", kind="sparse", dim=2, update=to_fields(Adagrad(lr=0.5)), initializer=to_fields(Zeros())
)
DENSE = messages.TableSpec(
    name="d", kind="dense", size=10, update=to_fields(SGD(lr=0.5)), initializer=to_fields(Zeros())
)


class FilesEpisode(Episode):
    """A process that loads a model, resumes from a snapshot, or reads a cache."""

    name = "files"
    weight = 1

    async def begin(self) -> None:
        self.last: list[bytes] = []
        self._make_model()
        self._make_snapshot()
        self._make_cache()

    def _make_model(self) -> None:
        self.model = self.folder / "model"
        keys = np.arange(3, dtype=np.uint64)
        pieces: Any = [(SPARSE, [(keys, np.ones((3, 4), np.float32))]), (DENSE, [(keys, np.ones((3, 1), np.float32))])]
        save_model(self.model, pieces, {"model": "lr"}, {"optimizer": b"\0" * 8})
        self.manifest = json.loads((self.model / MANIFEST).read_bytes())
        self.part = self.model / self.manifest["tables"][0]["uses"][0]["part"]["file"]
        self.part_data = self.part.read_bytes()

    def _make_snapshot(self) -> None:
        self.snapshots = self.folder / "snapshots"
        (self.snapshots / folder_name(1)).mkdir(parents=True)
        gathered = PartBuffer(64)
        gathered.begin(4)
        for bucket in (3, 5):
            gathered.add(np.arange(2, dtype=np.uint64), np.ones((2, 4), np.float32), bucket)
        part = write_part(self.snapshots, f"{folder_name(1)}/s0-t1-00000.safetensors", "s", gathered)
        table = StoredTable(spec=SPARSE, rows=4, uses=(PartUse(part=part, buckets=(3, 5)),))
        manifest = SnapshotManifest(number=1, full=True, iteration=None, tables=(table,), training={"model": "lr"})
        write_manifest(self.snapshots / folder_name(1), manifest)
        self.snapshot_manifest = msgspec.to_builtins(manifest)

    def _make_cache(self) -> None:
        source = self.folder / "data.txt"
        source.write_text("x")
        self.source = str(source)
        self.cache = ShardCache(self.folder / "cache", {"format": "libsvm"})
        writer = self.cache.writer(self.source, stat_file(self.source), 0)
        for indptr in ([0, 2, 4], [0, 1, 4]):
            writer.append(
                Batch(np.ones(2, np.float32), np.array(indptr), np.arange(4, dtype=np.uint64), np.ones(4, np.float32))
            )
        writer.commit(1)
        self.cache_path = self.cache.path_of(self.source, 0)
        self.cache_data = self.cache_path.read_bytes()

    def feed(self) -> int:
        choice = self.random.random()
        if choice < 0.4:
            self._read_model()
        elif choice < 0.7:
            self._read_snapshot()
        else:
            self._read_cache()
        return 1

    def _altered(self, tree: Any) -> Any:
        frame = Frame(0, json.loads(msgspec.json.encode(tree)))
        for _ in range(self.random.randrange(3)):
            if not isinstance(frame.meta, bytes):
                self.mutator.alter_tree(frame)
        return frame.meta

    def _write(self, path: Path, tree: Any) -> None:
        if isinstance(tree, dict):
            tree = json.loads(msgspec.json.encode({key: value for key, value in tree.items() if key != "sha256"}))
            tree["sha256"] = digest_of(tree)
        text = msgspec.json.encode(tree)
        if self.random.random() < 0.05:
            text = self.random.choice((text[: self.random.randrange(len(text))], b"[" * 100_000, b"", b"{}", b"\xff"))
        self.last = [*self.last[-2:], text]
        path.write_bytes(text)

    def _bytes(self, data: bytes) -> bytes:
        frame = Frame(0, b"", data)
        self.mutator.alter_body(frame)
        return frame.body

    def _read_model(self) -> None:
        manifest, data = self.manifest, self.part_data
        if self.random.random() < 0.4:
            data = self._bytes(data)
            manifest = json.loads(json.dumps(manifest))
            table = manifest["tables"][0]
            part = table["uses"][0]["part"]
            part["num_bytes"], part["sha256"] = len(data), hashlib.sha256(data).hexdigest()
        else:
            manifest = self._altered(manifest)
        self._write(self.model / MANIFEST, manifest)
        self.part.write_bytes(data)
        with contextlib.suppress(PacelineError):
            model = read_model(self.model)
            for table in model.manifest.tables:
                if table.spec.kind == "sparse" and table.spec.dim < 1 << 12:
                    model.load_store(table.spec.name)
                for keys, records in model.records(table):
                    if records.shape != (len(keys), table.spec.record_words):
                        raise FoundError(f"{records.shape} records for {len(keys)} keys of {table.spec}")

    def _read_snapshot(self) -> None:
        self._write(self.snapshots / folder_name(1) / MANIFEST, self._altered(self.snapshot_manifest))
        with contextlib.suppress(PacelineError):
            for table in read_snapshot(self.snapshots, 1).tables:
                for use in table.uses:
                    keys, records = read_part(self.snapshots, use.part, "the snapshot")
                    if records.shape != (len(keys), use.part.words):
                        raise FoundError(f"{records.shape} records for {len(keys)} keys of {use.part}")

    def _read_cache(self) -> None:
        data = self.cache_data
        if self.random.random() < 0.2:
            data = self._bytes(data)
        else:
            length, _, version, magic = TRAILER.unpack(data[-TRAILER.size :])
            body, footer = data[: -TRAILER.size - length], data[-TRAILER.size - length : -TRAILER.size]
            footer = msgspec.json.encode(self._altered(json.loads(footer)))
            self.last = [*self.last[-2:], footer]
            data = body + footer + TRAILER.pack(len(footer), zlib.crc32(footer), version, magic)
        self.cache_path.write_bytes(data)
        shard = self.cache.load(self.source, stat_file(self.source), 0)
        for block in () if shard is None else shard.blocks:
            sizes = len(block.labels) + 1, len(block.keys)
            if (len(block.indptr), block.indptr[-1]) != sizes or (np.diff(block.indptr) < 0).any():
                raise FoundError(f"a cached block leads beyond its keys: {block}")

    def check_now(self) -> None:
        """Do nothing: no other process reads these files."""

    async def end(self) -> None:
        (self.model / MANIFEST).write_text(json.dumps(self.manifest))
        self.part.write_bytes(self.part_data)
        if len(read_model(self.model).load_store("s")) != 3:
            raise FoundError("a complete model was not read")

    def sent(self) -> list[bytes]:
        return self.last
