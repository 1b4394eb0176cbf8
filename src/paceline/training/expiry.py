"""Features that passes over the data have not seen for long: their rows are erased between passes."""

from __future__ import annotations

from paceline.models.base import SparseModel, open_tables
from paceline.ps import Client, UpdateRule


class FeatureExpiry:
    """Erases the rows of a model's features that no push has named for `passes` passes; None: no rows.

    Each minibatch pushes gradients of all its features to the first table, so that one tells which were seen; to the
    others it pushes what there is to learn, and counts that are high enough no more. What they have of a feature that
    is not seen is erased with its row in the first. The rows of a network's layers and of the sketch that counts
    features are of no feature, and stay.
    """

    def __init__(self, client: Client, model: SparseModel, rule: UpdateRule, passes: int | None) -> None:
        tables = [] if passes is None else open_tables(client, model, rule)
        by_feature = [table for table, its in zip(tables, model.tables, strict=False) if its.is_by_feature]
        self._first, self._others = by_feature[:1], by_feature[1:]
        self._passes = passes or 1

    def begin(self, number: int, *, are_seen: bool) -> None:
        """Begin to note what is pushed, in pass `number`; `are_seen` says whether rows count as seen in it already."""
        for table in self._first:
            table.begin_pass(number, rows_of=number if are_seen else number - 1)

    def end_pass(self, number: int) -> str:
        """Erase what is seen no more after pass `number`, and begin the next one; return what came of it, for people.

        Nothing is returned if nothing was erased.
        """
        num_erased = 0
        for table in self._first:
            num_erased += table.erase_unseen(self._passes, also=self._others)
            table.begin_pass(number + 1)
        when = "in it" if self._passes == 1 else f"for {self._passes} passes"
        return f"pass {number}: {num_erased:,} features that were not seen {when} are dropped" if num_erased else ""
