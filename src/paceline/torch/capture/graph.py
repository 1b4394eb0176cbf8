"""Represent the graph of a model's forward for one kind of call, and the properties of its nodes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, fx, nn

from paceline.torch.capture.calls import OutputForm

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
    """The graph of a forward. Its placeholders are the values of the call, in order."""

    graph: fx.Graph
    output: OutputForm
    root: nn.Module
    """The module with the modules, and the model's own parameters and buffers, that nodes name."""
    whole: dict[str, str] = field(default_factory=dict)
    """For each module that is one node, by name, why it cannot be traced."""
    check: Callable[[Sequence[Any]], str | None] = lambda _: None
    """Returns why the graph does not support these values of a call; None if it does."""
    is_exported: bool = False


def stage_boundary() -> None:
    """Mark the position of ``pipe_split()`` in a graph."""


def name_of(node: fx.Node) -> str:
    """Return the name of the function or method that an operation calls, without overload; "" if there is none."""
    if node.op == "call_method":
        return str(node.target)
    if node.op == "call_function":
        return str(getattr(node.target, "__name__", "")).split(".")[0]
    return ""


def modules_around(node: fx.Node) -> list[str]:
    """Return the paths of the modules that contain an operation, the outermost first, without the model itself."""
    return [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values() if path]


def draws(node: fx.Node, root: nn.Module) -> bool:
    """Return whether an operation draws random numbers in training mode; `root` has the modules of its graph."""
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
    """Return whether an operation draws random numbers, or calls a module with an unknown forward."""
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
    """Return the parameters and buffers of the module that a node calls, or the tensor that it reads."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return [*module.parameters(), *module.buffers()]
    held = attribute(root, str(node.target)) if node.op == "get_attr" else None
    return [held] if isinstance(held, Tensor) else []
