"""Read models on disk: saved models, and the newest snapshot of a training."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ModelError
from paceline.observe.work import track
from paceline.protocol.buckets import bucket_set
from paceline.storage.format import MANIFEST, StoredTable
from paceline.storage.model_directory import SavedModel, fill_store, read_model
from paceline.storage.snapshot_directory import folder_name, numbers_in, read_buckets, read_newest
from paceline.tables.sparse_store import SparseStore
from paceline.tables.types import Floats, Keys


@dataclass(frozen=True)
class StoredModel:
    """A model on disk, represented by its manifest."""

    directory: Path
    described: dict[str, Any]
    """The manifest's description: kind, settings, format and columns of the data."""
    tables: tuple[StoredTable, ...]
    paceline: str
    """The version of Paceline that wrote the model."""
    saved: SavedModel | None
    """The saved model; None for a snapshot."""

    def records(self, table: StoredTable) -> Iterator[tuple[Keys, Floats]]:
        """Yield the keys and records of a table, and verify checksums."""
        title = f"loading table {table.spec.name}"
        yield from track(self._records(table), title, table.rows, "rows", lambda piece: len(piece[0]))

    def _records(self, table: StoredTable) -> Iterator[tuple[Keys, Floats]]:
        if self.saved is not None:
            yield from self.saved.records(table)
            return
        for use in table.uses:
            for _, keys, records in read_buckets(self.directory, use.part, bucket_set(use.buckets)):
                yield keys, records

    def load_store(self, name: str, *, values_only: bool = False) -> SparseStore:
        """Return a table as a store, with or without the state of its update rule. Raises ModelError if unknown."""
        table = next((candidate for candidate in self.tables if candidate.spec.name == name), None)
        if table is None:
            raise ModelError(f"the model in {self.directory} has no table {name!r}")
        return fill_store(table.spec, self.records(table), num_rows=table.rows, values_only=values_only)


def read_stored_model(directory: str | os.PathLike[str]) -> StoredModel:
    """Read a saved model, or the newest complete snapshot in a directory. Raises ModelError for an unsuitable model."""
    path = Path(directory)
    if not _snapshot_numbers(path):
        saved = read_model(path)
        manifest = saved.manifest
        return StoredModel(path, manifest.model, manifest.tables, manifest.paceline, saved)
    snapshot = read_newest(path).manifest
    dataset = snapshot.training.get("dataset", {})
    columns = {
        name: dataset[name] for name in ("label", "categorical", "numeric", "scales", "is_open") if name in dataset
    }
    described = {
        **snapshot.training.get("model", {}),
        "finished": False,
        "format": dataset.get("source_format", dataset.get("format")),
        "columns": columns if columns.get("label") else None,
        "scaling": dataset.get("scaling"),
    }
    return StoredModel(path, described, snapshot.tables, snapshot.paceline, None)


def find_version(directory: str | os.PathLike[str]) -> str:
    """Return a text that changes if the saved model is replaced or a newer snapshot is complete. Raises ModelError."""
    path = Path(directory)
    numbers = _snapshot_numbers(path)
    if numbers:
        return folder_name(numbers[-1])
    try:
        found = os.stat(path / MANIFEST)
    except OSError:
        read_model(path)  # raises the error
        raise ModelError(f"{path} holds no model") from None
    return f"{found.st_mtime_ns:x}-{found.st_ino:x}"


def _snapshot_numbers(path: Path) -> list[int]:
    return [number for number in numbers_in(path) if (path / folder_name(number) / MANIFEST).exists()]
