"""Find the layers of a model, and the values between layers, in the graph of the model's forward."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx, nn
from torch.nn import functional as F  # noqa: N812

from paceline.errors import UsageError
from paceline.torch.capture.graph import (
    CallArguments,
    CapturedGraph,
    changes_in_place,
    draws,
    modules_around,
    stage_boundary,
)
from paceline.torch.capture.tracing import capture


@dataclass(slots=True)
class ModelLayer:
    """The smallest unit of a stage: the call of a module, and all operations before the next call."""

    name: str
    nodes: list[fx.Node]
    modules: set[str] = field(default_factory=set)
    """The paths of the modules that contain the layer's first node, and the layer's name."""


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """The graph of a forward, divided into layers."""

    captured: CapturedGraph
    layers: list[ModelLayer]
    marks: tuple[int, ...]
    """Numbers of the layers that follow a ``pipe_split()``."""
    free: frozenset[fx.Node]
    """Nodes that depend only on the model's arguments. Each stage that uses such a node computes the node itself."""

    def place_of(self, layer: ModelLayer) -> tuple[str, int]:
        same = [other for other in self.layers if other.name == layer.name]
        return layer.name, same.index(layer)

    def number_of(self, name: str, occurrence: int) -> int | None:
        """Return the number of the `occurrence`-th layer `name`, or else of the first layer in the module `name`."""
        same = [number for number, layer in enumerate(self.layers) if layer.name == name]
        if occurrence < len(same):
            return same[occurrence]
        return next((number for number, layer in enumerate(self.layers) if name in layer.modules), None)

    def begin_of(self, name: str, module: nn.Module) -> int:
        """Return the number of a module's first layer. Raises UsageError, with the reason, if the module has none."""
        for number, layer in enumerate(self.layers):
            if name in layer.modules:
                return number
        modules = dict(module.named_modules())
        outer = next((path for path in _enclosing(name) if any(layer.name == path for layer in self.layers)), None)
        if name not in modules:
            known = ", ".join(dict.fromkeys(layer.name for layer in self.layers))
            raise UsageError(f"--split {name}: the model has no module of this name; its layers are {known[:400]}")
        if outer is not None:
            raise UsageError(
                f"--split {name}: {outer} ({type(modules[outer]).__name__}) contains this module and stays whole, "
                "because its forward cannot be traced, or is torch's own. Split before or after it"
            )
        raise UsageError(f"--split {name}: the model's forward does not call this module; name one that it calls")


def key_of(node: fx.Node) -> str:
    """Return the key of a node's value. A prefix marks the model's arguments, because nodes may have the same names."""
    return f"argument {node.target}" if node.op == "placeholder" else node.name


def trace(module: nn.Module, arguments: CallArguments) -> LayerGraph:
    """Find the layers of a model for a call with these arguments. Raises UsageError if the model has no graph."""
    return _find_layers(capture(module, arguments, opens_torch_modules=True))


def _find_layers(captured: CapturedGraph) -> LayerGraph:
    layers: list[ModelLayer] = []
    marks: list[int] = []
    layer_of: dict[fx.Node, ModelLayer] = {}
    loose: list[fx.Node] = []
    has_mark = False
    for node in captured.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if node.target is stage_boundary:
            has_mark = bool(layers)
        elif _is_part(node) and node.args[0] in layer_of:
            layer_of[node] = layer_of[node.args[0]]
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
        layer.modules = {*modules_around(first), layer.name}
    return LayerGraph(captured, layers, tuple(marks), _free_nodes(captured))


def _free_nodes(captured: CapturedGraph) -> frozenset[fx.Node]:
    """Return the nodes that depend only on arguments, draw no random numbers, and share no memory that is changed."""
    graph, root = captured.graph, captured.root
    changed: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        if node in changed or (node.op.startswith("call") and changes_in_place(node, root)):
            changed.update((node, *node.all_input_nodes))
    free: set[fx.Node] = set()
    for node in graph.nodes:
        is_call = node.op in ("call_function", "call_method") and node.target is not stage_boundary
        is_constant = node not in changed and not draws(node, root)
        if is_call and is_constant and all(arg.op == "placeholder" or arg in free for arg in node.all_input_nodes):
            free.add(node)
    return frozenset(free)


def _begins_layer(node: fx.Node) -> bool:
    return node.op == "call_module" or any(arg.op == "get_attr" for arg in node.all_input_nodes)


def _is_part(node: fx.Node) -> bool:
    return node.target is operator.getitem and len(node.all_input_nodes) == 1


def _name(node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    stack = modules_around(node)
    if stack and (isinstance(node.target, torch._ops.OpOverload) or node.target is F.linear):
        return stack[-1]  # in an exported graph, the layer has its module's name
    function = getattr(node.target, "__name__", str(node.target))
    return f"{stack[-1]}:{function}" if stack else function


def _enclosing(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
