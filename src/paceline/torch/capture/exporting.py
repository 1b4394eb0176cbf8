"""Capture the graph of a forward with ``torch.export``. Sizes stay dynamic if the forward allows it."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from typing_extensions import override

from paceline.errors import first_line
from paceline.torch.capture.calls import CallArguments, OutputForm, unfold
from paceline.torch.capture.graph import CapturedGraph, stage_boundary

_GUARDS: Final = "_guards_fn"


class _FlatCall(nn.Module):
    """A model whose arguments and result are flat lists."""

    def __init__(self, model: nn.Module, arguments: CallArguments, take_build: Callable[[Any], None]) -> None:
        """`take_build` receives the function that builds the result, because torch.export restores attributes."""
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
    """Return the graph of a module's forward. Raises the exceptions of ``torch.export``."""
    builds: list[Callable[[Iterator[Any]], Any]] = []
    call = _FlatCall(module, arguments, builds.append)
    call.training = module.training
    values = tuple(value.detach() if isinstance(value, Tensor) else value for value in arguments.values.values())
    sizes = [_free_sizes(value) for value in values]
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):  # torch.export prints the graph if it fails
        program = torch.export.export(call, values, {}, dynamic_shapes={"leaves": tuple(sizes)}, strict=False)
    sys.stderr.write(printed.getvalue())
    root: Any = program.module()
    check = _take_check(root)
    names = list(arguments.values)
    for node in root.graph.nodes:
        if node.op == "placeholder":
            node.target = names[_place(node.target)]
        if node.target is torch.ops.aten.linear.default:
            node.target = F.linear  # F.linear can add the gradients of its weights in place
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
    """Return the ``dynamic_shapes`` of an argument. torch.export finds the sizes on which the forward depends."""
    if not isinstance(value, Tensor):
        return None
    return {k: torch.export.Dim.AUTO for k, size in enumerate(value.shape) if size > 1} or None


def _take_check(root: Any) -> Callable[[Sequence[Any]], str | None]:
    """Remove the check of the arguments from a graph and return the check as a function."""
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
    """Return the position of an argument among the leaves of a :class:`_FlatCall`."""
    return int(str(target).removeprefix("leaves_"))
