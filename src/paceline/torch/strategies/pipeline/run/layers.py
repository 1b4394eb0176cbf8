"""A model's layers and how values flow between them, as the graph of its forward tells."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx, nn
from torch.nn import functional as F  # noqa: N812

from paceline.errors import UsageError
from paceline.torch.capture.calls import CallArguments
from paceline.torch.capture.graph import CapturedGraph, changes_in_place, draws, modules_around, stage_boundary
from paceline.torch.capture.tracing import capture


@dataclass(slots=True)
class ModelLayer:
    """Nodes that stay together: a module's call and what is done with its result until the next one's."""

    name: str
    nodes: list[fx.Node]
    modules: set[str] = field(default_factory=set)
    """Paths of all modules that a node of it is in, its own included."""


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """The graph of a forward, as layers."""

    captured: CapturedGraph
    layers: list[ModelLayer]
    marks: tuple[int, ...]
    """The layers before which ``pipe_split()`` stands."""
    free: frozenset[fx.Node]
    """Nodes that depend on the model's arguments alone: every stage that uses one computes it itself."""

    def place_of(self, layer: ModelLayer) -> tuple[str, int]:
        """Return a layer's name, and how many layers before it have the same."""
        same = [each for each in self.layers if each.name == layer.name]
        return layer.name, same.index(layer)

    def number_of(self, name: str, occurrence: int) -> int | None:
        """Return the number of the layer of this place, or of the first one in a module of this name; None: neither."""
        same = [number for number, layer in enumerate(self.layers) if layer.name == name]
        if occurrence < len(same):
            return same[occurrence]
        return next((number for number, layer in enumerate(self.layers) if name in layer.modules), None)

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


def key_of(node: fx.Node) -> str:
    """Return what a node's value goes under: arguments of the model by their own names, which nodes may have too."""
    return f"argument {node.target}" if node.op == "placeholder" else node.name


def trace(module: nn.Module, arguments: CallArguments) -> LayerGraph:
    """Find the layers of a model that is called with these arguments. Raises UsageError if there is no graph of it."""
    return _find_layers(capture(module, arguments, opens_torch_modules=True))


def _find_layers(captured: CapturedGraph) -> LayerGraph:
    """Gather the nodes of a graph in layers."""
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
        elif _takes_out(node) and node.args[0] in layer_of:
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
    """Return the nodes that depend on arguments alone, draw nothing, and share memory with nothing that is changed."""
    graph, root = captured.graph, captured.root
    changed: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        if node in changed or (node.op.startswith("call") and changes_in_place(node, root)):
            changed.update((node, *node.all_input_nodes))
    free: set[fx.Node] = set()
    for node in graph.nodes:
        is_call = node.op in ("call_function", "call_method") and node.target is not stage_boundary
        is_lasting = node not in changed and not draws(node, root)
        if is_call and is_lasting and all(each.op == "placeholder" or each in free for each in node.all_input_nodes):
            free.add(node)
    return frozenset(free)


def _begins_layer(node: fx.Node) -> bool:
    return node.op == "call_module" or any(arg.op == "get_attr" for arg in node.all_input_nodes)


def _takes_out(node: fx.Node) -> bool:
    return node.target is operator.getitem and len(node.all_input_nodes) == 1


def _name(node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    stack = modules_around(node)
    if stack and (isinstance(node.target, torch._ops.OpOverload) or node.target is F.linear):
        return stack[-1]  # in a graph of operations they are all that there is of a module
    own = getattr(node.target, "__name__", str(node.target))
    return f"{stack[-1]}:{own}" if stack else own


def _enclosing(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
