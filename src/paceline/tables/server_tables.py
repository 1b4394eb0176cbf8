"""The tables that one server holds a part of, by number."""

from __future__ import annotations

from typing import Any

from paceline.errors import UsageError
from paceline.tables.memory.blocks import RowMemory
from paceline.tables.rules import RULES
from paceline.tables.settings import from_fields
from paceline.tables.sparse_part import TablePart
from paceline.tables.spec import TableSpec
from paceline.tables.staleness import StalenessRecord


class ServerTable:
    """A table's part, and what happened to it here."""

    __slots__ = ("declared", "dropped", "non_finite", "part", "pulls", "pushes", "refused", "spec", "staleness")

    def __init__(self, spec: TableSpec, part: TablePart) -> None:
        self.declared = self.spec = spec  # which differ where hyperparameters were changed
        self.part = part
        self.staleness = StalenessRecord()
        self.pushes = self.pulls = self.dropped = self.non_finite = 0
        self.refused: dict[int, str] = {}
        """Why the sum of an iteration was refused, for each worker that was part of it and was not told yet."""

    def set_update(self, update: dict[str, Any]) -> None:
        """Take other hyperparameters of the same rule."""
        self.part.set_update(from_fields(RULES, update))
        self.spec = self.spec.with_update(update)


class ServerTables:
    """All tables of the server of rank `rank`, and the `memory` of their rows."""

    def __init__(self, rank: int, memory: RowMemory | None = None) -> None:
        self.rank = rank
        self.memory = RowMemory() if memory is None else memory
        self.by_number: dict[int, ServerTable] = {}

    def find(self, number: int) -> ServerTable:
        """Return a table. Raises UsageError if it was not created here."""
        table = self.by_number.get(number)
        if table is None:
            raise UsageError(f"server {self.rank} has no table number {number}: declare it first")
        return table
