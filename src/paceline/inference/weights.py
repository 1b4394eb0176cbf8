"""The weights in a saved model, as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from paceline.data.key_scaling import KeyScaling, read_key_scaling
from paceline.models.base import BIAS_KEY
from paceline.models.stored import StoredModel
from paceline.storage.format import StoredTable
from paceline.tables.types import Floats, Keys

LINEAR_MODELS = ("lr", "regression", "poisson", "softmax")


class Weights(NamedTuple):
    """A table's values by feature, and its bias.

    The weights of linear models apply to unscaled values, unless the scaling has logarithms or bins. All other weights
    apply to scaled values, and each bin has a key. The first table's bias includes the constants that a model adds to
    all margins.
    """

    keys: Keys
    """Keys of the features, ascending: uint64 [n]."""
    values: Floats
    """float32 [n, dim]."""
    bias: Floats
    """float32 [dim]; zeros for a table without a bias."""


def read_weights(saved: StoredModel, table: StoredTable) -> Weights:
    """Read a table's weights, without the state of its update rule."""
    weights = join_weights(saved.records(table), table.spec.dim)
    return weights_of_data(weights, saved.described) if table is saved.tables[0] else weights


def weights_of_data(weights: Weights, described: Mapping[str, Any]) -> Weights:
    """Return a first table's weights for unscaled values. The bias includes the constants in the manifest."""
    scaling = read_key_scaling(described) if described.get("kind") in LINEAR_MODELS else None
    weights = unscaled_weights(weights, scaling, described.get("offset", 0.0))
    if described.get("kind") == "regression":  # a regression learns (label - center) / scale
        scale, center = np.float32(described["scale"]), np.float32(described["center"])
        weights = Weights(weights.keys, weights.values * scale, weights.bias * scale + center)
    elif described.get("kind") == "poisson":
        weights = weights._replace(bias=weights.bias + np.log(np.float32(described["mean"])))
    return weights


def unscaled_weights(weights: Weights, scaling: KeyScaling | None, offset: float) -> Weights:
    """Return a linear model's weights for unscaled values, with the offset added to the bias.

    If the scaling has logarithms or bins, the weights remain those for scaled values.
    """
    values, bias = weights.values, weights.bias + np.float32(offset)
    if scaling is not None and scaling.is_linear:
        values, shift = scaling.unscaled(weights.keys, values)
        bias = bias + shift
    return Weights(weights.keys, values, bias)


def join_weights(pieces: Iterable[tuple[Keys, Floats]], dim: int) -> Weights:
    """Return weights from pieces of keys and records. The first `dim` numbers of a record are its values."""
    parts = [(keys, records[:, :dim]) for keys, records in pieces]
    keys = np.concatenate([np.empty(0, np.uint64), *(keys for keys, _ in parts)])
    return split_bias(keys, np.concatenate([np.empty((0, dim), np.float32), *(values for _, values in parts)]))


def split_bias(keys: Keys, values: Floats) -> Weights:
    """Sort weights by key (uint64 [n], float32 [n, dim]) and separate the bias."""
    order = np.argsort(keys)
    keys, values = keys[order], values[order]
    at = int(np.searchsorted(keys, np.uint64(BIAS_KEY)))
    if at < len(keys) and keys[at] == BIAS_KEY:
        return Weights(np.delete(keys, at), np.delete(values, at, axis=0), values[at])
    return Weights(keys, values, np.zeros(values.shape[1], np.float32))
