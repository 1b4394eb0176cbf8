"""The weights in a saved model, as arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from paceline.models.base import BIAS_KEY
from paceline.models.stored import StoredModel
from paceline.storage.format import StoredTable
from paceline.tables.types import Floats, Keys


class Weights(NamedTuple):
    """A table's values by feature, and those of the bias."""

    keys: Keys
    """Of features, rising: uint64 [n]."""
    values: Floats
    """float32 [n, dim]."""
    bias: Floats
    """float32 [dim]; zeros where the table has none."""


def read_weights(saved: StoredModel, table: StoredTable) -> Weights:
    """Read a table's weights, without the state of its update rule."""
    return join_weights(saved.records(table), table.spec.dim)


def join_weights(pieces: Iterable[tuple[Keys, Floats]], dim: int) -> Weights:
    """Return the weights in pieces of keys and records, which begin with `dim` values."""
    parts = [(keys, records[:, :dim]) for keys, records in pieces]
    keys = np.concatenate([np.empty(0, np.uint64), *(keys for keys, _ in parts)])
    return split_bias(keys, np.concatenate([np.empty((0, dim), np.float32), *(values for _, values in parts)]))


def split_bias(keys: Keys, values: Floats) -> Weights:
    """Return the weights by rising key (uint64 [n], float32 [n, dim]), the bias apart."""
    order = np.argsort(keys)
    keys, values = keys[order], values[order]
    at = int(np.searchsorted(keys, BIAS_KEY))
    if at < len(keys) and keys[at] == BIAS_KEY:
        return Weights(np.delete(keys, at), np.delete(values, at, axis=0), values[at])
    return Weights(keys, values, np.zeros(values.shape[1], np.float32))
