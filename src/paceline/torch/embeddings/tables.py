"""Define stores of embeddings' rows: in this process, in every rank, or on servers (:mod:`.server_tables`)."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from typing_extensions import override

from paceline.collectives import Group
from paceline.filters import Filter
from paceline.ps import Initializer, SparseStore, UpdateRule, to_fields
from paceline.ps.messages import TableSpec
from paceline.tables.part import check_finite
from paceline.tables.types import Floats, Keys
from paceline.torch.embeddings.distinct import sum_equal_keys

Push = tuple["RowTable", Keys, Floats]
"""A table, distinct keys (uint64 [n]), and the keys' gradients (float32 [n, dim])."""


class RowFilters(NamedTuple):
    """Filters for messages to and from the servers of the rows: the arguments of :meth:`Client.sparse_table`."""

    filters: tuple[Filter, ...] = ()
    pull_filters: tuple[Filter, ...] | None = None


class RowDeclaration(NamedTuple):
    """The settings that must be equal for all embeddings with the same table."""

    dim: int
    """Number of float32 values in a row."""
    update: UpdateRule
    initializer: Initializer
    seed: int
    filters: RowFilters | None = None
    """Filters for messages to and from servers; None: the strategy's filters."""


class RowTicket(Protocol):
    """Rows that were requested and may not have arrived yet."""

    def result(self) -> Floats:
        """Wait for the rows and return them, float32 [n, dim]."""


