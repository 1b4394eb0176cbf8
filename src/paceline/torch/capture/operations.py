"""Effects of a graph's operations besides their values: random numbers, changes in place."""

from __future__ import annotations

import operator
from typing import Final

import torch
from torch import fx, nn

_DRAWING: Final = {
    "bernoulli", "cauchy", "exponential", "fractional_max_pool2d", "fractional_max_pool3d", "geometric",
    "gumbel_softmax", "log_normal", "multinomial", "normal", "poisson", "rand", "rand_like", "randint", "randint_like",
    "randn", "randn_like", "random", "randperm", "rrelu", "uniform",
}  # fmt: skip
_IN_PLACE: Final = {
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow,
    operator.iand, operator.ior, operator.ixor, operator.imatmul, operator.ilshift, operator.irshift, operator.setitem,
}  # fmt: skip


def stage_boundary() -> None:
    """Stand in a graph where ``pipe_split()`` stood."""


def name_of(node: fx.Node) -> str:
    """Return the name of the function or method that an operation calls, without its overload; "" if it calls none."""
    if node.op == "call_method":
        return str(node.target)
    if node.op == "call_function":
        return str(getattr(node.target, "__name__", "")).split(".")[0]
    return ""


def modules_around(node: fx.Node) -> list[str]:
    """Return the paths of the modules that an operation is in, the outermost first; without the model's own."""
    return [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values() if path]


def draws(node: fx.Node, root: nn.Module) -> bool:
    """Return whether an operation draws random numbers when the model trains; `root` has the modules of its graph."""
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
    """Return whether an operation draws random numbers, or calls a module whose forward is unknown."""
    is_own = node.op == "call_module" and not root.get_submodule(str(node.target)).__module__.startswith("torch.nn")
    return is_own or draws(node, root)


def changes_in_place(node: fx.Node, root: nn.Module) -> bool:
    """Return whether an operation changes its first argument in place."""
    if node.op == "call_module":
        return getattr(root.get_submodule(str(node.target)), "inplace", False) is True
    name = name_of(node)
    is_method = name.endswith("_") and not name.endswith("__")
    return is_method or node.target in _IN_PLACE or node.kwargs.get("inplace") is True
