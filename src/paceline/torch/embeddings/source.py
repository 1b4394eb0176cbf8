"""Fetch the rows of an embedding for a lookup, or prefetch them for the next batch.

The prefetcher learns which tensors of a batch contain keys. A lookup uses prefetched rows only if they are the rows of
exactly its keys. So the only cost of a wrong prediction is a useless request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from paceline.tables.types import Floats, Keys
from paceline.torch.embeddings.distinct import DistinctKeys, keys_of
from paceline.torch.embeddings.gradients import RowGradients
from paceline.torch.embeddings.tables import RowTable, RowTicket

_TENSOR_SIZE = -1


class KeyPlace(NamedTuple):
    """The location of keys in a batch: a view of one of the batch's tensors."""

    leaf: int
    """The tensor's index in the batch."""
    dtype: torch.dtype
    size: tuple[int, ...]
    """The view's shape. A first size of -1 means the tensor's first size, which is smaller in an incomplete batch."""
    stride: tuple[int, ...]
    offset: int
    """Offset from the start of the tensor, in elements."""

    def of(self, leaf: torch.Tensor) -> torch.Tensor:
        """Return the same view of `leaf`, a tensor of another batch. Raises RuntimeError if the tensor is too small."""
        size = (leaf.shape[0], *self.size[1:]) if self.size[:1] == (_TENSOR_SIZE,) else self.size
        return leaf.view(self.dtype).as_strided(size, self.stride, leaf.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True, eq=False)
class _Fetched:
    """Prefetched rows for one expected lookup."""

    place: KeyPlace
    keys: DistinctKeys
    ticket: RowTicket
    requested_in: int
    """The number of the iteration in which the rows were requested."""


class Prefetcher:
    """Requests the next batch's rows, `lead` (0 or 1) iterations before their use. Not thread-safe."""

    def __init__(self, lead: int) -> None:
        self._lead = lead
        self._iteration = 0
        self._leaves: list[torch.Tensor] = []
        self._deferred: Any = None
        self._places: dict[RowSource, list[KeyPlace]] = {}
        self._fetched: dict[RowSource, list[_Fetched]] = {}

    def begin(self, batch: Any) -> None:
        """Record the batch that is computed next. Its lookups show the locations of keys in batches."""
        self._leaves = list(_leaves(batch))

    def prefetch(self, batch: Any) -> None:
        """Request the rows of the following batch, as early as the consistency allows."""
        if self._lead:
            self._request(batch)
        else:
            self._deferred = batch

    def stepped(self) -> None:
        self._iteration += 1

    def ticked(self) -> None:
        batch, self._deferred = self._deferred, None
        if batch is not None:
            self._request(batch)

    def forget(self) -> None:
        self._deferred = None
        self._fetched.clear()

    def find(self, source: RowSource, keys: torch.Tensor, flat: Keys) -> tuple[DistinctKeys, Floats] | None:
        """Return a lookup's rows if they were prefetched; else record the location of its keys and return None."""
        waiting = self._fetched.get(source, [])
        for fetched in waiting:
            if not self._is_late(fetched) and np.array_equal(fetched.keys.flat, flat):
                waiting.remove(fetched)
                return fetched.keys, fetched.ticket.result()
        place = self._place_of(keys)
        if place is not None:
            known = self._places.setdefault(source, [])
            if place not in known:
                known.append(place)
        return None

    def _is_late(self, fetched: _Fetched) -> bool:
        return self._iteration > fetched.requested_in + self._lead

    def _request(self, batch: Any) -> None:
        leaves = list(_leaves(batch))
        distinct: dict[KeyPlace, DistinctKeys | None] = {}
        for source, places in self._places.items():
            waiting = self._fetched.setdefault(source, [])
            for fetched in [fetched for fetched in waiting if self._is_late(fetched)]:
                waiting.remove(fetched)
                if fetched.place in places:  # no lookup used these rows, so this view contains no keys
                    places.remove(fetched.place)
            for place in places:
                if place not in distinct:
                    distinct[place] = _keys_at(place, leaves)
                keys = distinct[place]
                if keys is not None:
                    ticket = source.table.fetch(keys.unique, ahead=bool(self._lead))
                    waiting.append(_Fetched(place, keys, ticket, self._iteration))

    def _place_of(self, keys: torch.Tensor) -> KeyPlace | None:
        storage = keys.untyped_storage().data_ptr()
        for number, leaf in enumerate(self._leaves):
            same_size = leaf.element_size() == keys.element_size()
            if same_size and leaf.untyped_storage().data_ptr() == storage and leaf.device == keys.device:
                size = tuple(keys.shape)
                if leaf.dim() and size and size[0] == leaf.shape[0]:
                    size = (_TENSOR_SIZE, *size[1:])
                offset = int(keys.storage_offset()) - int(leaf.storage_offset())
                return KeyPlace(number, keys.dtype, size, keys.stride(), offset)
        return None


def _keys_at(place: KeyPlace, leaves: list[torch.Tensor]) -> DistinctKeys | None:
    if place.leaf >= len(leaves):
        return None
    try:
        return DistinctKeys(keys_of(place.of(leaves[place.leaf])))
    except RuntimeError:  # the tensor has another shape or dtype than in earlier batches
        return None


def _leaves(batch: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch, in the same order for all batches of the same structure."""
    if isinstance(batch, torch.Tensor):
        if batch.is_sparse or batch.layout is not torch.strided:
            return
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _leaves(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _leaves(value)


class LastKeys:
    """Stores the distinct keys of the last lookup, because several embeddings often receive the same keys."""

    def __init__(self) -> None:
        self._last: DistinctKeys | None = None

    def distinct(self, keys: torch.Tensor) -> DistinctKeys:
        flat, last = keys_of(keys), self._last
        if last is None or not np.array_equal(last.flat, flat):
            last = self._last = DistinctKeys(flat)
        return last


class RowSource:
    """Fetches one embedding's rows, and receives the rows' gradients from backward."""

    def __init__(
        self, table: RowTable, gradients: RowGradients, last_keys: LastKeys, prefetcher: Prefetcher | None
    ) -> None:
        self.table = table
        self.gradients = gradients
        self._last_keys = last_keys
        self._prefetcher = prefetcher

    def lookup(self, keys: torch.Tensor) -> tuple[DistinctKeys, Floats]:
        """Return the distinct keys of a lookup and their rows, float32 [u, dim]."""
        if self._prefetcher is not None:
            found = self._prefetcher.find(self, keys, keys_of(keys))
            if found is not None:
                return found
        distinct = self._last_keys.distinct(keys)
        return distinct, self.table.fetch(distinct.unique).result()
