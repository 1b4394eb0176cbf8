"""The jobs that workers understand: train on leased shards, or predict them."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.transport import known

TABLE = "lr"
"""The name of the table that holds the weights."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job for the workers of a cluster. `task` is ``train`` or ``evaluate``; `dataset` a :meth:`Dataset.spec`."""

    task: str
    model: str
    dataset: dict[str, Any]
    batch_size: int
    update: dict[str, Any]
    consistency: str


encode = msgspec.json.encode


def decode(data: bytes) -> Job:
    """Return the job that :data:`encode` wrote."""
    return msgspec.json.decode(data, type=known(Job))
