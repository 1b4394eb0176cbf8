"""Measure the costs of a model's operations by running its graph."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from paceline.errors import UsageError
from paceline.torch.capture.graph import (
    CallArguments,
    CapturedGraph,
    attribute,
    bind,
    draws,
    may_draw,
    modules_around,
    tensors_of,
    undone,
)
from paceline.torch.capture.tracing import capture
from paceline.torch.partitioning.graph import Operation
from paceline.torch.partitioning.placing import Cost

_OPERATIONS: Final = ("call_function", "call_method", "call_module", "get_attr")


def bind_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
    """Return a call's arguments. None, booleans and strings are constants, because the graph may depend on them."""
    return bind(model, args, kwargs, lambda leaf: leaf is not None and not isinstance(leaf, (bool, str)))


@dataclass
class MeasuredGraph:
    """The graph of a model, as operations with measured costs."""

    captured: CapturedGraph
    root: fx.GraphModule
    """The module that contains the submodules, parameters and buffers which operations use, by name."""
    operations: tuple[Operation, ...]
    paths: dict[str, str]
    """The path of the module that contains each operation."""
    nodes: dict[str, fx.Node]
    costs: dict[str, Cost] = field(default_factory=dict)
    shapes: dict[str, str] = field(default_factory=dict)
    """The dtype and shape, as text, of each value that is a tensor."""
    shared: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """For each operation, the inputs whose memory the operation's value shares."""
    changed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """For each operation, the inputs that the operation changes in place."""

    @property
    def outputs(self) -> list[str]:
        return [node.name for node in self.captured.output.graph_nodes]

    def name_values(self, arguments: CallArguments) -> dict[str, Any]:
        """Return the values of a call by their names in the graph. Raises UsageError for values of another graph."""
        values = list(arguments.values.values())
        failure = self.captured.check(values)
        if failure is not None:
            raise UsageError(
                f"the model was called with arguments that its graph does not support: {failure}. Partition the model "
                "with an example of this kind"
            )
        return dict(zip((node.name for node in self.placeholders()), values, strict=True))

    def placeholders(self) -> list[fx.Node]:
        return list(self.root.graph.find_nodes(op="placeholder"))

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return the model's parameters and buffers with their paths, without repetition."""
        return [*self.root.named_parameters(), *self.root.named_buffers()]

    def module_of(self, name: str) -> nn.Module | None:
        node = self.nodes[name]
        return self.root.get_submodule(str(node.target)) if node.op == "call_module" else None

    def tensors_of(self, name: str) -> list[torch.Tensor]:
        return tensors_of(self.nodes[name], self.root)


def measure_graph(model: nn.Module, arguments: CallArguments) -> MeasuredGraph:
    """Measure the graph of a model for these arguments. Raises UsageError if the model has no graph."""
    with undone(model):
        measured = _measure(model, capture(model, arguments, opens_torch_modules=False), arguments)
        # In a graph of torch.fx, the order of a buffer's change and of other nodes that read the buffer is undefined.
        if not measured.captured.is_exported and _changes_buffers(measured):
            refusal = "its forward changes a buffer"
            exported = capture(model, arguments, opens_torch_modules=False, refusal=refusal)
            measured = _measure(model, exported, arguments)
    _check_in_place(measured)
    return measured


def _measure(model: nn.Module, captured: CapturedGraph, arguments: CallArguments) -> MeasuredGraph:
    """Run the graph twice to find costs, shapes, and shared or changed memory."""
    graph = captured.graph
    for node in graph.find_nodes(op="placeholder"):
        # torch.fx uses the target as a Python identifier, but some names of arguments are not identifiers.
        node.target = node.name
    root = captured.root if isinstance(captured.root, fx.GraphModule) else fx.GraphModule(model, graph)
    nodes = {node.name: node for node in graph.nodes}
    paths = {node.name: _path(node) for node in graph.nodes if node.op in _OPERATIONS}
    measured = MeasuredGraph(captured, root, _operations_of(root, graph), paths, nodes)
    for _ in range(2):
        with torch.no_grad():
            _Measuring(measured).run(*arguments.values.values(), enable_io_processing=False)
    return measured


def _operations_of(root: fx.GraphModule, graph: fx.Graph) -> tuple[Operation, ...]:
    operations: list[Operation] = []
    last: dict[Any, str] = {}  # the last operation that changed a state, by state
    for node in graph.nodes:
        if node.op in _OPERATIONS and (node.users or node.op != "get_attr"):
            effects = _ordered_effects(root, node)
            after = dict.fromkeys(last[effect] for effect in effects if effect in last)
            last.update(dict.fromkeys(effects, node.name))
            inputs = tuple(value.name for value in node.all_input_nodes)
            operations.append(Operation(node.name, inputs, tuple(name for name in after if name not in inputs)))
    return tuple(operations)


