"""A module's graph by ``torch.export``: operations on tensors, with sizes left free where its forward lets them be."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx, nn

from paceline.errors import first_line

_GUARDS: Final = "_guards_fn"


@dataclass(frozen=True)
class ExportedGraph:
    """The graph of a module that was called with some arguments."""

    root: fx.GraphModule
    """Holds the graph, and the module's own parameters and buffers under their names."""
    arguments: Any
    """The structure of the arguments, as ``torch.utils._pytree`` has it."""
    returned: Any
    """The structure of what the module returns."""
    check: Callable[..., None] | None
    """Raises AssertionError for arguments that the graph is not for."""
    checked: tuple[str, ...]
    """The names of the graph's arguments that :attr:`check` takes."""

    def refusal(self, arguments: Mapping[str, Any]) -> str | None:
        """Return why the graph is not for these arguments, by name; None if it is."""
        if self.check is not None:
            try:
                self.check(*(arguments[name] for name in self.checked))
            except AssertionError as error:
                return first_line(error)
        return None


def export(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Any) -> ExportedGraph:
    """Return the graph of a module's forward; `sizes` are ``torch.export``'s ``dynamic_shapes``.

    Raises whatever ``torch.export`` does for a forward that it cannot follow.
    """
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):  # the graph, where it fails
        program = torch.export.export(module, args, kwargs, dynamic_shapes=sizes, strict=False)
    sys.stderr.write(printed.getvalue())
    root: Any = program.module()
    check, checked = None, []
    for node in list(root.graph.nodes):
        if node.op == "call_module" and node.target == _GUARDS:
            check, checked = root.get_submodule(_GUARDS), [each.name for each in node.all_input_nodes]
            root.graph.erase_node(node)
    return ExportedGraph(root, program.call_spec.in_spec, program.call_spec.out_spec, check, tuple(checked))


def free_sizes(value: Any, *, first_only: bool = False) -> Any:
    """Return what leaves the sizes of tensors free, or their first ones, wherever a forward does not decide by them."""

    def of_tensor(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return None
        free = range(min(leaf.dim(), 1)) if first_only else [k for k, size in enumerate(leaf.shape) if size > 1]
        return dict.fromkeys(free, torch.export.Dim.AUTO) or None

    return torch.utils._pytree.tree_map(of_tensor, value)
