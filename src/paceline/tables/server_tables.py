"""The tables of one server, by number."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from paceline.errors import UsageError
from paceline.protocol.buckets import Buckets
from paceline.tables.memory.blocks import RowMemory
from paceline.tables.part import Selection, TablePart
from paceline.tables.rules import RULES
from paceline.tables.settings import from_fields
from paceline.tables.spec import TableSpec
from paceline.tables.staleness import StalenessRecord
from paceline.tables.types import Floats


class ServerTable:
    """A server's part of a table, with its counters and the table's current definition."""

    __slots__ = (
        "declared",
        "dropped",
        "non_finite",
        "part",
        "pulls",
        "pushes",
        "refused",
        "revision",
        "spec",
        "staleness",
    )

    def __init__(self, spec: TableSpec, part: TablePart) -> None:
        self.declared = self.spec = spec  # `spec` has the current hyperparameters, `declared` the original ones
        self.part = part
        self.revision = 0
        """The number of the last change of hyperparameters; 0 before the first change."""
        self.staleness = StalenessRecord()
        self.pushes = self.pulls = self.dropped = self.non_finite = 0
        self.refused: dict[int, str] = {}
        """For each worker, the reason why the sum of an iteration was rejected. It is kept until it is sent."""

    def set_update(self, update: dict[str, Any], revision: int) -> None:
        self.part.set_update(from_fields(RULES, update))
        self.spec, self.revision = self.spec.with_update(update), revision


class Piece(Struct):
    """The part of a push for one table: keys, and a flat array of gradients or records. An erasure has no array."""

    table: int
    selection: Selection
    floats: Floats


class ServerTables:
    """All tables of the server with rank `rank`, and the `memory` for their rows."""

    def __init__(self, rank: int, memory: RowMemory | None = None) -> None:
        self.rank = rank
        self.memory = RowMemory() if memory is None else memory
        self.by_number: dict[int, ServerTable] = {}
        self._erased: dict[int, tuple[int, list[tuple[Buckets, int]]]] = {}  # last erasure of each sender

    def find(self, number: int) -> ServerTable:
        table = self.by_number.get(number)
        if table is None:
            raise UsageError(f"server {self.rank} has no table number {number}. Declare it first")
        return table

    def restrict(self, piece: Piece, buckets: Buckets) -> Piece | None:
        """Return the part of `piece` whose keys are in `buckets`. Return None if no key is in them."""
        selection, floats = self.find(piece.table).part.restrict(piece.selection, piece.floats, buckets)
        if selection is piece.selection:
            return piece
        is_empty = not len(floats if selection.keys is None else selection.keys)
        return None if is_empty else Piece(piece.table, selection, floats)

    def record_erased(self, sender: int, sequence: int, buckets: Buckets, num_rows: int) -> None:
        """Record the number of erased rows, so that a repeated request for this erasure has the same reply."""
        last, parts = self._erased.get(sender, (0, []))
        self._erased[sender] = sequence, [*(parts if last == sequence else ()), (buckets, num_rows)]

    def num_erased(self, sender: int, sequence: int, buckets: Buckets) -> int:
        last, parts = self._erased.get(sender, (0, []))
        return sum(num_rows for part, num_rows in parts if last == sequence and not part & ~buckets)
