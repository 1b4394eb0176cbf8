"""Define ``Embedding`` and ``EmbeddingBag``: layers with rows in a sparse table, by key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from paceline.errors import UsageError
from paceline.filters import Filter, FilterChain
from paceline.ps import Initializer, Normal, UpdateRule
from paceline.tables.types import Floats
from paceline.torch.embeddings.distinct import DistinctKeys
from paceline.torch.embeddings.lookup import OnGradient, gather, rows_of
from paceline.torch.embeddings.source import RowSource
from paceline.torch.embeddings.tables import RowFilters

MODES = ("sum", "mean", "max")


class SparseRows(nn.Module):
    """Base class of both layers, with the table's settings and the access to its rows."""

    def __init__(
        self,
        dim: int,
        name: str | None,
        update: UpdateRule | None,
        initializer: Initializer | None,
        seed: int,
        filters: Sequence[Filter] | None,
        pull_filters: Sequence[Filter] | None,
    ) -> None:
        super().__init__()
        layer = type(self).__name__
        if isinstance(dim, bool) or not isinstance(dim, int) or not 1 <= dim <= 1 << 16:
            raise UsageError(f"{layer}(dim={dim!r}): expected a whole number from 1 to 65536")
        if update is not None and not isinstance(update, UpdateRule):
            raise UsageError(f"{layer}(update={update!r}): expected an update rule such as paceline.Adagrad(lr=0.1)")
        if initializer is not None and not isinstance(initializer, Initializer):
            raise UsageError(
                f"{layer}(initializer={initializer!r}): expected an initializer such as paceline.Normal(std=0.01)"
            )
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise UsageError(f"{layer}(seed={seed!r}): expected a whole number")
        if name is not None and (not isinstance(name, str) or not name):
            raise UsageError(f"{layer}(name={name!r}): expected the name of a table, or None for the module's name")
        self.dim = dim
        self.name = name
        self.update = update
        self.initializer = Normal(std=1.0) if initializer is None else initializer
        self.seed = seed
        if filters is None and pull_filters is not None:
            raise UsageError(f"{layer}(pull_filters={pull_filters!r}): pass filters=[...] too")
        self.filters: RowFilters | None = None
        """Filters for messages about the rows; None: the strategy's filters."""
        if filters is not None:
            pulled = None if pull_filters is None else FilterChain(pull_filters).filters
            self.filters = RowFilters(FilterChain(filters).filters, pulled)
        self.anchor = nn.Parameter(torch.empty(0))
        """An empty parameter that represents the module in the autograd graph, in the optimizer and on a device."""
        # Replicas of a model contain shallow copies of the module. The copies share the link, and so the same rows.
        self.link = _TableLink()

    def _fetch(self, keys: torch.Tensor) -> tuple[DistinctKeys, Floats, OnGradient]:
        if not isinstance(keys, torch.Tensor):
            raise UsageError(f"{self._own_name()} was called with a {type(keys).__name__}: expected a tensor of keys")
        source = self.link.source
        if source is None:
            raise UsageError(
                f"{self._own_name()} has no table yet, because the strategy creates it. Call strategy.prepare(model, "
                "optimizer, loader) before using the model"
            )
        found, rows = source.lookup(keys)
        return found, rows, source.gradients.add

    def _own_name(self) -> str:
        return type(self).__name__ if self.name is None else f"{type(self).__name__} {self.name!r}"

    def extra_repr(self) -> str:
        name = "" if self.name is None else f", name={self.name!r}"
        return f"dim={self.dim}{name}"


class _TableLink:
    """A module's access to its table. ``prepare()`` sets it for the module and all its copies."""

    def __init__(self) -> None:
        self.source: RowSource | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _TableLink:
        return _TableLink() if self.source is None else self

    def __reduce__(self) -> tuple[type[_TableLink], tuple[()]]:
        return _TableLink, ()  # pickle without the access to rows: strategy.save() saves them


