"""The tables of a cluster: numbers, and declared and current settings."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from paceline.errors import TableMismatchError, UsageError
from paceline.protocol.chains import VERSION_GAP
from paceline.ps.messages import KnownTable, TableSpec
from paceline.tables.bounds import MAX_TABLES
from paceline.tables.rules import RULES
from paceline.tables.settings import from_fields


class Tables:
    """The tables of a cluster by name."""

    def __init__(self) -> None:
        self._known: dict[str, KnownTable] = {}

    def declare(self, spec: TableSpec) -> int:
        """Return the number of a table; assign one to a new table. Raises TableMismatchError, and UsageError."""
        known = self._known.get(spec.name)
        if known is None:
            number = 1 + max((table.number for table in self._known.values()), default=0)
            if number > MAX_TABLES:
                raise UsageError(f"a cluster has at most {MAX_TABLES} tables")
            known = self._known[spec.name] = KnownTable(number=number, declared=spec, spec=spec)
        if spec not in (known.declared, known.spec):
            raise TableMismatchError(
                f"table {spec.name!r} was declared as {spec}, and is known as {known.spec}: use the same settings in "
                "every process, or another name"
            )
        return known.number

    def note_update(self, name: str, update: dict[str, object]) -> int:
        """Change the hyperparameters of a table; return the revision. Raises UsageError."""
        known = self._known.get(name)
        if known is None:
            raise UsageError(f"unknown table {name!r}: declare it before its hyperparameters change")
        from_fields(RULES, update).check_follows(from_fields(RULES, known.spec.update), f"table {name!r}")
        spec = known.spec.with_update(update)
        revision = known.revision + 1
        self._known[name] = KnownTable(number=known.number, declared=known.declared, spec=spec, revision=revision)
        return revision

    def restore(self, tables: Iterable[KnownTable]) -> None:
        """Restore the members' tables; the latest revision of a table counts.

        The next revision is far above all reported ones, because dead processes may have had later ones.
        """
        numbers = {known.number for known in self._known.values()}
        for table in tables:
            known = self._known.get(table.spec.name)
            restored = msgspec.structs.replace(table, revision=table.revision + VERSION_GAP)
            is_new = known is None and table.number not in numbers
            if is_new or (known and known.number == table.number and known.revision < restored.revision):
                numbers.add(table.number)
                self._known[table.spec.name] = restored

    @property
    def specs(self) -> list[TableSpec]:
        """The current specs of the tables, by number."""
        return [known.spec for known in sorted(self._known.values(), key=lambda known: known.number)]
