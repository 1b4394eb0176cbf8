"""Save models, and checkpoints of PyTorch programs, as directories of tables and tensor files.

Each save writes data files with new names. The manifest, which names the model's files, is written last. So after an
interrupted save, the old or the new model is complete. Rows are stored by key, not by server, so a model from three
servers can be loaded into two.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from paceline.errors import ModelError, UsageError
from paceline.storage.directory_lock import LOCK, DirectoryLock
from paceline.storage.durable_io import is_no_space, make_directory, read_checked, sync_directory
from paceline.storage.format import (
    MANIFEST,
    ModelManifest,
    PartUse,
    StoredFile,
    StoredPart,
    StoredTable,
    read_fields,
    read_manifest,
    write_manifest,
)
from paceline.storage.parts import PartBuffer, read_part, write_file, write_part
from paceline.tables.initializers import INITIALIZERS
from paceline.tables.rules import RULES
from paceline.tables.settings import from_fields
from paceline.tables.sparse_store import SparseStore
from paceline.tables.spec import TableSpec
from paceline.tables.types import Floats, Keys

CHECKPOINT: Final = "torch checkpoint"
"""The kind of a model saved by a PyTorch program."""
_FIRST_BYTES = 1 << 20  # initial memory for parts, which grows as needed
_NAME_IN_ERRORS = "the model"
_MODEL_FILE = re.compile(
    rf"(table\d+-\d{{5}}|tensors-\w+)\.[0-9a-f]{{8}}\.safetensors|\.{re.escape(MANIFEST)}\.[0-9a-f]+"
)
"""Names of a saved model's files, except the manifest."""


