"""Represent the arguments of a model's call and the graph of its forward, and find properties of graph nodes."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from paceline.errors import UsageError


@dataclasses.dataclass(frozen=True, slots=True)
class CallArguments:
    """The arguments of a model's call, divided into named leaves (values that contain no other values)."""

    values: Mapping[str, Any]
    """The leaves that may differ between calls, such as tensors."""
    constants: Mapping[str, Any]
    fill: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    """A function that builds the positional and keyword arguments from values in the order of :attr:`values`."""

    @property
    def kind(self) -> str:
        """A text that is equal for two calls if one graph can compute both calls."""
        tensors = [f"{name}={tensor.dtype}{tensor.dim()}" for name, tensor in self.values.items()]
        return ", ".join([*tensors, *self.constants_as_text()])

    def constants_as_text(self) -> list[str]:
        """Return each constant as ``name=value``. Raises UsageError if a value's text contains a memory address."""
        return [f"{name}={_text_of(name, constant)}" for name, constant in self.constants.items()]


def bind(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_value: Callable[[Any], bool] = lambda leaf: isinstance(leaf, Tensor),
) -> CallArguments:
    """Return the arguments of a call, including defaults. A leaf for which `is_value` is false is a constant."""
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
    """Create a dictionary or a dataclass of class `kind`.

    A defaultdict gets no function for missing keys, because functions cannot be sent to other processes.
    """
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
    """The structure of a traced forward's result, with graph nodes instead of tensors."""

    nodes: tuple[Any, ...]
    build: Callable[[Iterator[Any]], Any]

    @property
    def graph_nodes(self) -> list[fx.Node]:
        """The parts of the result that are graph nodes; the other parts are constants."""
        return [node for node in self.nodes if isinstance(node, fx.Node)]

    def fill(self, value_of: Callable[[fx.Node], Any]) -> Any:
        return self.build(iter([value_of(node) if isinstance(node, fx.Node) else node for node in self.nodes]))


def unfold(value: Any, *, is_whole: bool = True) -> tuple[list[Any], Callable[[Iterator[Any]], Any]]:
    """Return the values in a forward's result, and a function that rebuilds the result from other values.

    Objects without known parts, such as a cache of keys and values, become None. Raises UsageError if the whole result
    is such an object.
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
            # Write only changed buffers: a backward fails if a buffer that it uses was written after the forward.
            for name, buffer in module.named_buffers():
                if name in before and not torch.equal(buffer, before[name]):
                    buffer.copy_(before[name])


_DRAWING: Final = {
    "bernoulli", "cauchy", "exponential", "fractional_max_pool2d", "fractional_max_pool3d", "geometric",
    "gumbel_softmax", "log_normal", "multinomial", "normal", "poisson", "rand", "rand_like", "randint", "randint_like",
    "randn", "randn_like", "random", "randperm", "rrelu", "uniform",
}  # fmt: skip
_IN_PLACE: Final = {
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow,
    operator.iand, operator.ior, operator.ixor, operator.imatmul, operator.ilshift, operator.irshift, operator.setitem,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """The graph of a forward. Its placeholders are the values of a call's arguments, in order."""

    graph: fx.Graph
    output: OutputForm
    root: nn.Module
    """The module with the submodules, parameters and buffers to which the nodes refer by name."""
    whole: dict[str, str] = field(default_factory=dict)
    """Modules that are one node each because they cannot be traced: the reasons by the module's name."""
    check: Callable[[Sequence[Any]], str | None] = lambda _: None
    """A function that returns the reason why the graph does not support given values; None if it supports them."""
    is_exported: bool = False


def stage_boundary() -> None:
    """Mark the position of ``pipe_split()`` in a graph."""


def name_of(node: fx.Node) -> str:
    """Return the name of the function or method that an operation calls, without its overload; "" for other nodes."""
    if node.op == "call_method":
        return str(node.target)
    if node.op == "call_function":
        return str(getattr(node.target, "__name__", "")).split(".")[0]
    return ""


def modules_around(node: fx.Node) -> list[str]:
    """Return the paths of the modules that contain an operation, the outermost first, without the model itself."""
    return [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values() if path]


def draws(node: fx.Node, root: nn.Module) -> bool:
    """Return whether an operation draws random numbers in training mode; `root` contains the graph's modules."""
    if node.op == "call_module":
        return any(_is_drawing(module) for module in root.get_submodule(str(node.target)).modules())
    name = name_of(node)
    if name == "scaled_dot_product_attention":
        return len(node.args) > 4 or bool(node.kwargs.get("dropout_p"))
    is_tagged = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    is_named = "drop" in name or name == "multi_head_attention_forward" or name.rstrip("_") in _DRAWING
    return is_tagged or is_named


def _is_drawing(module: nn.Module) -> bool:
    dropout = getattr(module, "dropout", 0.0)
    is_kind = isinstance(module, nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d)
    return is_kind or "Dropout" in type(module).__name__ or (isinstance(dropout, float) and dropout > 0)


def may_draw(node: fx.Node, root: nn.Module) -> bool:
    """Return whether an operation draws random numbers, or may draw them because its module is not torch's own."""
    is_own = node.op == "call_module" and not root.get_submodule(str(node.target)).__module__.startswith("torch.nn")
    return is_own or draws(node, root)


def changes_in_place(node: fx.Node, root: nn.Module) -> bool:
    if node.op == "call_module":
        return getattr(root.get_submodule(str(node.target)), "inplace", False) is True
    name = name_of(node)
    is_method = name.endswith("_") and not name.endswith("__")
    return is_method or node.target in _IN_PLACE or node.kwargs.get("inplace") is True


def attribute(root: nn.Module, path: str) -> Any:
    return operator.attrgetter(path)(root)


def tensors_of(node: fx.Node, root: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of the module that a node calls, or the tensor that the node reads."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return [*module.parameters(), *module.buffers()]
    held = attribute(root, str(node.target)) if node.op == "get_attr" else None
    return [held] if isinstance(held, Tensor) else []
