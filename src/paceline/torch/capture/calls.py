"""Represent a call of a model as names and values, and its result as a list of parts."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from paceline.errors import UsageError


@dataclasses.dataclass(frozen=True, slots=True)
class CallArguments:
    """The arguments of a call, as named leaves."""

    values: Mapping[str, Any]
    """The leaves that may differ between calls, such as tensors."""
    constants: Mapping[str, Any]
    fill: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    """A function that returns the arguments of a call with other :attr:`values`, in the same order."""

    @property
    def kind(self) -> str:
        """A text that is equal for two calls with tensors if one graph serves both calls."""
        tensors = [f"{name}={tensor.dtype}{tensor.dim()}" for name, tensor in self.values.items()]
        return ", ".join([*tensors, *self.constants_as_text()])

    def constants_as_text(self) -> list[str]:
        """Return each constant's name and value. Raises UsageError for an object whose text has an address."""
        return [f"{name}={_text_of(name, constant)}" for name, constant in self.constants.items()]


def bind(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_value: Callable[[Any], bool] = lambda leaf: isinstance(leaf, Tensor),
) -> CallArguments:
    """Return the arguments of a call, including defaults. A leaf is a constant unless `is_value`."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    leaves, structure = pytree.tree_flatten(dict(bound.arguments))
    paths, _ = pytree.tree_flatten_with_path(dict(bound.arguments))
    names = [_name(path) for path, _ in paths]
    places = [number for number, leaf in enumerate(leaves) if is_value(leaf)]

    def fill(values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        filled = list(leaves)
        for place, value in zip(places, values, strict=True):
            filled[place] = value
        arguments = pytree.tree_unflatten(filled, structure)
        call = inspect.BoundArguments(bound.signature, {name: arguments[name] for name in bound.arguments})
        return call.args, call.kwargs

    values = {names[place]: leaves[place] for place in places}
    return CallArguments(values, {n: leaf for n, leaf in zip(names, leaves, strict=True) if n not in values}, fill)


def of_class(kind: Any, fields: Mapping[str, Any]) -> Any:
    """Create a dictionary or a dataclass of a class. A defaultdict gets no default, because functions are not sent."""
    if issubclass(kind, defaultdict):
        return kind(None, fields)
    return kind(fields) if not dataclasses.is_dataclass(kind) else kind(**fields)  # type: ignore[operator]


def _text_of(name: str, value: Any) -> str:
    if callable(value) and "<" not in getattr(value, "__qualname__", "<"):
        return f"{value.__module__}.{value.__qualname__}"
    text = repr(value)
    if " at 0x" in text:
        raise UsageError(
            f"the model was called with {name}, an object of type {type(value).__name__}, which a pipeline cannot "
            "compare between calls and processes. Pass tensors, numbers and text, in tuples, lists and dictionaries, "
            "and store an object that all calls share in an attribute of the model (caches: use_cache=False)"
        )
    return text


def _name(path: Sequence[Any]) -> str:
    first, *inner = path
    return f"{first.key}{pytree.keystr(tuple(inner))}"


@dataclasses.dataclass(frozen=True, slots=True)
class OutputForm:
    """The result of a traced forward: nodes inside structures of the forward's own classes."""

    nodes: tuple[Any, ...]
    build: Callable[[Iterator[Any]], Any]

    @property
    def graph_nodes(self) -> list[fx.Node]:
        """The parts that are nodes. Other parts are constants."""
        return [node for node in self.nodes if isinstance(node, fx.Node)]

    def fill(self, value_of: Callable[[fx.Node], Any]) -> Any:
        return self.build(iter([value_of(node) if isinstance(node, fx.Node) else node for node in self.nodes]))


def unfold(value: Any, *, is_whole: bool = True) -> tuple[list[Any], Callable[[Iterator[Any]], Any]]:
    """Return the values in a forward's result, and a function that rebuilds the result from other values.

    Other objects, such as a cache of keys and values, become None; UsageError if the whole result is one.
    """
    if isinstance(value, (Tensor, fx.Proxy, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return [value], next
    if isinstance(value, dict):
        return _unfolded(list(value.values()), lambda parts: _dict_like(value, dict(zip(value, parts, strict=True))))
    if isinstance(value, (tuple, list)):
        return _unfolded(list(value), lambda parts: _sequence_like(value, parts))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return _unfolded(
            [getattr(value, name) for name in names],
            lambda parts: type(value)(**dict(zip(names, parts, strict=True))),
        )
    is_plain = isinstance(value, (bool, int, float, str, torch.dtype, torch.device))
    if is_whole and not is_plain and value is not None:
        raise UsageError(
            f"the model returns an object of the class {type(value).__name__}, whose tensors cannot be found. "
            "Return tensors, alone or in tuples, lists, dictionaries and dataclasses"
        )
    return [], lambda _: value if is_plain else None


def _unfolded(
    parts: Sequence[Any], build: Callable[[list[Any]], Any]
) -> tuple[list[Any], Callable[[Iterator[Any]], Any]]:
    unfolded = [unfold(part, is_whole=False) for part in parts]
    leaves = [leaf for part_leaves, _ in unfolded for leaf in part_leaves]
    return leaves, lambda values: build([build_part(values) for _, build_part in unfolded])


def _dict_like(value: dict[Any, Any], parts: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return parts
    return of_class(type(value), parts)


def _sequence_like(value: Any, parts: list[Any]) -> Any:
    if isinstance(value, torch.Size) and not all(isinstance(part, int) for part in parts):
        return tuple(parts)
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


@contextlib.contextmanager
def undone(module: nn.Module) -> Iterator[None]:
    """Restore buffers, gradients and the random state at the end of the block."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers() if not buffer.is_meta}
    grads = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in grads:
        parameter.grad = None
    try:
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
        with torch.random.fork_rng(devices):
            yield
    finally:
        for parameter, grad in grads:
            parameter.grad = grad
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in before and not torch.equal(buffer, before[name]):  # else a pending backward may still use it
                    buffer.copy_(before[name])
