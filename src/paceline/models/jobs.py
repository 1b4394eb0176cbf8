"""The jobs that workers understand: train on leased shards, or predict them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from paceline.filters import Filter, parse_filters
from paceline.models.weighting import Weighting
from paceline.transport import known


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job for the workers of a cluster. `task` is ``train`` or ``evaluate``.

    `model` is what :meth:`SparseModel.describe` returned, `dataset` a :meth:`Dataset.spec`, `update` the rule of those
    tables for which the model has none of its own. `filters` and `pull_filters` (None: the same) are texts of
    :func:`paceline.filters.parse_filters`. A worker mixes the examples of `shards_at_once` shards.
    """

    task: str
    model: dict[str, Any]
    dataset: dict[str, Any]
    batch_size: int
    update: dict[str, Any]
    consistency: str
    weighting: Weighting = Weighting()
    shards_at_once: int = 1
    filters: str = ""
    pull_filters: str | None = None

    def filter_chains(self) -> tuple[Sequence[Filter], Sequence[Filter] | None]:
        """Return the filters, and those of what is pulled; raises UsageError if there are none of these names."""
        pulled = None if self.pull_filters is None else parse_filters(self.pull_filters).filters
        return parse_filters(self.filters).filters, pulled


encode = msgspec.json.encode


def decode(data: bytes) -> Job:
    """Return the job that :data:`encode` wrote."""
    return msgspec.json.decode(data, type=known(Job))
