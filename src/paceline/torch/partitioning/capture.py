"""A model as a graph of operations: by ``torch.fx``, whose operations call modules, else by ``torch.export``."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from paceline.errors import UsageError, first_line
from paceline.torch.exporting import export, free_sizes
from paceline.torch.graph_rules import draws
from paceline.torch.partitioning.graph import Operation
from paceline.torch.partitioning.placing import Cost

_OPERATIONS: Final = ("call_function", "call_method", "call_module", "get_attr")


@dataclass
class CapturedGraph:
    """The graph of a model."""

    root: fx.GraphModule
    """Holds what the operations call by name; of parameters and buffers the model's own."""
    operations: tuple[Operation, ...]
    paths: dict[str, str]
    """The module that each operation belongs to."""
    bind: Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]
    """Returns the value of each of the graph's arguments, by name, for a call of the model."""
    collect: Callable[[Mapping[str, Any]], Any]
    """Returns what the model returns, given the values of :attr:`outputs` by name."""
    outputs: tuple[str, ...]
    nodes: dict[str, fx.Node]
    """The graph's nodes by name."""
    is_traced: bool = False
    """Whether torch.fx made it."""
    costs: dict[str, Cost] = field(default_factory=dict)
    shapes: dict[str, str] = field(default_factory=dict)
    """The type and shape of the values that are tensors, as text."""
    shared: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Of which inputs of an operation its value has the memory."""
    changed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Which inputs an operation changes in place."""

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return the model's parameters and buffers with their paths, each once."""
        return [*self.root.named_parameters(), *self.root.named_buffers()]

    def module_of(self, name: str) -> nn.Module | None:
        """Return the module that an operation calls; None if it calls none."""
        node = self.nodes[name]
        return self.root.get_submodule(str(node.target)) if node.op == "call_module" else None

    def tensors_of(self, name: str) -> list[torch.Tensor]:
        """Return the parameters and buffers that an operation holds."""
        node, module = self.nodes[name], self.module_of(name)
        if module is not None:
            return [*module.parameters(), *module.buffers()]
        if node.op == "get_attr":
            held = _attribute(self.root, str(node.target))
            return [held] if isinstance(held, torch.Tensor) else []
        return []


