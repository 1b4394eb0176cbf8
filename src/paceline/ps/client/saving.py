"""Tables on disk: safetensors files and a manifest with their checksums.

A model is a directory. Its data files carry a fresh name each time they are written; the manifest, written last, aside
and renamed into place, names those that belong to it. So whatever is interrupted, the directory holds the old model or
the new one, whole. Rows are stored by key, not by server: a model saved from three servers loads into two.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from paceline.errors import ModelError, UsageError
from paceline.ps.client.client import Client
from paceline.ps.client.records import read_records, write_records
from paceline.ps.messages import TableSpec
from paceline.storage.checked_files import FileName, read_checked, read_manifest_text
from paceline.storage.directory_lock import LOCK, DirectoryLock
from paceline.storage.durable_io import make_directory, sync_directory, write_synced
from paceline.tables.bounds import Natural, Sha256
from paceline.tables.rules import INITIALIZERS, RULES, from_fields
from paceline.tables.sparse_store import Floats, Keys, SparseStore
from paceline.transport import known

MANIFEST = "manifest.json"
FORMAT = "paceline-model"
FORMAT_VERSION = 1
_PART_BYTES = 64 << 20
_NOTHING = np.empty(0, np.uint8)
_OURS = re.compile(
    rf"(table\d+-\d{{5}}|tensors-\w+)\.[0-9a-f]{{8}}\.safetensors|\.{re.escape(MANIFEST)}\.[0-9a-f]{{8}}"
)
"""Names of files that a save writes, besides the manifest."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One data file: `keys` uint64 [rows] and `records` float32 [rows, words] (values, then the rule's state)."""

    file: FileName
    rows: Natural
    num_bytes: Natural
    sha256: Sha256


class SavedTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table of a saved model."""

    spec: TableSpec
    rows: Natural
    parts: tuple[Part, ...]


class TensorFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of named tensors."""

    file: FileName
    num_bytes: Natural
    sha256: Sha256


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a saved model consists of; `model` is the description of whoever saved it."""

    format: str
    version: int
    paceline: str
    tables: tuple[SavedTable, ...]
    tensors: dict[str, TensorFile] = {}
    """Files of named tensors (a PyTorch model's, its optimizer's), by what they are."""
    model: dict[str, Any] = {}


@dataclass(frozen=True)
class SavedModel:
    """A model on disk whose manifest has been read."""

    directory: Path
    manifest: Manifest

    def table(self, name: str) -> SavedTable:
        """Return a table by name; raise ModelError if there is none."""
        for table in self.manifest.tables:
            if table.spec.name == name:
                return table
        raise ModelError(f"the model in {self.directory} has no table {name!r}")

    def records(self, table: SavedTable) -> Iterator[tuple[Keys, Floats]]:
        """Yield the keys and records of a table, file by file, checksums verified."""
        from safetensors import SafetensorError
        from safetensors.numpy import load

        for part in table.parts:
            try:
                tensors = load(self.read(part))
            except (SafetensorError, ValueError, KeyError) as error:
                raise ModelError(f"{self.directory / part.file} is no file of tensors: {error}") from None
            keys, records = tensors.get("keys", _NOTHING), tensors.get("records", _NOTHING)
            words = table.spec.record_words
            is_as_said = keys.shape == (part.rows,) and records.shape == (part.rows, words)
            if not is_as_said or str(keys.dtype) != "uint64" or str(records.dtype) != "float32":
                raise ModelError(
                    f"{self.directory / part.file} does not hold what the manifest says, {part.rows} rows of {words} "
                    f"float32 for table {table.spec.name!r}: take another copy of the model"
                )
            yield keys, records

    def load_store(self, name: str) -> SparseStore:
        """Return a sparse table as rows in this process."""
        table = self.table(name)
        spec = table.spec
        store = SparseStore(
            dim=spec.dim,
            rule=from_fields(RULES, spec.update),
            initializer=from_fields(INITIALIZERS, spec.initializer),
            seed=spec.seed,
        )
        for keys, records in self.records(table):
            store.write_records(keys, records)
        return store

    def read(self, part: Part | TensorFile) -> bytes:
        """Return a file's content, its checksum verified."""
        return read_checked(self.directory / part.file, part.num_bytes, part.sha256, "the model").tobytes()


def read_model(directory: str | os.PathLike[str]) -> SavedModel:
    """Read a model's manifest. Raises ModelError when there is none, or it is none of ours."""
    folder = Path(directory)
    path = folder / MANIFEST
    text, head = _read_head(path)
    if head.get("version") != FORMAT_VERSION:
        raise ModelError(
            f"{path} has format version {head.get('version')}, this Paceline reads {FORMAT_VERSION}: "
            f"use Paceline {head.get('paceline')}, which wrote it"
        )
    try:
        return SavedModel(folder, msgspec.json.decode(text, type=known(Manifest)))
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise ModelError(f"{path} is damaged: {error}") from None


def _read_head(path: Path) -> tuple[bytes, dict[str, Any]]:
    """Return a manifest's text, and its fields as they stand there; raise ModelError if it is none of ours."""
    try:
        text = read_manifest_text(path)
        head = json.loads(text)
    except (FileNotFoundError, NotADirectoryError):
        raise ModelError(f"{path.parent} holds no model: there is no {MANIFEST} in it") from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: {error}") from None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise ModelError(f"{path} is no manifest of a Paceline model")
    return text, head


