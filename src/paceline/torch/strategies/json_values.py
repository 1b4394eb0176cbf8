"""Convert hyperparameters and states to JSON values, and back to the types of the program's own values."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from paceline.errors import UsageError


def to_json(value: Any, where: str) -> Any:
    """Convert hyperparameters, a state or a user's value to JSON. An error calls the value `where`.

    Infinity, NaN, and dictionaries with keys other than text become objects whose only key starts with a dollar sign.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(value)}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [to_json(item, f"{where}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, Mapping):
        items = [(key, to_json(item, f"{where}[{key!r}]")) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
            return dict(items)
        return {"$pairs": [[to_json(key, f"a key of {where}"), item] for key, item in items]}
    raise UsageError(
        f"cannot save {where}, of type {type(value).__name__}: a checkpoint holds numbers, text, lists and dictionaries"
    )


def from_json(value: Any) -> Any:
    """Return the value that :func:`to_json` converted, with lists instead of tuples."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "$float" in value:
        return float(value["$float"])
    if "$pairs" in value:
        return {key: from_json(item) for key, item in value["$pairs"]}
    return {key: from_json(item) for key, item in value.items()}


def like(own: Any, value: Any) -> Any:
    """Convert a saved value to the types of the program's `own` value, at every level: tensors, tuples, counters."""
    if isinstance(own, torch.Tensor):
        return torch.as_tensor(value, dtype=own.dtype, device=own.device)
    if isinstance(own, np.ndarray):
        return np.asarray(value, dtype=own.dtype)
    if isinstance(own, (list, tuple)) and isinstance(value, list):
        found = [like(own_item, item) for own_item, item in itertools.zip_longest(own, value)][: len(value)]
        return tuple(found) if isinstance(own, tuple) else found
    if isinstance(own, Mapping) and isinstance(value, Mapping):
        items = {key: like(own.get(key), item) for key, item in value.items()}
        return Counter(items) if isinstance(own, Counter) else items
    return value