def capture(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CapturedGraph:
    """Return the graph of a model that is called with these arguments, with costs and shapes as they were measured.

    Raises UsageError for a model that neither torch.fx nor torch.export can follow, and for operations that change in
    place what others take.
    """
    with _untouched(model):
        try:
            captured = _trace(model, args, kwargs)
        except Exception as error:  # whatever the model's code raises that is run with stand-ins for its arguments
            captured = _export(model, args, kwargs, error)
        _measure(captured, args, kwargs)
        if captured.is_traced and _changes_buffers(captured):  # perhaps without gradients, which a trace does not tell
            captured = _export(model, args, kwargs, _NotTraceableError("its forward changes a buffer"))
            _measure(captured, args, kwargs)
    _check_in_place(captured)
    return captured


class _NotTraceableError(Exception):
    pass


class _FaithfulTracer(fx.Tracer):
    """Refuses what a trace would leave out: modes of parts of a forward, random numbers drawn meanwhile."""

    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__()
        self._modes = _modes()
        self._random = torch.get_rng_state()

    @override
    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self._modes:
            raise _NotTraceableError("part of its forward turns gradients or autocast on or off")
        if not torch.equal(torch.get_rng_state(), self._random):
            raise _NotTraceableError("its forward draws random numbers that depend on no argument")
        return super().create_node(*args, **kwargs)


def _modes() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")


def constants_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by which a forward may decide what it does: None, truth values and texts."""
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if value is None or isinstance(value, (bool, str))}


def _trace(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CapturedGraph:
    tracer = _FaithfulTracer()
    graph = tracer.trace(model, concrete_args=constants_of(model, args, kwargs))
    for node in reversed(list(graph.nodes)):
        if node.target in (torch._assert, fx._symbolic_trace._assert_is_none):  # that constants are what they are
            graph.erase_node(node)
            for each in node.all_input_nodes:
                if each.op == "call_function" and not each.users:
                    graph.erase_node(each)
    root = fx.GraphModule(model, graph)
    signature = inspect.signature(model.forward)
    names = [node.name for node in graph.nodes if node.op == "placeholder"]  # one for each parameter

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return {name: bound.arguments[each] for name, each in zip(names, signature.parameters, strict=True)}

    output = next(node for node in graph.nodes if node.op == "output").args[0]
    captured = _captured(root, graph, bind, lambda values: _filled(output, values))
    captured.is_traced = True
    return captured


def _filled(returned: Any, values: Mapping[str, Any]) -> Any:
    """Return what a graph returns, with the values of its operations."""
    if isinstance(returned, fx.Node):
        return values[returned.name]
    if isinstance(returned, dict):
        return {key: _filled(each, values) for key, each in returned.items()}
    if isinstance(returned, (list, tuple)):
        filled = [_filled(each, values) for each in returned]
        if isinstance(returned, list):
            return filled
        return type(returned)(*filled) if hasattr(returned, "_fields") else tuple(filled)
    return returned


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], traced: Exception) -> CapturedGraph:
    sizes = free_sizes((args, kwargs), first_only=True)
    parameters = list(inspect.signature(model.forward).parameters)
    by_name = {**dict(zip(parameters, sizes[0], strict=False)), **sizes[1]}
    try:
        exported = export(model, args, kwargs, by_name or None)
    except Exception as error:  # as above
        raise UsageError(
            f"{type(model).__name__} cannot be made a graph: torch.fx says {first_line(traced)!r}, torch.export "
            f"{first_line(error)!r}; take what depends on values out of its forward, or partition modules within it"
        ) from error
    graph = exported.root.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    output = next(node for node in graph.nodes if node.op == "output").args[0]
    names = [each.name if isinstance(each, fx.Node) else None for each in pytree.tree_leaves(output)]
    constants = pytree.tree_leaves(output)

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        leaves, its = pytree.tree_flatten((args, kwargs))
        if its != exported.arguments:
            raise UsageError("the model was called with other arguments than those it was partitioned with")
        arguments = {node.name: leaf for node, leaf in zip(placeholders, leaves, strict=True)}
        refusal = exported.refusal(arguments)
        if refusal is not None:
            raise UsageError(
                f"the model was called with arguments that its graph is not for: {refusal}; partition it with an "
                "example like them"
            )
        return arguments

    def collect(values: Mapping[str, Any]) -> Any:
        leaves = [constant if name is None else values[name] for name, constant in zip(names, constants, strict=True)]
        return pytree.tree_unflatten(leaves, exported.returned)

    return _captured(exported.root, graph, bind, collect)


def _captured(
    root: fx.GraphModule,
    graph: fx.Graph,
    bind: Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]],
    collect: Callable[[Mapping[str, Any]], Any],
) -> CapturedGraph:
    operations = _operations_of(root, graph)
    outputs = next(node for node in graph.nodes if node.op == "output").all_input_nodes
    paths = {node.name: _path(node) for node in graph.nodes if node.op in _OPERATIONS}
    nodes = {node.name: node for node in graph.nodes}
    return CapturedGraph(root, operations, paths, bind, collect, tuple(node.name for node in outputs), nodes)


def _operations_of(root: fx.GraphModule, graph: fx.Graph) -> tuple[Operation, ...]:
    operations: list[Operation] = []
    last: dict[Any, str] = {}  # operation of what must keep its order
    for node in graph.nodes:
        if node.op in _OPERATIONS and (node.users or node.op != "get_attr"):
            kept = _kept_in_order(root, node)
            after = tuple(dict.fromkeys(last[each] for each in kept if each in last))
            last.update(dict.fromkeys(kept, node.name))
            inputs = tuple(each.name for each in node.all_input_nodes)
            operations.append(Operation(node.name, inputs, tuple(each for each in after if each not in inputs)))
    return tuple(operations)


def _path(node: fx.Node) -> str:
    if node.op in ("call_module", "get_attr"):
        return str(node.target)
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""


_RANDOM = "random numbers"


def _kept_in_order(root: fx.GraphModule, node: fx.Node) -> list[Any]:
    """Return what an operation changes besides its value: the state of a module, of the random numbers."""
    kept: list[Any] = []
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        if any(True for _ in module.buffers()):
            kept.append(module)
    if draws(node, root):
        kept.append(_RANDOM)
    return kept


def _attribute(root: nn.Module, path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(root.get_submodule(module), name)


class _Given(nn.Module):
    """A module that is called with some of its parameters given."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.module, self.names = module, tuple(names)

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        count = len(self.names)
        given = dict(zip(self.names, args[:count], strict=True))
        return torch.func.functional_call(self.module, given, args[count:], kwargs, tie_weights=False)


def give_parameters(captured: CapturedGraph, name: str, given: Mapping[str, str]) -> list[str]:
    """Have an operation that calls a module take some parameters as values of operations before it; return those.

    `given` has the paths of parameters in the model by their names in the module.
    """
    node, root = captured.nodes[name], captured.root
    wrapper = f"given_{name}"
    root.add_submodule(wrapper, _Given(root.get_submodule(str(node.target)), list(given)))
    with root.graph.inserting_before(node):
        values = [root.graph.get_attr(path) for path in given.values()]
    node.target = wrapper
    node.args = (*values, *node.args)
    for value, path in zip(values, given.values(), strict=True):
        captured.nodes[value.name] = value
        captured.paths[value.name] = path
        held = _attribute(root, path)
        captured.costs[value.name] = Cost(0.0, held.numel() * held.element_size())
        captured.shapes[value.name] = shape_of([held])
    captured.operations = _operations_of(root, root.graph)
    return [value.name for value in values]


# What operations take.


def _measure(captured: CapturedGraph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Find costs, shapes, and what shares or changes memory, by running the graph twice."""
    for _ in range(2):
        with torch.no_grad():
            _Measuring(captured).run_graph(captured.bind(args, kwargs))


def _changes_buffers(captured: CapturedGraph) -> bool:
    return any(captured.nodes[value].op == "get_attr" for values in captured.changed.values() for value in values)


def _check_in_place(captured: CapturedGraph) -> None:
    """Raise UsageError where an operation changes in place what another takes too: they might run in another order."""
    for name, values in captured.changed.items():
        behind = list(values)
        while behind:
            value = behind.pop()
            if len(captured.nodes[value].users) > 1:
                others = [user.name for user in captured.nodes[value].users if user.name != name]
                raise UsageError(
                    f"{name} changes {value} in place, which {', '.join(others)} takes too: write it out of place "
                    "(inplace=False, or x = x + y for x += y)"
                )
            behind += captured.shared.get(value, ())


class _Measuring(fx.Interpreter):
    def __init__(self, captured: CapturedGraph) -> None:
        super().__init__(captured.root, garbage_collect_values=True)
        self._captured = captured

    def run_graph(self, arguments: dict[str, Any]) -> None:
        graph = self._captured.root.graph
        self.run(
            *(arguments[node.name] for node in graph.nodes if node.op == "placeholder"), enable_io_processing=False
        )

    @override
    def run_node(self, n: fx.Node) -> Any:
        taken = {each.name: _tensors_in(self.env[each]) for each in n.all_input_nodes if each in self.env}
        versions = {name: [tensor._version for tensor in its] for name, its in taken.items()}
        start = time.perf_counter()
        value = super().run_node(n)
        _wait_for(value)
        seconds = time.perf_counter() - start
        made = {tensor.untyped_storage().data_ptr() for tensor in _tensors_in(value)} - {0}
        if n.op in _OPERATIONS:
            self._captured.shared[n.name] = tuple(
                name
                for name, its in taken.items()
                if any(tensor.untyped_storage().data_ptr() in made for tensor in its)
            )
            changed = tuple(
                name for name, its in taken.items() if [tensor._version for tensor in its] != versions[name]
            )
            if changed:
                self._captured.changed[n.name] = changed
        costs, former = self._captured.costs, self._captured.costs.get(n.name)
        tensors = _tensors_in(value)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        costs[n.name] = Cost(seconds if former is None else min(seconds, former.seconds), size)
        self._captured.shapes[n.name] = shape_of(tensors)
        return value


def shape_of(tensors: Sequence[torch.Tensor]) -> str:
    """Return the types and shapes of tensors as text."""
    return ", ".join(f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for tensor in tensors)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _wait_for(value: Any) -> None:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
            torch.cuda.synchronize(leaf.device)
            return


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Leave the buffers of a model, and the random numbers, as they were."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for buffer, former in kept:
                if not torch.equal(buffer, former):
                    buffer.copy_(former)


def segment_module(
    captured: CapturedGraph, operations: Sequence[str], inputs: Sequence[str], outputs: Sequence[str]
) -> fx.GraphModule:
    """Return a module of some of the operations, whose forward takes `inputs` and returns a list of `outputs`."""
    nodes, graph = captured.nodes, fx.Graph()
    copied = {nodes[name]: graph.placeholder(name) for name in inputs}
    for name in operations:
        copied[nodes[name]] = graph.node_copy(nodes[name], lambda node: copied[node])
    graph.output([copied[nodes[name]] for name in outputs])
    return fx.GraphModule(captured.root, graph)
