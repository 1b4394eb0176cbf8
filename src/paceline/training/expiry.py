"""Erase the rows of features that have not occurred for several passes."""

from __future__ import annotations

from paceline.models.base import SparseModel, open_tables
from paceline.ps import Client, UpdateRule


class FeatureExpiry:
    """Erases the rows of features without a push in the last `passes` passes; None erases no rows.

    Each minibatch pushes gradients for all its features to the model's first table, so this table shows which features
    occur. The other tables do not receive every feature, so their rows are erased together with the row in the first
    table. Rows without a feature (layers of a network, the sketch that counts features) remain.
    """

    def __init__(self, client: Client, model: SparseModel, rule: UpdateRule, passes: int | None) -> None:
        tables = [] if passes is None else open_tables(client, model, rule)
        by_feature = [
            table for table, parameters in zip(tables, model.tables, strict=False) if parameters.is_by_feature
        ]
        self._first, self._further = by_feature[:1], by_feature[1:]
        self._passes = passes or 1

    def begin(self, number: int, *, are_seen: bool) -> None:
        """Start to record the keys pushed in pass `number`. If `are_seen`, existing rows are treated as pushed."""
        for table in self._first:
            table.begin_pass(number, rows_of=number if are_seen else number - 1)

    def end_pass(self, number: int) -> str:
        """Erase expired rows after pass `number` and start the next pass. Return a line for the user, or ""."""
        num_erased = 0
        for table in self._first:
            num_erased += table.erase_unseen(self._passes, also=self._further)
            table.begin_pass(number + 1)
        when = "in it" if self._passes == 1 else f"for {self._passes} passes"
        return f"pass {number}: {num_erased:,} features without an occurrence {when} are dropped" if num_erased else ""
