"""Store rows of embeddings on parameter servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from typing_extensions import override

from paceline.ps import (
    RULES,
    Client,
    SparseTable,
    UpdateRule,
    from_fields,
    read_records,
    to_fields,
    write_records,
)
from paceline.ps.messages import TableSpec
from paceline.tables.types import Floats, Keys
from paceline.torch.embeddings.tables import Push, RowDeclaration, RowFilters, RowTable, RowTables, RowTicket

_NO_FILTERS = RowFilters()


class ClusterTable(RowTable):
    """A sparse table of a cluster."""

    is_shared = True

    def __init__(self, client: Client, table: SparseTable, may_set_update: Callable[[], bool]) -> None:
        self._client = client
        self._table = table
        self._may_set_update = may_set_update

    @property
    @override
    def spec(self) -> TableSpec:
        return self._table.spec

    @override
    def fetch(self, keys: Keys, *, ahead: bool = False) -> RowTicket:
        return self._table.pull_async(keys, assume_unique=True, ahead=int(ahead))

    def push(self, keys: Keys, grads: Floats) -> None:
        """Send the gradients of distinct keys. If the push fails, the client's next ``tick()`` raises the error."""
        self._table.push(keys, grads, assume_unique=True)

    @override
    def set_update(self, rule: UpdateRule) -> None:
        """Change the update rule. Only some ranks send the change to the servers."""
        rule.check_follows(from_fields(RULES, self.spec.update), f"embedding {self.spec.name!r}")
        if self._may_set_update():
            self._table.set_update(rule)
        else:
            self._table.spec = self.spec.with_update(to_fields(rule))

    @override
    def items(self) -> Iterable[tuple[Keys, Floats]]:
        return read_records(self._client, self.spec)

    @override
    def write(self, keys: Keys, records: Floats) -> None:
        write_records(self._client, self.spec, keys, records)

    @override
    def clear(self) -> None:
        for keys, _ in self.items():
            self._table.erase(keys)

    def __len__(self) -> int:
        return len(self._table)


class ClusterTables(RowTables):
    """Stores rows on the servers of a cluster. The strategy ends iterations (``client.tick()``), not this class.

    `filters` apply to messages of embeddings without own filters. If the consistency allows a worker to read rows
    without its own last update (τ ≥ 1), rows are requested one iteration before their use. Otherwise rows are requested
    after the previous iteration has ended.
    """

    def __init__(
        self, client: Client, filters: RowFilters = _NO_FILTERS, may_set_update: Callable[[], bool] | None = None
    ) -> None:
        """`may_set_update` returns whether this rank sends changes of update rules; default: only rank 0."""
        self._client = client
        self._filters = filters
        self._may_set_update = may_set_update or (lambda: client.rank == 0)
        self.lead = 0 if client.consistency.tau == 0 else 1

    @override
    def table(self, name: str, declared: RowDeclaration) -> ClusterTable:
        """Return the table `name`. Raises TableMismatchError if another rank declared it with other settings."""
        pushed, pulled = self._filters if declared.filters is None else declared.filters
        made = self._client.sparse_table(
            name,
            dim=declared.dim,
            update=declared.update,
            initializer=declared.initializer,
            seed=declared.seed,
            filters=pushed,
            pull_filters=pulled,
        )
        table = ClusterTable(self._client, made, self._may_set_update)
        table.set_update(declared.update)  # the table of an earlier training may have another learning rate
        return table

    @override
    def push(self, pushes: Sequence[Push]) -> None:
        """Send the gradients without waiting.

        The cluster's consistency determines whether servers average the gradients over ranks.
        """
        for table, keys, grads in pushes:
            assert isinstance(table, ClusterTable)
            table.push(keys, grads)
