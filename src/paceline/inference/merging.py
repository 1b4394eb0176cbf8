"""Merge linear models trained on different data by averaging their weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.data.key_scaling import read_key_scaling
from paceline.errors import UsageError
from paceline.inference.weights import LINEAR_MODELS, read_weights
from paceline.models.base import BIAS_KEY
from paceline.models.stored import StoredModel, read_stored_model
from paceline.storage.model_directory import save_model
from paceline.tables.rules import FTRL, RULES
from paceline.tables.settings import from_fields
from paceline.tables.types import Doubles, Floats, Keys

_NEUTRAL = {"offset": 0.0, "center": 0.0, "scale": 1.0, "mean": 1.0}
"""Constants of models, with the values that have no effect. The merged weights contain the constants' effect."""
_PER_MODEL = ("finished", "scaling", *_NEUTRAL)


def merge_models(
    directories: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], shares: Sequence[float] | None = None
) -> int:
    """Write the mean of linear models of one kind to `out`, and return its number of features.

    `shares` weights the models, for example by their numbers of examples; None weights them equally. A feature that is
    missing in a model counts as 0 (parameter averaging: McDonald, Hall, Mann, NAACL 2010). FTRL's sums of squares are
    added: a training that continues from the mean (``--init-from``) has the same learning rates as after all the data.
    Raises UsageError for models that cannot be averaged.
    """
    if len(directories) < 2:
        raise UsageError(f"got one model, {directories[0]}: merge needs two or more")
    counts = np.array([1.0] * len(directories) if shares is None else list(shares))
    if len(counts) != len(directories) or not np.isfinite(counts).all() or (counts <= 0).any():
        raise UsageError(f"shares {', '.join(map(str, shares or ()))}: expected {len(directories)} numbers above 0")
    models = [read_stored_model(directory) for directory in directories]
    rule = _check(models)
    weights = [read_weights(model, model.tables[0]) for model in models]
    keys: Keys = np.unique(np.concatenate([*(parts.keys for parts in weights), np.array([BIAS_KEY], np.uint64)]))
    mean, squares = np.zeros((2, len(keys), weights[0].values.shape[1]))
    for model, part, share in zip(models, weights, counts / counts.sum(), strict=True):
        at = np.searchsorted(keys, part.keys)
        mean[at] += share * part.values
        mean[np.searchsorted(keys, np.uint64(BIAS_KEY))] += share * part.bias
        _add_squares(model, keys, squares)
    scaling = read_key_scaling(models[0].described)
    keeps = scaling is not None and not scaling.is_linear
    described = {**models[0].described, "finished": True, "scaling": scaling.spec() if scaling and keeps else None}
    described |= {name: value for name, value in _NEUTRAL.items() if name in described}
    save_model(out, [(models[0].tables[0].spec, [(keys, _records(mean, squares, rule))])], described)
    return len(keys) - 1


def _check(models: Sequence[StoredModel]) -> FTRL:
    first = models[0]
    for model in models:
        kind = model.described.get("kind")
        if kind not in LINEAR_MODELS or len(model.tables) != 1:
            raise UsageError(f"{model.directory} is of kind {kind!r}: only {', '.join(LINEAR_MODELS)} can be averaged")
        for name in sorted({*first.described, *model.described} - {*_PER_MODEL}):
            if first.described.get(name) != model.described.get(name):
                difference = name
                if name != "columns":
                    difference += f", {_shown(first.described, name)} and {_shown(model.described, name)}"
                raise UsageError(
                    f"{first.directory} and {model.directory} differ in {difference}. Train one of them from the other "
                    "with --init-from, so that both have the same value"
                )
    _check_scalings(models)
    rule = from_fields(RULES, first.tables[0].spec.update)
    if not isinstance(rule, FTRL):
        raise UsageError(f"{first.directory} was trained by {type(rule).__name__}: merge needs models of FTRL")
    return rule


def _check_scalings(models: Sequence[StoredModel]) -> None:
    """Raise UsageError for models with different nonlinear scales, whose weights cannot be converted."""
    scalings = [read_key_scaling(model.described) for model in models]
    if all(scaling is None or scaling.is_linear for scaling in scalings):
        return
    digests = [None if scaling is None else scaling.digest() for scaling in scalings]
    other = next((model for model, digest in zip(models, digests, strict=True) if digest != digests[0]), None)
    if other is not None:
        raise UsageError(
            f"{models[0].directory} and {other.directory} have different logarithms or bins of numbers. Train one "
            "from the other with --init-from, or all with --numeric-scale standard"
        )


def _shown(described: Mapping[str, Any], name: str) -> str:
    text = str(described.get(name))
    return text if len(text) < 80 else f"{text[:80]}…"


def _add_squares(model: StoredModel, keys: Keys, squares: Doubles) -> None:
    dim = squares.shape[1]
    for piece_keys, records in model.records(model.tables[0]):
        squares[np.searchsorted(keys, piece_keys)] += records[:, FTRL.squares * dim : (FTRL.squares + 1) * dim]


def _records(mean: Doubles, squares: Doubles, rule: FTRL) -> Floats:
    """Return FTRL's records: the weights, the sums z (computed from the weights) and the sums of squares n."""
    z = -(np.sign(mean) * rule.l1 + mean * ((rule.beta + np.sqrt(squares)) / rule.alpha + rule.l2))
    records: Floats = np.hstack([mean, z, squares]).astype(np.float32)
    return records
