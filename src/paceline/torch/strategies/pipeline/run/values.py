"""Convert values for messages: a structure of tensors becomes a list of tensors and a description in JSON."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.torch.capture.graph import of_class


def take_apart(value: Any, label: str) -> tuple[Any, list[Tensor]]:
    """Return a description of a value, and its tensors in order. Raises UsageError for a value that cannot be sent."""
    tensors: list[Tensor] = []

    def describe(part: Any) -> Any:
        if isinstance(part, Tensor):
            tensors.append(part)
            return {"t": [str(part.dtype).removeprefix("torch."), list(part.shape), part.requires_grad]}
        if part is None or isinstance(part, (bool, int, float, str)):
            return {"v": part}
        if isinstance(part, torch.Size):
            return {"s": list(part)}
        if isinstance(part, torch.dtype):
            return {"y": str(part).removeprefix("torch.")}
        if isinstance(part, torch.device):
            return {"c": str(part)}
        is_structure = isinstance(part, (tuple, dict)) or dataclasses.is_dataclass(part)
        if is_structure and not isinstance(part, type) and type(part) not in (tuple, dict):
            plain = tuple(part) if isinstance(part, tuple) else _fields(part)
            return {"n": [type(part).__module__, type(part).__qualname__, describe(plain)]}
        if isinstance(part, (tuple, list)):
            return {"l" if isinstance(part, list) else "u": [describe(item) for item in part]}
        if isinstance(part, dict) and all(isinstance(key, str) for key in part):
            return {"d": {key: describe(item) for key, item in part.items()}}
        raise UsageError(
            f"{label} is of type {type(part).__name__}, which cannot be sent between stages. Use tensors, numbers and "
            "text in tuples, lists and dictionaries, or cut the model elsewhere"
        )

    return describe(value), tensors


def _fields(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return dict(value)
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}


def put_together(description: Any, tensors: Sequence[Tensor]) -> Any:
    return _build(description, iter(tensors))


def tensors_of(description: Any) -> list[tuple[torch.dtype, list[int], bool]]:
    """Return for each tensor of a description: the dtype, the shape, and whether the tensor needs a gradient."""
    (kind, content), *_ = description.items()
    if kind == "t":
        return [(getattr(torch, content[0]), list(content[1]), bool(content[2]))]
    parts = content[2:] if kind == "n" else content if kind in ("l", "u") else content.values() if kind == "d" else ()
    return [meta for part in parts for meta in tensors_of(part)]


def plain_values(description: Any) -> list[Any]:
    """Return the leaves of a described value that are not tensors."""
    (kind, content), *_ = description.items()
    parts = content[2:] if kind == "n" else content if kind in ("l", "u") else content.values() if kind == "d" else None
    if parts is None:
        return [] if kind == "t" else [content]
    return [leaf for part in parts for leaf in plain_values(part)]


def _build(description: Any, tensors: Iterator[Tensor]) -> Any:
    (kind, content), *_ = description.items()
    if kind == "t":
        return next(tensors)
    if kind == "l":
        return [_build(part, tensors) for part in content]
    if kind == "u":
        return tuple(_build(part, tensors) for part in content)
    if kind == "d":
        return {key: _build(part, tensors) for key, part in content.items()}
    if kind == "n":
        return _as_named(content[0], content[1], _build(content[2], tensors))
    if kind == "s":
        return torch.Size(content)
    if kind == "y":
        return getattr(torch, content)
    return torch.device(content) if kind == "c" else content


def _as_named(module: str, name: str, value: Any) -> Any:
    """Convert a tuple or dictionary to class `name` of `module`. Raises UsageError if the class is missing here."""
    kind: Any = sys.modules.get(module)
    for part in name.split("."):
        kind = getattr(kind, part, None)
    is_structure = isinstance(kind, type) and (issubclass(kind, (tuple, dict)) or dataclasses.is_dataclass(kind))
    if not is_structure:
        raise UsageError(
            f"another stage sent a value of the class {module}.{name}, which this process does not have. Define the "
            "class at the top of a module that every process imports"
        )
    if isinstance(value, tuple):
        return kind(*value) if hasattr(kind, "_fields") else kind(value)
    return of_class(kind, value)
