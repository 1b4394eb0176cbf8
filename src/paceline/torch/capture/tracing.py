"""Convert a model's forward to a graph.

``torch.fx`` is tried first, module by module. The graph then calls the model's own modules, with their training mode
and buffers, and supports all sizes. A module whose forward cannot be traced becomes one node. If this module is the
model itself, or contains several layers, ``torch.export`` is used instead. ``torch.export`` traces single operations.
Its graph is valid only for the current modes of the modules, and for the sizes on which the forward depends.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from paceline.errors import UsageError, first_line
from paceline.torch.capture.graph import CallArguments, CapturedGraph, OutputForm, stage_boundary, unfold

_GUARDS: Final = "_guards_fn"


class _FlatCall(nn.Module):
    """A model whose arguments and result are flat lists."""

    def __init__(self, model: nn.Module, arguments: CallArguments, take_build: Callable[[Any], None]) -> None:
        """`take_build` receives the function that builds the result: torch.export would reset an attribute for it."""
        super().__init__()
        self.model = model
        self.arguments = arguments
        self.take_build = take_build

    @override
    def forward(self, *leaves: Any) -> list[Any]:
        args, kwargs = self.arguments.fill(leaves)
        values, build = unfold(self.model(*args, **kwargs))
        self.take_build(build)
        return values


def export(module: nn.Module, arguments: CallArguments) -> CapturedGraph:
    """Return a forward's graph, with dynamic sizes if possible. Raises the exceptions of ``torch.export``."""
    builds: list[Callable[[Iterator[Any]], Any]] = []
    call = _FlatCall(module, arguments, builds.append)
    call.training = module.training
    values = tuple(value.detach() if isinstance(value, Tensor) else value for value in arguments.values.values())
    sizes = [_free_sizes(value) for value in values]
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):  # catch the graph that a failing torch.export prints
        program = torch.export.export(call, values, {}, dynamic_shapes={"leaves": tuple(sizes)}, strict=False)
    sys.stderr.write(printed.getvalue())
    root: Any = program.module()
    check = _take_check(root)
    names = list(arguments.values)
    for node in root.graph.nodes:
        if node.op == "placeholder":
            node.target = names[_place(node.target)]
        if node.target is torch.ops.aten.linear.default:
            node.target = F.linear  # the pipeline can add the weight gradients of F.linear in place
        if "_pipe_split" in str(node.target):
            node.target = stage_boundary
        stack = [
            (path.removeprefix("model").removeprefix("."), kind)
            for path, kind in node.meta.get("nn_module_stack", {}).values()
        ]
        node.meta["nn_module_stack"] = {path: (path, kind) for path, kind in stack}
    output = OutputForm(tuple(root.graph.output_node().args[0]), builds[-1])
    return CapturedGraph(root.graph, output, root, check=check, is_exported=True)


def _free_sizes(value: Any) -> Any:
    """Return the ``dynamic_shapes`` of an argument for torch.export.

    Every size above 1 is ``Dim.AUTO``, so torch.export decides which of these sizes must stay constant.
    """
    if not isinstance(value, Tensor):
        return None
    return {k: torch.export.Dim.AUTO for k, size in enumerate(value.shape) if size > 1} or None


def _take_check(root: Any) -> Callable[[Sequence[Any]], str | None]:
    """Remove the check of the arguments from a graph, and return this check as a function."""
    found = list(root.graph.find_nodes(op="call_module", target=_GUARDS))
    if not found:
        return lambda _: None
    guards, places = root.get_submodule(_GUARDS), [_place(node.target) for node in found[0].all_input_nodes]
    root.graph.erase_node(found[0])

    def check(values: Sequence[Any]) -> str | None:
        try:
            guards(*(values[place] for place in places))
        except AssertionError as error:
            return first_line(error)
        return None

    return check


def _place(target: Any) -> int:
    return int(str(target).removeprefix("leaves_"))


_HOLDING_LAYERS: Final = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)


def capture(
    module: nn.Module, arguments: CallArguments, *, opens_torch_modules: bool, refusal: str = ""
) -> CapturedGraph:
    """Capture the graph of a model for a call with these arguments. Raises UsageError if neither tracer succeeds.

    With `opens_torch_modules`, trace inside torch's losses and Transformers too. `refusal` is the reason why
    ``torch.fx`` must not be used; "" if it may be used.
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
    except Exception as error:  # the arguments are proxies, so the model's code may raise any error
        if graph is None:
            raise UsageError(
                f"{type(module).__name__} cannot be cut: its forward ({_where(module)}) cannot be traced. torch.fx: "
                f"{traced}; torch.export: {first_line(error)}. A forward that is cut may not depend on the values of "
                "tensors. Put such a part into its own module, which stays whole"
            ) from error
        for name in graph.whole:
            graph.whole[name] += f"; torch.export: {first_line(error)}"
        return graph


class _ForwardError(Exception):
    """Raised if the forward of the model itself cannot be traced."""

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
    """Return whether a module contains several modules with parameters, so that a cut inside it may be useful."""
    return sum(any(True for _ in inner.parameters(recurse=False)) for inner in module.modules()) > 1


class _NotTraceableError(Exception):
    """Raised if a trace of a forward would be incomplete."""


class _Tracer(fx.Tracer):
    """Traces all modules except `whole`.

    It rejects forwards that turn gradients or autocast on or off, or draw random numbers without an input tensor.
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
            raise _NotTraceableError(
                "its forward calls a random function without a tensor that depends on the arguments, such as "
                "torch.rand(3); torch.rand_like(x) can be traced"
            )
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
        """Return a context in which ``pipe_split()`` adds a boundary node to the graph."""
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
        return "in an unknown file"
