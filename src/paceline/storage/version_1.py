"""Models of format version 1 from Paceline 0.1: their parts lack table names and words."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.storage.format import ModelManifest, PartUse, StoredFile, StoredPart, StoredTable
from paceline.tables.bounds import Natural
from paceline.tables.spec import TableSpec


class _Part(StoredFile, frozen=True, kw_only=True):
    rows: Natural


class _Table(msgspec.Struct, frozen=True, kw_only=True):
    spec: TableSpec
    rows: Natural
    parts: tuple[_Part, ...]


class ModelManifest1(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest of a model."""

    paceline: str
    tables: tuple[_Table, ...]
    tensors: dict[str, StoredFile] = {}
    model: dict[str, Any] = {}

    def upgrade(self) -> ModelManifest:
        """Return the model in the current format. Raises UsageError if it is invalid."""
        tables = tuple(StoredTable(spec=old.spec, rows=old.rows, uses=_uses(old)) for old in self.tables)
        return ModelManifest(paceline=self.paceline, tables=tables, tensors=self.tensors, model=self.model)


def _uses(table: _Table) -> tuple[PartUse, ...]:
    parts = (
        StoredPart(
            file=part.file,
            num_bytes=part.num_bytes,
            sha256=part.sha256,
            table=table.spec.name,
            rows=(part.rows,),
            words=table.spec.record_words,
        )
        for part in table.parts
    )
    return tuple(PartUse(part=part) for part in parts)