class Embedding(SparseRows):
    """Like ``torch.nn.Embedding``, but for arbitrary keys, without a vocabulary. The rows are in a sparse table.

    Called with int64 or uint64 keys of any shape ``[*]``, it returns float32 ``[*, dim]`` on its own device. A negative
    int64 key is the same key as the uint64 with the same bits. A row is stored at its first update. Until then, a
    lookup returns the row's initial value from `initializer` (default: standard normal, as in torch), which depends
    only on `seed` and the key.

    `update` is the update rule of the rows, such as ``paceline.Adagrad(lr=0.1)``. The default is the rule of the
    program's optimizer, with the optimizer's current learning rate. A step updates only rows that were looked up, even
    with weight decay and momentum, and Adam counts the updates of each row. `name` is the name of the table, by default
    the module's name in the model. Two modules with the same name share the table. The strategy determines where the
    rows are. Call its ``prepare()`` before the first use.

    If rows are on servers, `filters` apply to pushes and pulls, and `pull_filters` to pulled values, as for
    ``client.sparse_table``. The default is the strategy's filters (``paceline run --filters``).

    Raises UsageError for keys of another dtype, and if ``prepare()`` was not called.
    """

    def __init__(
        self,
        dim: int,
        *,
        name: str | None = None,
        update: UpdateRule | None = None,
        initializer: Initializer | None = None,
        seed: int = 0,
        filters: Sequence[Filter] | None = None,
        pull_filters: Sequence[Filter] | None = None,
    ) -> None:
        super().__init__(dim, name, update, initializer, seed, filters, pull_filters)

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the rows of `keys`."""
        found, rows, on_gradient = self._fetch(keys)
        return gather(self.anchor, found, rows, on_gradient).view(*keys.shape, self.dim)


class EmbeddingBag(SparseRows):
    """Like ``torch.nn.EmbeddingBag``: the sum, mean or maximum of each bag of rows. The rows are in a sparse table.

    Called with keys ``[bags, n]``, or with keys ``[n]`` and `offsets` (int64 ``[bags]``: the start of each bag), it
    returns float32 ``[bags, dim]``. The result for an empty bag is zero. `per_sample_weights` (float, with the keys'
    shape) scales the rows, only in mode ``sum``. For all other settings see :class:`Embedding`.
    """

    def __init__(
        self,
        dim: int,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        name: str | None = None,
        update: UpdateRule | None = None,
        initializer: Initializer | None = None,
        seed: int = 0,
        filters: Sequence[Filter] | None = None,
        pull_filters: Sequence[Filter] | None = None,
    ) -> None:
        super().__init__(dim, name, update, initializer, seed, filters, pull_filters)
        if mode not in MODES:
            raise UsageError(f"EmbeddingBag(mode={mode!r}): expected one of {', '.join(MODES)}")
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self,
        keys: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return one row per bag."""
        self._check(keys, offsets, per_sample_weights)
        per_offsets = offsets is not None
        found, rows, on_gradient = self._fetch(keys)
        if offsets is None and not keys.shape[1]:
            keys, offsets = keys.flatten(), keys.new_zeros(len(keys), dtype=torch.int64)
        if offsets is None and self.mode != "max" and self.anchor.device.type == "cpu":
            key_rows = gather(self.anchor, found, rows, on_gradient).view(*keys.shape, self.dim)
            if per_sample_weights is not None:
                key_rows = key_rows * per_sample_weights.unsqueeze(-1)
            return key_rows.sum(1) if self.mode == "sum" else key_rows.mean(1)
        device = self.anchor.device
        return functional.embedding_bag(
            torch.from_numpy(found.inverse).to(device, torch.int64).view(keys.shape),
            rows_of(self.anchor, found, rows, on_gradient),
            None if offsets is None else offsets.to(device, torch.int64),
            mode=self.mode,
            per_sample_weights=None if per_sample_weights is None else per_sample_weights.to(device),
            include_last_offset=self.include_last_offset and per_offsets,
        )

    def _check(self, keys: Any, offsets: Any, weights: Any) -> None:
        if not isinstance(keys, torch.Tensor):
            return  # forward's lookup raises the error for keys that are not a tensor
        if keys.dim() not in (1, 2):
            raise UsageError(f"{self._own_name()} got keys of shape {list(keys.shape)}: expected [bags, n] or [n]")
        if (keys.dim() == 1) != (offsets is not None):
            expected = "offsets, the start of each bag" if keys.dim() == 1 else "no offsets: every row is a bag"
            raise UsageError(f"{self._own_name()} got keys of shape {list(keys.shape)}: these need {expected}")
        if weights is not None and self.mode != "sum":
            raise UsageError(f"{self._own_name()} has mode {self.mode}: per_sample_weights need mode sum")

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"


def find_embeddings(model: nn.Module) -> dict[str, Embedding | EmbeddingBag]:
    """Return a model's embeddings by name. If the model itself is an embedding, its name is ``embedding``."""
    return {
        name or "embedding": module
        for name, module in model.named_modules()
        if isinstance(module, (Embedding, EmbeddingBag))
    }
