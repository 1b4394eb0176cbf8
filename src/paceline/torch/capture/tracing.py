"""Convert a model's forward to a graph.

``torch.fx`` is tried first, module by module. Modules stay the same objects, with their training mode and buffers, and
all sizes stay dynamic. A module whose forward cannot be traced becomes one node. If this is the model itself, or a
module that contains several layers, ``torch.export`` is used instead. It traces operation by operation, for the current
modes of all modules, and for the sizes on which the forward depends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, Final

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from paceline.errors import UsageError, first_line
from paceline.torch.capture.calls import CallArguments, OutputForm, unfold
from paceline.torch.capture.exporting import export
from paceline.torch.capture.graph import CapturedGraph, stage_boundary

_HOLDING_LAYERS: Final = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)


def capture(
    module: nn.Module, arguments: CallArguments, *, opens_torch_modules: bool, refusal: str = ""
) -> CapturedGraph:
    """Capture the graph of a model for a call with these arguments. Raises UsageError if there is none.

    `opens_torch_modules`: also trace through torch's losses and Transformers. `refusal`: a reason against ``torch.fx``.
    """
    graph: CapturedGraph | None = None
    traced = refusal
    if not refusal:
        try:
            graph = _trace(module, arguments, opens_torch_modules=opens_torch_modules)
        except _ForwardError as error:
            traced = first_line(error.reason)
    if graph is not None and not any(_hides_layers(module.get_submodule(name)) for name in graph.whole):
        return graph
    try:
        return export(module, arguments)
    except UsageError:
        raise
    except Exception as error:  # the model's code may raise any error for tracing proxies
        if graph is None:
            raise UsageError(
                f"{type(module).__name__} cannot be cut: its forward ({_where(module)}) cannot be traced. torch.fx: "
                f"{traced}; torch.export: {first_line(error)}. A forward that is cut may not depend on the values of "
                "tensors. Put such a part into its own module, which stays whole"
            ) from error
        for name in graph.whole:
            graph.whole[name] += f"; torch.export says: {first_line(error)}"
        return graph


class _ForwardError(Exception):
    """The model's own forward cannot be traced."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


def _trace(module: nn.Module, arguments: CallArguments, *, opens_torch_modules: bool) -> CapturedGraph:
    whole: dict[str, str] = {}
    while True:
        tracer = _Tracer(arguments, whole, opens_torch_modules=opens_torch_modules)
        try:
            with tracer.marking():
                graph = tracer.trace(module)
        except UsageError:
            raise
        except Exception as error:
            name = tracer.culprit
            if name and name not in whole:
                inner = module.get_submodule(name)
                whole[name] = f"{name} ({type(inner).__name__}, {_where(inner)}) stays whole: {first_line(error)}"
                continue
            raise _ForwardError(error) from error
        assert tracer.build is not None
        returned: Any = graph.output_node().args[0]
        output = OutputForm(tuple(returned), tracer.build)
        return CapturedGraph(graph, output, module, whole)


def _hides_layers(module: nn.Module) -> bool:
    """Return whether a module contains several modules with parameters, so that it may be worth cutting."""
    return sum(any(True for _ in inner.parameters(recurse=False)) for inner in module.modules()) > 1


class _NotTraceableError(Exception):
    """A trace would be incomplete."""


class _Tracer(fx.Tracer):
    """Traces through all modules except `whole`, and records failed modules and the positions of ``pipe_split()``.

    A trace would lose a region's modes, and random numbers that depend on no argument. Such forwards are rejected.
    """

    proxy_buffer_attributes = True

    def __init__(self, arguments: CallArguments, whole: Collection[str], *, opens_torch_modules: bool) -> None:
        super().__init__()
        self._arguments = arguments
        self._whole = whole
        self._opened = (nn.modules.loss._Loss, *_HOLDING_LAYERS) if opens_torch_modules else ()
        self._modes = _modes()
        self._random = _random_states()
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
    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self._modes:
            raise _NotTraceableError("part of its forward turns gradients or autocast on or off")
        if not all(map(torch.equal, _random_states(), self._random)):
            raise _NotTraceableError("its forward draws random numbers that depend on no argument")
        return super().create_node(*args, **kwargs)

    @override
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_leaf = super().is_leaf_module(m, module_qualified_name) and not isinstance(m, self._opened)
        return is_leaf or module_qualified_name in self._whole

    @override
    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            if self.culprit is None:
                self.culprit = self.path_of_module(m)
            raise

    def marking(self) -> TorchFunctionMode:
        """Return a context in which ``pipe_split()`` adds a node."""
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


def _modes() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")


def _random_states() -> list[torch.Tensor]:
    on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *on_devices]


def _where(module: nn.Module) -> str:
    try:
        code = type(module).forward.__code__
        return f"{code.co_filename}:{code.co_firstlineno}"
    except AttributeError:
        return "of no known place"
