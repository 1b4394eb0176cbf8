"""Connect a model's embeddings with their tables during a training: create tables, send updates, prefetch rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.ps import SGD, UpdateRule
from paceline.torch.embeddings.distinct import sum_equal_keys
from paceline.torch.embeddings.gradients import RowGradients
from paceline.torch.embeddings.modules import Embedding, EmbeddingBag
from paceline.torch.embeddings.source import LastKeys, Prefetcher, RowSource
from paceline.torch.embeddings.tables import Push, RowDeclaration, RowTable, RowTables
from paceline.torch.update_rules import rule_of


class Embedder:
    """Creates the embeddings' tables, and sends the embeddings' gradients to them in every optimizer step."""

    def __init__(self, tables: RowTables) -> None:
        self.tables: dict[str, RowTable] = {}
        self._row_tables = tables
        self._sources: list[tuple[RowSource, Optimizer | None]] = []
        self._followers: list[_Follower] = []
        self._prefetcher = None if tables.lead is None else Prefetcher(tables.lead)
        self._hooks: list[Any] = []
        self._declared: dict[str, RowDeclaration] = {}
        self._last_keys = LastKeys()

    def serve(self, embeddings: Mapping[str, Embedding | EmbeddingBag], optimizers: Sequence[Optimizer]) -> None:
        """Create the tables of `embeddings` (by name). Optimizer steps will update the tables.

        An embedding has an anchor, which is an empty parameter. The update rule of its table is the embedding's own
        rule, or else the rule of the optimizer that has the anchor. Without optimizers, rows are only read. Raises
        UsageError for an embedding without own rule whose anchor is in no optimizer, for an optimizer that no rule
        supports, and for two different embeddings with one name.
        """
        first = optimizers[0] if optimizers else None
        for name, module in sorted(embeddings.items()):
            optimizer = next((candidate for candidate in optimizers if _group_of(module, candidate) is not None), first)
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
        declaration = RowDeclaration(module.dim, rule, module.initializer, module.seed, module.filters)
        first = self._declared.setdefault(name, declaration)
        if declaration != first:
            raise UsageError(
                f"two embeddings with the name {name!r} share a table, but differ: {first} and {declaration}. Make "
                "them equal, or give them different names"
            )
        if name not in self.tables:
            table = self._row_tables.table(name, declaration)
            self.tables[name] = table
            if module.update is None and optimizer is not None and group is not None:
                self._followers.append(_Follower(table, optimizer, group, rule))
        return self.tables[name]

    # The following methods are called during the training loop.

    def step_with(self, optimizers: Iterable[Optimizer], step: Callable[[Optimizer], None] | None = None) -> None:
        """Call `step`, by default :meth:`step`, at the end of each step of an optimizer that updates rows."""
        call = step or self.step
        for optimizer in optimizers:
            if any(other is optimizer for _, other in self._sources):
                self._hooks.append(optimizer.register_step_post_hook(lambda stepped, *_: call(stepped)))

    def step(self, optimizer: Optimizer, tick: Callable[[], None] | None = None, *, has_effect: bool = True) -> None:
        """Apply the gradients of the rows that `optimizer` updates. Every rank calls this in every iteration.

        Without `has_effect`, the gradients are dropped. `tick` ends the iteration on the servers. This method calls it
        after sending the gradients. A caller without `tick` must end the iteration itself, and then call
        :meth:`ticked`.
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
        if has_effect:
            self._row_tables.push(pushes)
        if self._prefetcher is not None:
            self._prefetcher.stepped()
        if tick is not None:
            tick()
            self.ticked()

    def ticked(self) -> None:
        """Record that the iteration has ended on the servers, so that rows of the next iteration may be requested."""
        if self._prefetcher is not None:
            self._prefetcher.ticked()

    def begin(self, batch: Any) -> None:
        """Record the batch that the loop computes next. Its lookups show which tensors of a batch contain keys."""
        if self._prefetcher is not None:
            self._prefetcher.begin(batch)

    def prefetch(self, batch: Any) -> None:
        """Request the rows of the following batch (None: no batch) during the computation of the current batch."""
        if self._prefetcher is not None and batch is not None:
            self._prefetcher.prefetch(batch)

    def forget(self) -> None:
        """Drop the prefetched rows, because the tables have been written after the requests."""
        if self._prefetcher is not None:
            self._prefetcher.forget()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._row_tables.close()


class _Follower:
    """Copies an optimizer's hyperparameters to a table's update rule when a scheduler or the program changes them."""

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
        # do not store the group, because loading a checkpoint replaces the groups
        group = self.optimizer.param_groups[self._group]
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
            f"the rows of embedding {name!r} would never be updated, because its anchor is not a parameter of the "
            "optimizer. Pass model.parameters() to the optimizer, or give the embedding a rule, such as "
            "update=paceline.Adagrad(lr=0.1)"
        )
    return rule_of(optimizer, optimizer.param_groups[group])


def _group_of(module: Embedding | EmbeddingBag, optimizer: Optimizer | None) -> int | None:
    for number, group in enumerate(() if optimizer is None else optimizer.param_groups):
        if any(parameter is module.anchor for parameter in group["params"]):
            return number
    return None
