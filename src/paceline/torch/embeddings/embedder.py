"""What serves a model's embeddings in a training: tables for them, their updates, and rows ahead of time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.ps import SGD, Initializer, UpdateRule
from paceline.torch.embeddings.distinct import sum_equal_keys
from paceline.torch.embeddings.gradients import RowGradients
from paceline.torch.embeddings.modules import Embedding, EmbeddingBag
from paceline.torch.embeddings.source import LastKeys, Prefetcher, RowSource
from paceline.torch.embeddings.tables import Push, RowFilters, RowTable, RowTables
from paceline.torch.update_rules import rule_of


class Embedder:
    """Gives embeddings their tables, and carries their gradients there in every step of their optimizer."""

    def __init__(self, tables: RowTables) -> None:
        self.tables: dict[str, RowTable] = {}
        """Every table by its name."""
        self._row_tables = tables
        self._sources: list[tuple[RowSource, Optimizer | None]] = []
        self._followers: list[_Follower] = []
        self._prefetcher = None if tables.lead is None else Prefetcher(tables.lead)
        self._hooks: list[Any] = []
        self._declared: dict[str, _Declaration] = {}
        self._last_keys = LastKeys()

    def serve(self, embeddings: Mapping[str, Embedding | EmbeddingBag], optimizers: Sequence[Optimizer]) -> None:
        """Give `embeddings` (by name) their tables, which steps of their optimizer update.

        The update rule of a table is the embedding's own, else what the optimizer with its anchor does to that; without
        optimizers rows are only read. Raises UsageError for an embedding without either, for an optimizer
        without a rule, and for two embeddings of one name that differ.
        """
        first = optimizers[0] if optimizers else None
        for name, module in sorted(embeddings.items()):
            optimizer = next((each for each in optimizers if _group_of(module, each) is not None), first)
            group = _group_of(module, optimizer)
            table = self._table_of(name, module, optimizer, group)
            gradients = RowGradients(module.anchor, keeps=group is not None)
            source = RowSource(table, gradients, self._last_keys, self._prefetcher)
            module.link.source = source
            self._sources.append((source, optimizer))

    def _table_of(
        self, name: str, module: Embedding | EmbeddingBag, optimizer: Optimizer | None, group: int | None
    ) -> RowTable:
        rule = _rule_for(name, module, optimizer, group)
        name = module.name or name
        declaration = _Declaration(module.dim, rule, module.initializer, module.seed, module.filters)
        first = self._declared.setdefault(name, declaration)
        if declaration != first:
            raise UsageError(
                f"two embeddings of the name {name!r} share a table, and differ: {first} and {declaration}; make them "
                "equal, or give them different names"
            )
        if name not in self.tables:
            table = self._row_tables.table(name, *declaration)
            self.tables[name] = table
            if module.update is None and optimizer is not None and group is not None:
                self._followers.append(_Follower(table, optimizer, group, rule))
        return self.tables[name]

    # In the loop.

    def step_with(self, optimizers: Iterable[Optimizer], tick: Callable[[], None] | None = None) -> None:
        """Have every step of one of `optimizers` that updates rows end with :meth:`step`."""
        for optimizer in optimizers:
            if any(other is optimizer for _, other in self._sources):
                step = functools.partial(self._step_hook, tick)
                self._hooks.append(optimizer.register_step_post_hook(step))

    def _step_hook(self, tick: Callable[[], None] | None, optimizer: Optimizer, *_: Any) -> None:
        self.step(optimizer, tick)

    def step(self, optimizer: Optimizer, tick: Callable[[], None] | None = None) -> None:
        """Apply the row gradients of `optimizer` that backward has found since ``zero_grad()``.

        `tick` is called when they are on their way: it ends the iteration, where there are servers. Who ends it in
        another way calls :meth:`ticked` after that. Every rank calls this in every iteration, one that has no batch any
        more too.
        """
        for follower in self._followers:
            if follower.optimizer is optimizer:
                follower.follow()
        found: dict[int, tuple[RowTable, list[Any]]] = {}
        for source, other in self._sources:
            gradients = source.gradients.take() if other is optimizer else []
            if gradients:
                found.setdefault(id(source.table), (source.table, []))[1].extend(gradients)
        pushes: list[Push] = []
        for table, gradients in found.values():
            keys, grads = gradients[0]
            if len(gradients) > 1:
                dim = grads.shape[1]
                keys, grads = sum_equal_keys([keys for keys, _ in gradients], [grads for _, grads in gradients], dim)
            pushes.append((table, keys, grads))
        self._row_tables.push(pushes)
        if self._prefetcher is not None:
            self._prefetcher.stepped()
        if tick is not None:
            tick()
            self.ticked()

    def ticked(self) -> None:
        """Know that the iteration has ended on the servers, so that the next one's rows may be asked for."""
        if self._prefetcher is not None:
            self._prefetcher.ticked()

    def begin(self, batch: Any) -> None:
        """Note the batch that the loop is given next. From its lookups is learned which tensors of a batch are keys."""
        if self._prefetcher is not None:
            self._prefetcher.begin(batch)

    def prefetch(self, batch: Any) -> None:
        """Ask for the rows of the batch after that (None: there is none), while this one is computed."""
        if self._prefetcher is not None and batch is not None:
            self._prefetcher.prefetch(batch)

    def forget(self) -> None:
        """Drop rows that were fetched ahead: the tables have been written to since."""
        if self._prefetcher is not None:
            self._prefetcher.forget()

    def close(self) -> None:
        """Let go of the optimizer and of the tables. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._row_tables.close()


class _Declaration(NamedTuple):
    """All that two embeddings of one table must agree about."""

    dim: int
    update: UpdateRule
    initializer: Initializer
    seed: int
    filters: RowFilters | None


class _Follower:
    """Sees to it that a table's rule has the hyperparameters that the optimizer has, which a scheduler changes."""

    def __init__(self, table: RowTable, optimizer: Optimizer, group: int, rule: UpdateRule) -> None:
        self._table = table
        self.optimizer = optimizer
        self._group = group
        self._rule = rule
        self._seen = self._values()

    def follow(self) -> None:
        values = self._values()
        if values != self._seen:
            self._seen = values
            rule = rule_of(self.optimizer, self.optimizer.param_groups[self._group])
            if rule != self._rule:
                self._table.set_update(rule)
                self._rule = rule

    def _values(self) -> list[Any]:
        group = self.optimizer.param_groups[self._group]  # loading a checkpoint puts others in their place
        values = [value for key, value in group.items() if key != "params"]
        return [value.item() if isinstance(value, torch.Tensor) else value for value in values]


def _rule_for(
    name: str, module: Embedding | EmbeddingBag, optimizer: Optimizer | None, group: int | None
) -> UpdateRule:
    if module.update is not None:
        return module.update
    if optimizer is None:
        return SGD(lr=0.0)
    if group is None:
        raise UsageError(
            f"the rows of embedding {name!r} would never be updated: its anchor is not among the optimizer's "
            "parameters; give the optimizer model.parameters(), or the embedding a rule, such as "
            "update=paceline.Adagrad(lr=0.1)"
        )
    return rule_of(optimizer, optimizer.param_groups[group])


def _group_of(module: Embedding | EmbeddingBag, optimizer: Optimizer | None) -> int | None:
    """Return the number of the parameter group that has a module's anchor."""
    for number, group in enumerate(() if optimizer is None else optimizer.param_groups):
        if any(parameter is module.anchor for parameter in group["params"]):
            return number
    return None
