"""Hyperparameters, the state of schedulers and what users add to a checkpoint, as JSON and back."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from paceline.errors import UsageError


def to_json(value: Any, where: str) -> Any:
    """Return hyperparameters, a scheduler's state and the like as JSON: tensors and arrays as numbers.

    Infinity, NaN and keys that are no text, which JSON lacks, become objects whose one key begins with a dollar sign.
    Raises UsageError, which says `where`, for anything else.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(value)}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [to_json(each, f"{where}[{number}]") for number, each in enumerate(value)]
    if isinstance(value, Mapping):
        items = [(key, to_json(each, f"{where}[{key!r}]")) for key, each in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
            return dict(items)
        return {"$pairs": [[to_json(key, f"a key of {where}"), each] for key, each in items]}
    raise UsageError(
        f"cannot save {where}, of type {type(value).__name__}: a checkpoint holds numbers, text, lists and dictionaries"
    )


def from_json(value: Any) -> Any:
    """Return what :func:`to_json` was given, tuples as lists."""
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "$float" in value:
        return float(value["$float"])
    if "$pairs" in value:
        return {key: from_json(each) for key, each in value["$pairs"]}
    return {key: from_json(each) for key, each in value.items()}


def like(own: Any, value: Any) -> Any:
    """Return what was saved in the form that the program has it: tensors, tuples, counters, and all in them."""
    if isinstance(own, torch.Tensor):
        return torch.as_tensor(value, dtype=own.dtype, device=own.device)
    if isinstance(own, (list, tuple)) and isinstance(value, list):
        found = [like(mine, each) for mine, each in itertools.zip_longest(own, value)][: len(value)]
        return tuple(found) if isinstance(own, tuple) else found
    if isinstance(own, Mapping) and isinstance(value, Mapping):
        items = {key: like(own.get(key), each) for key, each in value.items()}
        return Counter(items) if isinstance(own, Counter) else items
    return value