def save_tables(
    client: Client, directory: str | os.PathLike[str], names: Iterable[str] | None = None, **model: Any
) -> Manifest:
    """Write tables (default: all) of a cluster to a directory, whole or not at all; a model that is there is replaced.

    `model` is kept in the manifest. Raises ModelError if there is no space or no permission; then what was there before
    is untouched. What workers push meanwhile may or may not be part of it.
    """
    wanted = None if names is None else set(names)

    def tables() -> Iterator[tuple[TableSpec, Iterator[tuple[Keys, Floats]]]]:
        for spec in client.tables():
            if wanted is None or spec.name in wanted:
                yield spec, read_records(client, spec)

    return save_model(directory, tables(), model)


def save_model(
    directory: str | os.PathLike[str],
    tables: Iterable[tuple[TableSpec, Iterable[tuple[Keys, Floats]]]],
    model: dict[str, Any],
    tensors: dict[str, bytes] | None = None,
) -> Manifest:
    """Write a model of tables (each with its keys and records, in pieces) and of files of tensors, as safetensors.

    It is there whole or not at all; errors as :func:`save_tables`. Raises UsageError while another process saves there.
    """
    from paceline.version import __version__

    folder = Path(directory)
    generation = secrets.token_hex(4)
    written: list[Path] = []
    made: list[Path] = []
    lock: DirectoryLock | None = None
    try:
        msgspec.json.encode(model)
    except (TypeError, ValueError) as error:
        raise UsageError(f"what is to be kept in the manifest is not fit for JSON: {error}") from None
    try:
        made = prepare_directory(folder)
        lock = DirectoryLock.take(folder)
        manifest = Manifest(
            format=FORMAT,
            version=FORMAT_VERSION,
            paceline=__version__,
            tables=tuple(
                _save_table(folder, spec, pieces, number, generation, written)
                for number, (spec, pieces) in enumerate(tables)
            ),
            tensors={
                name: _write_tensors(folder / f"tensors-{name}.{generation}.safetensors", data, written)
                for name, data in (tensors or {}).items()
            },
            model=model,
        )
        aside = folder / f".{MANIFEST}.{generation}"
        written.append(aside)
        write_synced(aside, msgspec.json.format(msgspec.json.encode(manifest), indent=2))
        os.replace(aside, folder / MANIFEST)
    except BaseException as error:
        for path in written:
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
            f"the model is saved in {folder}, but may not outlast a crash of this machine: {error.strerror or error}"
        ) from None
    finally:
        lock.release()
    return manifest


def _remove_former(folder: Path, manifest: Manifest) -> None:
    """Remove the model that was there before, and what an interrupted save has left."""
    kept = {part.file for table in manifest.tables for part in table.parts}
    kept |= {file.file for file in manifest.tensors.values()}
    for path in folder.iterdir():
        if path.name not in kept and _OURS.fullmatch(path.name):
            path.unlink(missing_ok=True)


def load_tables(client: Client, directory: str | os.PathLike[str], names: Iterable[str] | None = None) -> SavedModel:
    """Load tables of a saved model (default: all) into a cluster, whatever its number of servers, state included.

    Raises ModelError for a damaged model, TableMismatchError if the cluster has such a table with other settings.
    """
    model = read_model(directory)
    wanted = None if names is None else set(names)
    for table in model.manifest.tables:
        if wanted is not None and table.spec.name not in wanted:
            continue
        client.open_table(table.spec)
        for keys, records in model.records(table):
            write_records(client, table.spec, keys, records)
    return model


def _save_table(
    folder: Path,
    spec: TableSpec,
    pieces: Iterable[tuple[Keys, Floats]],
    number: int,
    generation: str,
    written: list[Path],
) -> SavedTable:
    parts: list[Part] = []
    waiting: list[tuple[Keys, Floats]] = []
    size = 0

    def flush() -> None:
        nonlocal waiting, size
        if waiting:
            path = folder / f"table{number}-{len(parts):05d}.{generation}.safetensors"
            written.append(path)
            parts.append(_write_part(path, waiting))
            waiting, size = [], 0

    for keys, records in pieces:
        waiting.append((keys, records))
        size += keys.nbytes + records.nbytes
        if size >= _PART_BYTES:
            flush()
    flush()
    return SavedTable(spec=spec, rows=sum(part.rows for part in parts), parts=tuple(parts))


def _write_part(path: Path, waiting: list[tuple[Keys, Floats]]) -> Part:
    from safetensors.numpy import save

    keys = np.concatenate([keys for keys, _ in waiting])
    records = np.concatenate([records for _, records in waiting])
    data = save({"keys": keys, "records": records})
    write_synced(path, data)
    return Part(file=path.name, rows=len(keys), num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def _write_tensors(path: Path, data: bytes, written: list[Path]) -> TensorFile:
    written.append(path)
    write_synced(path, data)
    return TensorFile(file=path.name, num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def prepare_directory(folder: Path) -> list[Path]:
    """Make the directory and those above it, or see that it is empty or a model's; return those made, inmost first."""
    if folder.is_dir():
        if (folder / MANIFEST).exists():
            _read_head(folder / MANIFEST)
        elif any(not _OURS.fullmatch(path.name) and path.name != LOCK for path in folder.iterdir()):
            raise ModelError(f"cannot save a model in {folder}: it holds other files; name an empty or new directory")
        return []
    if folder.exists():
        raise ModelError(f"cannot save a model as {folder}: there is a file of that name")
    return make_directory(folder)


def _cannot_write(folder: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left to save the model in {folder}; a model that was there before is untouched"
    return f"cannot save the model in {folder}: {error.strerror or error}"
