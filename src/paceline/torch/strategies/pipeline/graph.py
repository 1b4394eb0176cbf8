"""A model's layers and how values flow between them, found by tracing its forward.

The tracer is ``torch.fx``'s, at the granularity of modules: modules stay the objects that they are, with their names,
their training mode and their buffers, and the batch size stays free. (``torch.export`` would freeze both.) A module
whose forward cannot be traced is one layer; only if the model's own forward cannot be is there an error.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from paceline.errors import UsageError, first_line


@dataclass(slots=True)
class ModelLayer:
    """Nodes that stay together: a module's call and what is done with its result until the next one's."""

    name: str
    nodes: list[fx.Node]
    modules: set[str] = field(default_factory=set)
    """Paths of all modules that a node of it is in, its own included."""


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """A traced forward."""

    inputs: tuple[str, ...]
    """Names of the arguments that are values; the others are constants of the trace."""
    layers: list[ModelLayer]
    output: Any
    """What the forward returns, with nodes where values will be."""
    marks: tuple[int, ...]
    """The layers before which ``pipe_split()`` stands."""

    def begin_of(self, name: str, module: nn.Module) -> int:
        """Return the number of the first layer of a module. Raises UsageError, which says why there is none."""
        for number, layer in enumerate(self.layers):
            if name in layer.modules:
                return number
        modules = dict(module.named_modules())
        outer = next((found for found in _enclosing(name) if any(layer.name == found for layer in self.layers)), None)
        if name not in modules:
            known = ", ".join(dict.fromkeys(layer.name for layer in self.layers))
            raise UsageError(f"--split {name}: the model has no module of this name; its layers are {known[:400]}")
        if outer is not None:
            raise UsageError(
                f"--split {name}: {outer} ({type(modules[outer]).__name__}) stands in the way, it cannot be taken "
                "apart: its forward cannot be traced, or is torch's own; split before or behind it"
            )
        raise UsageError(f"--split {name}: the model's forward does not call this module; name one that it calls")


def trace(module: nn.Module, arguments: Mapping[str, Any], constants: Mapping[str, Any]) -> LayerGraph:
    """Find the layers of a model that is called with `arguments`, all of them values, and with these `constants`.

    Raises UsageError if the model's own forward cannot be traced.
    """
    opaque: set[str] = set()
    while True:
        tracer = _Tracer(opaque)
        try:
            with tracer.marking():
                graph = tracer.trace(module, concrete_args=dict(constants))
            break
        except Exception as error:
            culprit = tracer.culprit
            if culprit and culprit not in opaque:
                opaque.add(culprit)
                continue
            raise UsageError(
                f"{type(module).__name__} cannot be cut into stages: its forward stands in the way ({_where(module)}): "
                f"{first_line(error)}; a forward that is cut may not decide by the values of tensors: put such a part "
                "into a module of its own, which stays whole"
            ) from error
    return _find_layers(graph, arguments)


def bind(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of a call by name: those with tensors in them, and the others. Raises UsageError."""
    signature = inspect.signature(module.forward)
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise UsageError(
                f"{type(module).__name__}.forward takes {parameter}: a model that is cut into stages needs a name for "
                "each argument; write them out"
            )
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    values: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        leaves = torch.utils._pytree.tree_leaves(value)
        (values if any(isinstance(leaf, torch.Tensor) for leaf in leaves) else constants)[name] = value
    return values, constants


class _Tracer(fx.Tracer):
    """Traces through every module that it can, and notes who failed and where ``pipe_split()`` stands."""

    def __init__(self, opaque: set[str]) -> None:
        super().__init__()
        self._opaque = opaque
        self.culprit: str | None = None

    @override
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self._opaque or super().is_leaf_module(m, module_qualified_name)

    @override
    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            if self.culprit is None:
                self.culprit = self.path_of_module(m)
            raise

    def marking(self) -> TorchFunctionMode:
        """Return a context in which ``pipe_split()`` leaves a node."""
        tracer = self

        class Marks(TorchFunctionMode):
            def __torch_function__(
                self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
            ) -> Any:
                if "_pipe_split" in str(func):
                    tracer.create_node("call_function", stage_boundary, (), {})
                    return None
                return func(*args, **(kwargs or {}))

        return Marks()


def key_of(node: fx.Node) -> str:
    """Return what a node's value goes under: arguments of the model by their own names, which nodes may have too."""
    return f"argument {node.target}" if node.op == "placeholder" else node.name


def stage_boundary() -> None:
    """Stand in a graph where ``pipe_split()`` stood."""


def _find_layers(graph: fx.Graph, arguments: Mapping[str, Any]) -> LayerGraph:
    layers: list[ModelLayer] = []
    marks: list[int] = []
    layer_of: dict[fx.Node, ModelLayer] = {}
    loose: list[fx.Node] = []
    output: Any = None
    has_mark = False
    for node in _living(graph):
        if node.op in ("placeholder", "get_attr"):
            continue
        if node.op == "output":
            output = node.args[0]
        elif node.target is stage_boundary:
            has_mark = bool(layers)
        elif _takes_out(node) and node.args[0] in layer_of:
            layer_of[node] = layer_of[node.args[0]]  # type: ignore[index]
            layer_of[node].nodes.append(node)
        elif has_mark or _begins_layer(node) or not layers:
            if not layers and not _begins_layer(node):
                loose.append(node)
                continue
            if has_mark:
                marks.append(len(layers))
            layer = ModelLayer(_name(node), [*loose, node])
            layers.append(layer)
            layer_of.update(dict.fromkeys(layer.nodes, layer))
            loose, has_mark = [], False
        else:
            layers[-1].nodes.append(node)
            layer_of[node] = layers[-1]
    if loose:
        layers.append(ModelLayer(_name(loose[0]), loose))
    for layer in layers:
        first = next((node for node in layer.nodes if _begins_layer(node)), layer.nodes[0])
        layer.modules = {*_stack(first), layer.name}
    return LayerGraph(tuple(arguments), layers, output, tuple(marks))


def _living(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the nodes in order, without the checks of constants that the tracer has added."""
    for node in graph.nodes:
        target = getattr(node.target, "__name__", "")
        if node.op == "call_function" and target in ("_assert_is_none", "_assert"):
            continue
        if (
            node.op == "call_function"
            and node.target is operator.eq
            and all(getattr(user.target, "__name__", "") == "_assert" for user in node.users)
        ):
            continue
        yield node


def _begins_layer(node: fx.Node) -> bool:
    return node.op == "call_module" or any(arg.op == "get_attr" for arg in node.all_input_nodes)


def _takes_out(node: fx.Node) -> bool:
    return node.target is operator.getitem and len(node.all_input_nodes) == 1


def _stack(node: fx.Node) -> list[str]:
    return [path for path in node.meta.get("nn_module_stack", {}) if path]


def _name(node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    stack = _stack(node)
    own = getattr(node.target, "__name__", str(node.target))
    return f"{stack[-1]}:{own}" if stack else own


def _enclosing(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _where(module: nn.Module) -> str:
    try:
        code = type(module).forward.__code__
        return f"{code.co_filename}:{code.co_firstlineno}"
    except AttributeError:
        return "of no known place"
