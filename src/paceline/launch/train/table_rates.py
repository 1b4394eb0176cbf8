"""The rates of a training's tables, as its schedule has them change."""

from __future__ import annotations

from paceline.models.base import SparseModel, open_tables
from paceline.models.schedules import RatePlan
from paceline.ps import Client, UpdateRule

_LEAST_CHANGE = 0.02  # of the rate: servers are told of no smaller one


class TableRates:
    """Changes the rates of those tables that have the training's update rule. Raises UsageError if it has no rate."""

    def __init__(self, client: Client, model: SparseModel, rule: UpdateRule, plan: RatePlan, most: int) -> None:
        plan.check(rule)
        tables = zip(open_tables(client, model, rule), model.tables, strict=True)
        self._tables = [handle for handle, table in tables if table.update is None]
        self._rule, self._plan, self._most = rule, plan, most
        self._share = 1.0

    def set(self, passes: float) -> None:
        """Have servers take the rate for so many passes that are done, if it is another one by now."""
        share = self._plan.share(passes, self._most)
        if abs(share / self._share - 1) >= _LEAST_CHANGE:
            self._set(share)

    def reset(self) -> None:
        """Have servers take the whole rate again: with it a model is saved, and may be trained further."""
        if self._share != 1:
            self._set(1.0)

    def _set(self, share: float) -> None:
        for table in self._tables:
            table.set_update(self._plan.rule(self._rule, share))
        self._share = share