@dataclass(frozen=True)
class SavedModel:
    """A model on disk with its manifest."""

    directory: Path
    manifest: ModelManifest

    def table(self, name: str) -> StoredTable:
        for table in self.manifest.tables:
            if table.spec.name == name:
                return table
        raise ModelError(f"the model in {self.directory} has no table {name!r}")

    def records(self, table: StoredTable) -> Iterator[tuple[Keys, Floats]]:
        """Yield verified keys and records. Meanwhile a thread reads the next file."""
        with ThreadPoolExecutor(1) as pool:
            ahead: Future[tuple[Keys, Floats]] | None = None
            for part in table.parts:
                read, ahead = ahead, pool.submit(read_part, self.directory, part, _NAME_IN_ERRORS)
                if read is not None:
                    yield read.result()
            if ahead is not None:
                yield ahead.result()

    def load_store(self, name: str) -> SparseStore:
        table = self.table(name)
        files = [self.directory / part.file for part in table.parts]
        num_bytes = sum(file.stat().st_size for file in files if file.exists())
        # The number of rows is untrusted. It is limited by the size of the files: a row needs at least a key and a
        # value.
        return fill_store(table.spec, self.records(table), num_rows=min(table.rows, num_bytes // 12))

    def read(self, file: StoredFile) -> bytes:
        return read_checked(self.directory / file.file, file.num_bytes, file.sha256, _NAME_IN_ERRORS).tobytes()


def fill_store(
    spec: TableSpec, pieces: Iterable[tuple[Keys, Floats]], *, num_rows: int = 0, values_only: bool = False
) -> SparseStore:
    """Allocate a store for `num_rows` rows, and fill it with these rows.

    If `values_only`, the state of the update rule is left out.
    """
    store = SparseStore(
        dim=spec.dim,
        rule=None if values_only else from_fields(RULES, spec.update),
        initializer=from_fields(INITIALIZERS, spec.initializer),
        seed=spec.seed,
    )
    store.make_room_evenly(num_rows)
    for keys, records in pieces:
        store.write_records(keys, np.ascontiguousarray(records[:, : store.row_words]))
    return store


def read_model(directory: str | os.PathLike[str]) -> SavedModel:
    """Read a model's manifest. Raises ModelError if it is missing or not a Paceline model."""
    folder = Path(directory)
    return SavedModel(folder, read_manifest(folder, ModelManifest))


def save_model(
    directory: str | os.PathLike[str],
    tables: Iterable[tuple[TableSpec, Iterable[tuple[Keys, Floats]]]],
    model: dict[str, Any],
    tensors: dict[str, bytes] | None = None,
) -> ModelManifest:
    """Write a model as safetensors: tables, each with keys and records in pieces, and tensor files.

    The write is atomic and replaces an existing model. `model` is stored in the manifest. Raises ModelError if space or
    permission is missing, or if a checkpoint would replace another model or vice versa. After an error, an existing
    model remains intact. Raises UsageError while another process saves to the directory.
    """
    folder = Path(directory)
    generation = secrets.token_hex(4)
    made: list[Path] = []
    lock: DirectoryLock | None = None
    try:
        msgspec.json.encode(model)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the model's description cannot be encoded as JSON: {error}") from None
    try:
        made = prepare_directory(folder, model.get("kind"))
        lock = DirectoryLock.take(folder)
        gathered = PartBuffer(_FIRST_BYTES)
        manifest = ModelManifest(
            tables=tuple(
                _write_table(folder, f"table{number}-{{:05d}}.{generation}.safetensors", spec, pieces, gathered)
                for number, (spec, pieces) in enumerate(tables)
            ),
            tensors={
                name: write_file(folder, f"tensors-{name}.{generation}.safetensors", data)
                for name, data in (tensors or {}).items()
            },
            model=model,
        )
        write_manifest(folder, manifest)
    except BaseException as error:
        for path in folder.glob(f"*.{generation}.safetensors"):
            path.unlink(missing_ok=True)
        if lock is not None:
            lock.release()
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()
        if isinstance(error, OSError):
            raise ModelError(_cannot_write(folder, error)) from None
        raise
    try:
        sync_directory(folder)
        _remove_former(folder, manifest)
    except OSError as error:
        raise ModelError(
            f"the model is saved in {folder}, but may not survive a crash of this machine: {error.strerror or error}"
        ) from None
    finally:
        lock.release()
    return manifest


def _write_table(
    folder: Path, file: str, spec: TableSpec, pieces: Iterable[tuple[Keys, Floats]], gathered: PartBuffer
) -> StoredTable:
    parts: list[StoredPart] = []
    gathered.begin(spec.record_words)

    def write() -> None:
        parts.append(write_part(folder, file.format(len(parts)), spec.name, gathered))
        gathered.begin(spec.record_words)

    for keys, records in pieces:
        gathered.add(keys, records)
        if gathered.is_full:
            write()
    if gathered.num_bytes:
        write()
    rows = sum(part.num_rows for part in parts)
    return StoredTable(spec=spec, rows=rows, uses=tuple(PartUse(part=part) for part in parts))


def _remove_former(folder: Path, manifest: ModelManifest) -> None:
    files = manifest.files
    for path in folder.iterdir():
        if path.name not in files and _MODEL_FILE.fullmatch(path.name):
            path.unlink(missing_ok=True)


def prepare_directory(folder: Path, kind: str | None = None) -> list[Path]:
    """Create a directory for a model of this kind, and its parents. Return the new directories, the innermost first.

    Raises ModelError if the directory has other files, or if a checkpoint would replace another model or vice versa.
    """
    if folder.is_dir():
        if (folder / MANIFEST).exists():
            described = read_fields(folder, ModelManifest).get("model")
            saved_kind = described.get("kind") if isinstance(described, dict) else None
            if CHECKPOINT in (saved_kind, kind) and saved_kind != kind:
                saved, new = (
                    "a PyTorch checkpoint" if name == CHECKPOINT else "a click model" for name in (saved_kind, kind)
                )
                raise ModelError(
                    f"cannot save {new} in {folder}: it holds {saved}, which would be lost. Use another directory, or "
                    "delete this one"
                )
        elif any(not _MODEL_FILE.fullmatch(path.name) and path.name != LOCK for path in folder.iterdir()):
            raise ModelError(f"cannot save a model in {folder}: it contains other files. Use an empty or new directory")
        return []
    if folder.exists():
        raise ModelError(f"cannot save a model as {folder}: a file has that name")
    return make_directory(folder)


def _cannot_write(folder: Path, error: OSError) -> str:
    if is_no_space(error):
        return f"no space left to save the model in {folder}. An existing model in it is unchanged"
    return f"cannot save the model in {folder}: {error.strerror or error}"
