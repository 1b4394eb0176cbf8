"""Features that passes over the data have not seen for long: their rows are erased between passes."""

from __future__ import annotations

from paceline.models.base import SparseModel, open_tables
from paceline.ps import Client, UpdateRule


class FeatureExpiry:
    """Erases the rows of a model's features that no push has named for `passes` passes; None: no rows.

    The rows of tables that count how often features occur stay: they are written in the first pass only.
    """

    def __init__(self, client: Client, model: SparseModel, rule: UpdateRule, passes: int | None) -> None:
        names = {table.name for table in model.parameter_tables}
        tables = [] if passes is None else open_tables(client, model, rule)
        self._tables = [table for table in tables if table.name in names]
        self._passes = passes or 1

    def begin(self, number: int, *, are_seen: bool) -> None:
        """Begin to note what is pushed, in pass `number`; `are_seen` says whether rows count as seen in it already."""
        for table in self._tables:
            table.begin_pass(number, rows_of=number if are_seen else number - 1)

    def end_pass(self, number: int) -> str:
        """Erase what is seen no more after pass `number`, and begin the next one; return what came of it, for people.

        Nothing is returned if nothing was erased.
        """
        erased = [table.erase_unseen(self._passes) for table in self._tables]
        for table in self._tables:
            table.begin_pass(number + 1)
        when = "in it" if self._passes == 1 else f"for {self._passes} passes"
        return f"pass {number}: {erased[0]:,} features that were not seen {when} are dropped" if any(erased) else ""
