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
    """A table's values by feature, and those of the bias.

    Those of linear models of libsvm data are for values as the data has them, whatever scale they were trained on,
    unless some features are on logarithms or cut into bins; what a model adds to all margins is part of the bias of its
    first table. All others are for values as they were scaled, and bins have keys of their own.
    """

    keys: Keys
    """Of features, rising: uint64 [n]."""
    values: Floats
    """float32 [n, dim]."""
    bias: Floats
    """float32 [dim]; zeros where the table has none."""


def read_weights(saved: StoredModel, table: StoredTable) -> Weights:
    """Read a table's weights, without the state of its update rule."""
    weights = join_weights(saved.records(table), table.spec.dim)
    return weights_of_data(weights, saved.described) if table is saved.tables[0] else weights


def weights_of_data(weights: Weights, described: Mapping[str, Any]) -> Weights:
    """Return a first table's weights, with a linear model's scale of values and what its manifest adds to margins."""
    scaling = read_key_scaling(described) if described.get("kind") in LINEAR_MODELS else None
    weights = unscaled_weights(weights, scaling, described.get("offset", 0.0))
    if described.get("kind") == "regression":  # which learns by how many `scale` a label is above `center`
        scale, center = np.float32(described["scale"]), np.float32(described["center"])
        weights = Weights(weights.keys, weights.values * scale, weights.bias * scale + center)
    elif described.get("kind") == "poisson":
        weights = weights._replace(bias=weights.bias + np.log(np.float32(described["mean"])))
    return weights


def unscaled_weights(weights: Weights, scaling: KeyScaling | None, offset: float) -> Weights:
    """Return the weights of a linear model of values as they were before scaling; the offset is added to the bias.

    Those of a scaling that has logarithms or bins stay for values as they were scaled.
    """
    values, bias = weights.values, weights.bias + np.float32(offset)
    if scaling is not None and scaling.is_linear:
        values, shift = scaling.unscaled(weights.keys, values)
        bias = bias + shift
    return Weights(weights.keys, values, bias)


def join_weights(pieces: Iterable[tuple[Keys, Floats]], dim: int) -> Weights:
    """Return the weights in pieces of keys and records, which begin with `dim` values."""
    parts = [(keys, records[:, :dim]) for keys, records in pieces]
    keys = np.concatenate([np.empty(0, np.uint64), *(keys for keys, _ in parts)])
    return split_bias(keys, np.concatenate([np.empty((0, dim), np.float32), *(values for _, values in parts)]))


def split_bias(keys: Keys, values: Floats) -> Weights:
    """Return the weights by rising key (uint64 [n], float32 [n, dim]), the bias apart."""
    order = np.argsort(keys)
    keys, values = keys[order], values[order]
    at = int(np.searchsorted(keys, np.uint64(BIAS_KEY)))
    if at < len(keys) and keys[at] == BIAS_KEY:
        return Weights(np.delete(keys, at), np.delete(values, at, axis=0), values[at])
    return Weights(keys, values, np.zeros(values.shape[1], np.float32))
