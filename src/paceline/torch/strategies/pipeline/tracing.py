"""How a model's forward becomes a graph.

By ``torch.fx`` first, module by module: modules stay the objects that they are, with their training mode and their
buffers, all sizes stay free, and a module whose forward cannot be traced is one layer. Where the model's own forward
cannot be traced, or a module with several layers in it, by ``torch.export``, operation by operation, for the modes of
all modules and the sizes that the forward decides by.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from paceline.errors import UsageError, first_line
from paceline.torch.exporting import ExportedGraph, export, free_sizes
from paceline.torch.strategies.pipeline.calls import CallArguments, OutputForm, unfold
from paceline.torch.strategies.pipeline.graph import LayerGraph, find_layers, stage_boundary


def trace(module: nn.Module, arguments: CallArguments) -> LayerGraph:
    """Find the layers of a model that is called with these arguments. Raises UsageError if there is no graph of it."""
    found: _Traced | None = None
    try:
        found = _trace_modules(module, arguments)
        if not any(_hides_layers(module.get_submodule(name)) for name in found.whole):
            return _layers_of(found, module)
        failure: Exception | None = None
    except _ForwardError as error:
        failure = error.reason
    try:
        exported, form = _export(module, arguments)
    except UsageError:
        raise
    except Exception as error:  # whatever the model's code raises that is run with stand-ins for its arguments
        if found is not None:
            return _layers_of(found, module, f"; torch.export says: {first_line(error)}")
        raise UsageError(
            f"{type(module).__name__} cannot be cut into stages: its forward stands in the way ({_where(module)}): "
            f"{first_line(failure or error)}; torch.export says: {first_line(error)}; a forward that is cut may not "
            "decide by the values of tensors: put such a part into a module of its own, which stays whole"
        ) from error
    names = list(arguments.values)
    return find_layers(
        exported.root.graph,
        form,
        root=exported.root,
        refusal=lambda values: exported.refusal({f"leaves_{k}": values[name] for k, name in enumerate(names)}),
    )


# By torch.fx.


class _ForwardError(Exception):
    """The model's own forward cannot be traced."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


@dataclass(frozen=True, slots=True)
class _Traced:
    graph: fx.Graph
    form: OutputForm
    whole: dict[str, str]
    """Modules that could not be traced, and why."""


def _trace_modules(module: nn.Module, arguments: CallArguments) -> _Traced:
    whole: dict[str, str] = {}
    while True:
        tracer = _Tracer(arguments, whole)
        try:
            with tracer.marking():
                graph = tracer.trace(module)
        except UsageError:
            raise
        except Exception as error:
            if tracer.culprit and tracer.culprit not in whole:
                whole[tracer.culprit] = first_line(error)
                continue
            raise _ForwardError(error) from error
        output = next(node for node in graph.nodes if node.op == "output").args[0]
        assert tracer.build is not None
        return _Traced(graph, OutputForm(tuple(output), tracer.build), whole)


def _layers_of(traced: _Traced, module: nn.Module, reason: str = "") -> LayerGraph:
    whole = {}
    for name, why in traced.whole.items():
        inner = module.get_submodule(name)
        whole[name] = f"{name} ({type(inner).__name__}, {_where(inner)}) stays whole: {why}{reason}"
    return find_layers(traced.graph, traced.form, root=module, whole=whole)


def _hides_layers(module: nn.Module) -> bool:
    """Return whether several modules within one have parameters, so that it may be worth a cut."""
    return sum(any(True for _ in inner.parameters(recurse=False)) for inner in module.modules()) > 1


class _Tracer(fx.Tracer):
    """Traces through every module that it can, and notes who failed and where ``pipe_split()`` stands."""

    def __init__(self, arguments: CallArguments, whole: Collection[str]) -> None:
        super().__init__()
        self._arguments = arguments
        self._whole = whole
        self.culprit: str | None = None
        self.build: Callable[[Iterator[Any]], Any] | None = None

    @override
    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        values = [self.create_proxy("placeholder", name, (), {}) for name in self._arguments.values]

        def forward(root: nn.Module, *values: Any) -> list[Any]:
            args, kwargs = self._arguments.fill(values)
            leaves, self.build = unfold(root_fn(root, *args, **kwargs))
            return leaves

        return forward, [self.root, *values]

    @override
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, (nn.modules.loss._Loss, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)):
            return module_qualified_name in self._whole  # torch's own, but they reduce over rows, or hold layers
        return module_qualified_name in self._whole or super().is_leaf_module(m, module_qualified_name)

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


# By torch.export.


class _FlatCall(nn.Module):
    """A model with its tensors as arguments and its result as a list of tensors, whatever structures they come in."""

    def __init__(self, model: nn.Module, arguments: CallArguments, take: Callable[[Any], None]) -> None:
        """`take` is given how to build each result; torch.export undoes what a forward leaves on its module."""
        super().__init__()
        self.model = model
        self.arguments = arguments
        self.take = take

    @override
    def forward(self, *leaves: Any) -> list[Any]:
        args, kwargs = self.arguments.fill(leaves)
        found, build = unfold(self.model(*args, **kwargs))
        self.take(build)
        return found


def _export(module: nn.Module, arguments: CallArguments) -> tuple[ExportedGraph, OutputForm]:
    builds: list[Callable[[Iterator[Any]], Any]] = []
    call = _FlatCall(module, arguments, builds.append)
    call.training = module.training
    values = tuple(each.detach() for each in arguments.values.values())
    exported = export(call, values, {}, {"leaves": free_sizes(values)})
    graph = exported.root.graph
    for node in graph.nodes:
        if node.op == "placeholder":
            number = int(str(node.target).removeprefix("leaves_"))
            node.target = list(arguments.values)[number]
        if node.target is torch.ops.aten.linear.default:
            node.target = F.linear  # whose weights' gradients may be added in place
        if "_pipe_split" in str(node.target):
            node.target = stage_boundary
        stack = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
        node.meta["nn_module_stack"] = dict.fromkeys(path.removeprefix("model").removeprefix(".") for path in stack)
    output = next(node for node in graph.nodes if node.op == "output").args[0]
    return exported, OutputForm(tuple(output), builds[-1])


def _where(module: nn.Module) -> str:
    try:
        code = type(module).forward.__code__
        return f"{code.co_filename}:{code.co_firstlineno}"
    except AttributeError:
        return "of no known place"
