"""The definition of a table. Processes declare it, and models and snapshots store it."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from paceline.errors import UsageError
from paceline.tables.initializers import INITIALIZERS
from paceline.tables.rules import RULES
from paceline.tables.settings import from_fields

MAX_NAME: Final = 200
MAX_DIM: Final = 1 << 16
MAX_SIZE: Final = 1 << 40
"""The maximum number of elements of a dense table (4 TiB of values)."""


class TableSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The definition of a table. All declarations of a table name must be equal.

    If hyperparameters were changed during the training, a declaration may have the original or the current
    hyperparameters. The constructor and the decoder raise UsageError for an invalid definition, so that kernels never
    receive invalid sizes.
    """

    name: str
    kind: str
    dim: int = 1
    size: int = 0
    update: dict[str, Any]
    initializer: dict[str, Any]
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= MAX_NAME or not self.name.isprintable():
            raise UsageError(f"table name {self.name[:300]!r}: expected 1 to {MAX_NAME} printable characters")
        if self.kind not in ("sparse", "dense"):
            raise UsageError(f"table {self.name!r} is of kind {self.kind[:99]!r}: expected 'sparse' or 'dense'")
        if not 1 <= self.dim <= MAX_DIM:
            raise UsageError(f"table {self.name!r} has dim={self.dim}: expected a whole number from 1 to {MAX_DIM}")
        if self.kind == "dense":
            if self.dim != 1:
                raise UsageError(f"dense table {self.name!r} has dim={self.dim}: elements of dense tables have dim=1")
            if not 1 <= self.size <= MAX_SIZE:
                raise UsageError(
                    f"dense table {self.name!r} has size={self.size}: expected a positive whole number, at most "
                    f"{MAX_SIZE}"
                )
        elif self.size != 0:
            raise UsageError(f"sparse table {self.name!r} has size={self.size}: expected 0 (no fixed size)")
        rule = from_fields(RULES, self.update)
        if rule.row_dim is not None and (self.kind, self.dim) != ("sparse", rule.row_dim):
            raise UsageError(
                f"table {self.name!r} is {self.kind} with dim={self.dim}: {type(rule).__name__} updates sparse tables "
                f"with dim={rule.row_dim} only"
            )
        from_fields(INITIALIZERS, self.initializer)

    @property
    def record_words(self) -> int:
        rule = from_fields(RULES, self.update)
        return self.dim * (1 + rule.num_states) + rule.has_count

    def with_update(self, update: dict[str, Any]) -> TableSpec:
        travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(update))  # the form in which a process receives it
        return msgspec.structs.replace(self, update=travelled)

    def __str__(self) -> str:
        shape = f"dim={self.dim}" if self.kind == "sparse" else f"size={self.size}"
        rule = ", ".join(f"{key}={value}" for key, value in self.update.items() if key != "kind")
        start = ", ".join(f"{key}={value}" for key, value in self.initializer.items() if key != "kind")
        update = f"{self.update.get('kind')}({rule})"
        return f"{self.kind}({shape}, {update}, {self.initializer.get('kind')}({start}), seed={self.seed})"