def _path(node: fx.Node) -> str:
    if node.op in ("call_module", "get_attr"):
        return str(node.target)
    return ["", *modules_around(node)][-1]


_RANDOM = "random numbers"


def _ordered_effects(root: fx.GraphModule, node: fx.Node) -> list[Any]:
    """Return the states that a node may change in a relevant order: modules with buffers, and the random generator."""
    effects: list[Any] = []
    module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
    if module is not None and any(True for _ in module.buffers()):
        effects.append(module)
    if draws(node, root) if isinstance(module, _Given) else may_draw(node, root):
        effects.append(_RANDOM)
    return effects


class _Given(nn.Module):
    """Calls a module with values for some of its parameters, which are additional arguments."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.module, self.names = module, tuple(names)

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        count = len(self.names)
        given = dict(zip(self.names, args[:count], strict=True))
        return torch.func.functional_call(self.module, given, args[count:], kwargs, tie_weights=False)


def give_parameters(measured: MeasuredGraph, name: str, given: Mapping[str, str]) -> list[str]:
    """Make parameters (`given`: paths by name) inputs of a module's operation. Return the operations that read them."""
    node, root = measured.nodes[name], measured.root
    wrapper = f"given_{name}"
    root.add_submodule(wrapper, _Given(root.get_submodule(str(node.target)), list(given)))
    with root.graph.inserting_before(node):
        values = [root.graph.get_attr(path) for path in given.values()]
    node.target = wrapper
    node.args = (*values, *node.args)
    for value, path in zip(values, given.values(), strict=True):
        measured.nodes[value.name] = value
        measured.paths[value.name] = path
        parameter = attribute(root, path)
        measured.costs[value.name] = Cost(0.0, parameter.numel() * parameter.element_size())
        measured.shapes[value.name] = shape_of([parameter])
    measured.operations = _operations_of(root, root.graph)
    return [value.name for value in values]


def _changes_buffers(measured: MeasuredGraph) -> bool:
    return any(measured.nodes[value].op == "get_attr" for values in measured.changed.values() for value in values)


def _check_in_place(measured: MeasuredGraph) -> None:
    """Raise UsageError if an operation changes a value in place that another operation uses, in undefined order."""
    for name, values in measured.changed.items():
        pending = list(values)
        while pending:
            value = pending.pop()
            if len(measured.nodes[value].users) > 1:
                users = [user.name for user in measured.nodes[value].users if user.name != name]
                raise UsageError(
                    f"{name} changes {value} in place, but {', '.join(users)} uses it too. Do not change it in place "
                    "(inplace=False, or x = x + y for x += y)"
                )
            pending += measured.shared.get(value, ())


class _Measuring(fx.Interpreter):
    def __init__(self, measured: MeasuredGraph) -> None:
        super().__init__(measured.root, garbage_collect_values=True)
        self._measured = measured

    @override
    def run_node(self, n: fx.Node) -> Any:
        inputs = {node.name: _tensors_in(self.env[node]) for node in n.all_input_nodes if node in self.env}
        versions = {name: [tensor._version for tensor in tensors] for name, tensors in inputs.items()}
        start = time.perf_counter()
        value = super().run_node(n)
        _wait_for(value)
        seconds = time.perf_counter() - start
        memory = {tensor.untyped_storage().data_ptr() for tensor in _tensors_in(value)} - {0}
        if n.op in _OPERATIONS:
            self._measured.shared[n.name] = tuple(
                name
                for name, tensors in inputs.items()
                if any(tensor.untyped_storage().data_ptr() in memory for tensor in tensors)
            )
            changed = tuple(
                name for name, tensors in inputs.items() if [tensor._version for tensor in tensors] != versions[name]
            )
            if changed:
                self._measured.changed[n.name] = changed
        costs, former = self._measured.costs, self._measured.costs.get(n.name)
        tensors = _tensors_in(value)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        costs[n.name] = Cost(seconds if former is None else min(seconds, former.seconds), size)
        self._measured.shapes[n.name] = shape_of(tensors)
        return value


def shape_of(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for tensor in tensors)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _wait_for(value: Any) -> None:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
            torch.cuda.synchronize(leaf.device)
            return


def segment_module(
    measured: MeasuredGraph, operations: Sequence[str], inputs: Sequence[str], outputs: Sequence[str]
) -> fx.GraphModule:
    """Return a module with these operations; its forward takes `inputs` and returns a list of `outputs`."""
    nodes, graph = measured.nodes, fx.Graph()
    copied = {nodes[name]: graph.placeholder(name) for name in inputs}
    for name in operations:
        copied[nodes[name]] = graph.node_copy(nodes[name], lambda node: copied[node])
    graph.output([copied[nodes[name]] for name in outputs])
    return fx.GraphModule(measured.root, graph)