class RowTable(ABC):
    """A table of rows, by uint64 key. A row exists after its first update."""

    is_shared: bool
    """Whether all ranks share the rows, so that only one rank writes them."""

    @property
    @abstractmethod
    def spec(self) -> TableSpec:
        """The table's specification, with its current update rule."""

    @abstractmethod
    def fetch(self, keys: Keys, *, ahead: bool = False) -> RowTicket:
        """Request the rows of distinct `keys` (uint64 [n]), for this iteration or (`ahead`) for the next iteration."""

    @abstractmethod
    def set_update(self, rule: UpdateRule) -> None:
        """Change the rule's hyperparameters for the next updates."""

    @abstractmethod
    def items(self) -> Iterable[tuple[Keys, Floats]]:
        """Yield all rows in pieces: keys (uint64 [n]), records (float32 [n, words]: the value, then the state)."""

    @abstractmethod
    def write(self, keys: Keys, records: Floats) -> None:
        """Overwrite the values and states of rows, in the format of :meth:`items`."""

    @abstractmethod
    def clear(self) -> None:
        """Erase all rows, so that lookups return initial values again."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""


class RowTables(ABC):
    """A strategy's store for the rows of a model's embeddings."""

    lead: int | None = None
    """Number of iterations between the request of a row and its use; 0: request rows as soon as the previous iteration
    has ended; None: do not prefetch rows, because they can be read without waiting."""

    @abstractmethod
    def table(self, name: str, declared: RowDeclaration) -> RowTable:
        """Return a table of rows."""

    @abstractmethod
    def push(self, pushes: Sequence[Push]) -> None:
        """Apply one iteration's gradients, at most one push per table; every rank calls it in every iteration.

        Raises NonFiniteError for NaN or infinity. In this case the tables do not change.
        """

    def close(self) -> None:  # noqa: B027
        """Release all resources. Idempotent."""


class LocalTable(RowTable):
    """A table whose rows are in this process. Thread-safe."""

    is_shared = False

    def __init__(self, name: str, declared: RowDeclaration) -> None:
        self._initializer = declared.initializer
        self._spec = TableSpec(
            name=name,
            kind="sparse",
            dim=declared.dim,
            update=to_fields(declared.update),
            initializer=to_fields(declared.initializer),
            seed=declared.seed % 2**63,
        ).with_update(to_fields(declared.update))
        self._lock = threading.Lock()
        self._store = self._make(declared.update)

    def _make(self, rule: UpdateRule) -> SparseStore:
        return SparseStore(dim=self._spec.dim, rule=rule, initializer=self._initializer, seed=self._spec.seed)

    @property
    @override
    def spec(self) -> TableSpec:
        return self._spec

    @override
    def fetch(self, keys: Keys, *, ahead: bool = False) -> RowTicket:
        rows = np.empty((len(keys), self._spec.dim), np.float32)
        with self._lock:
            self._store.pull(keys, rows)
        return _LocalRows(rows)

    def apply(self, keys: Keys, grads: Floats) -> None:
        with self._lock:
            self._store.push(keys, grads)

    @override
    def set_update(self, rule: UpdateRule) -> None:
        rule.check_follows(self._store.rule, f"embedding {self._spec.name!r}")
        with self._lock:
            self._store.rule = rule
            self._store.parameters[: len(rule.hyper)] = rule.hyper
        self._spec = self._spec.with_update(to_fields(rule))

    @override
    def items(self) -> Iterable[tuple[Keys, Floats]]:
        return self._store.items()

    @override
    def write(self, keys: Keys, records: Floats) -> None:
        with self._lock:
            self._store.write_records(keys, records)

    @override
    def clear(self) -> None:
        with self._lock:
            self._store = self._make(self._store.rule)

    def __len__(self) -> int:
        return len(self._store)


class _LocalRows:
    """A ticket whose rows are available immediately."""

    __slots__ = ("_rows",)

    def __init__(self, rows: Floats) -> None:
        self._rows = rows

    def result(self) -> Floats:
        return self._rows


class ReplicatedTables(RowTables):
    """Stores every row on every rank of a group. All ranks apply the mean of their gradients, so their rows stay equal.

    Without a group, this process is the only rank. A push needs two all-gathers: one for sizes, and one for keys and
    gradients. Every rank adds the gradients in the order of the ranks, so all ranks have bit-identical rows. A rank
    without a batch pushes nothing; its gradient counts as zero in the mean.
    """

    def __init__(self, group: Group | None = None) -> None:
        self._group = group if group is not None and group.size > 1 else None
        self._tables: dict[str, LocalTable] = {}

    @override
    def table(self, name: str, declared: RowDeclaration) -> LocalTable:
        found = self._tables[name] = LocalTable(name, declared)
        return found

    @override
    def push(self, pushes: Sequence[Push]) -> None:
        if self._group is None:
            for table, _, grads in pushes:
                check_finite(grads.reshape(-1), "this process", table.spec.name)
            for table, keys, grads in pushes:
                assert isinstance(table, LocalTable)
                table.apply(keys, grads)
            return
        by_name = {table.spec.name: (keys, grads) for table, keys, grads in pushes}
        own = [by_name.get(name) for name in self._tables]
        # Check for NaN only after the all-gathers, so that all ranks raise the error. If a rank raised it before, the
        # other ranks would wait for this rank.
        counts = self._group.all_gather(np.array([0 if push is None else len(push[0]) for push in own], np.int64))
        sizes = counts.reshape(self._group.size, len(own))
        words = [2 + table.spec.dim for table in self._tables.values()]
        parts = [
            np.concatenate([push[0].view(np.float32).reshape(-1, 2), push[1].reshape(len(push[0]), -1)], 1).reshape(-1)
            for push in own
            if push is not None
        ]
        packed = np.concatenate(parts) if parts else np.empty(0, np.float32)
        totals = [int(total) for total in sizes @ np.array(words, np.int64)]
        everything = self._group.all_gather(packed.view(np.uint32), sizes=totals).view(np.float32)
        self._apply(everything, sizes.tolist(), words)

    def _apply(self, everything: Floats, sizes: list[list[int]], words: list[int]) -> None:
        gathered: list[list[tuple[int, Floats]]] = [[] for _ in words]
        at = 0
        for rank, counts in enumerate(sizes):
            for number, count in enumerate(counts):
                end = at + count * words[number]
                gathered[number].append((rank, everything[at:end].reshape(count, words[number])))
                at = end
        for table, parts in zip(self._tables.values(), gathered, strict=True):
            for rank, part in parts:
                check_finite(np.ascontiguousarray(part[:, 2:]).reshape(-1), f"rank {rank}", table.spec.name)
        for table, parts in zip(self._tables.values(), gathered, strict=True):
            keys = [np.ascontiguousarray(part[:, :2]).view(np.uint64).reshape(-1) for _, part in parts]
            unique, summed = sum_equal_keys(keys, [part[:, 2:] for _, part in parts], table.spec.dim)
            if len(unique):
                table.apply(unique, summed * np.float32(1.0 / len(sizes)))
