"""The jobs that workers understand: train on leased shards, or predict them."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.models.weighting import Weighting
from paceline.transport import known


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job for the workers of a cluster. `task` is ``train`` or ``evaluate``.

    `model` is what :meth:`SparseModel.describe` returned, `dataset` a :meth:`Dataset.spec`, `update` the rule of those
    tables for which the model has none of its own.
    """

    task: str
    model: dict[str, Any]
    dataset: dict[str, Any]
    batch_size: int
    update: dict[str, Any]
    consistency: str
    weighting: Weighting = Weighting()


encode = msgspec.json.encode


def decode(data: bytes) -> Job:
    """Return the job that :data:`encode` wrote."""
    return msgspec.json.decode(data, type=known(Job))
