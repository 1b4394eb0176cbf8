"""Find the batch dimension of each value in a model's graph, by comparing its shapes for two batch sizes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Literal

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from typing_extensions import override

from paceline.torch.capture.graph import name_of
from paceline.torch.strategies.pipeline.loop.batches import batch_size
from paceline.torch.strategies.pipeline.run.layers import LayerGraph

RowRole = Literal["constant", "size", "rows", "mixed"]
"""A value's relation to the batch's rows: independent, their number, one item per row, or a mix of several rows."""

_SIZED: Final = {
    "arange", "as_strided", "broadcast_to", "empty", "expand", "flatten", "full", "getitem", "narrow", "new_empty",
    "new_full", "new_ones", "new_zeros", "ones", "repeat", "reshape", "resize", "slice", "split", "tile", "unflatten",
    "view", "zeros", "_unsafe_view",
}  # fmt: skip
"""Operations whose arguments may contain sizes of tensors."""

_ALONG: Final = {
    "argsort": 1, "cummax": 1, "cummin": 1, "cumprod": 1, "cumsum": 1, "diff": 2, "flip": 1, "log_softmax": 1,
    "logcumsumexp": 1, "normalize": 2, "roll": 2, "softmax": 1, "_log_softmax": 1, "_softmax": 1, "sort": 1,
}  # fmt: skip
"""Operations that combine the items along one dimension without changing the shape, with the position of the argument
that selects the dimension.
"""


class RowShapes:
    """The shapes of a graph's values for two batches: one with one row more than the given batch, one with two more."""

    def __init__(self, graph: LayerGraph, arguments: Mapping[str, Any]) -> None:
        self._root = graph.captured.root
        self._rows = batch_size(list(arguments.values()))
        self._cut = {name for name, value in arguments.items() if _has_rows(value, self._rows)}
        nodes = graph.captured.graph
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad(), _quiet():
            fakes = {k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in arguments.items()}
            self._values = [self._run(nodes, fakes, more) for more in (1, 2)]
        self._outputs = [node for node in graph.captured.output.nodes if self._is_tensor(node)]
        self._plain = [n for n in graph.captured.output.nodes if isinstance(n, fx.Node) and n not in self._outputs]
        self._roles: dict[fx.Node, RowRole] = {}
        for node in nodes.nodes:
            if node.op != "output":
                self._roles[node] = self._find_role(node)

    def role(self, node: fx.Node) -> RowRole:
        """Return a node's relation to the rows; "mixed" if the relation is unknown."""
        return self._roles[node]

    def plain_values(self) -> dict[fx.Node, Any]:
        constants = [node for node, role in self._roles.items() if role == "constant" and node in self._values[0]]
        return {node: self._values[0][node] for node in constants if isinstance(self._values[0][node], (int, float))}

    @property
    def has_plain_of_rows(self) -> bool:
        return any(self._roles[node] != "constant" for node in self._plain)

    def output_node(self, leaf: int) -> fx.Node:
        node: fx.Node = self._outputs[leaf]
        return node

    def output_dimension(self, leaf: int) -> int | None:
        """Return an output's first dimension that grows with the batch; 0 if none grows; None if it is unknown."""
        node = self._outputs[leaf]
        return (self.dimension(node) or 0) if self._is_known(node) else None

    def _is_known(self, node: fx.Node) -> bool:
        return not any(values[node] is _Unknown for values in self._values)

    def _is_tensor(self, node: Any) -> bool:
        return (
            isinstance(node, fx.Node)
            and name_of(node) not in ("item", "tolist")
            and (not self._is_known(node) or isinstance(self._values[0][node], Tensor))
        )

    def dimension(self, node: fx.Node) -> int | None:
        """Return the first dimension of a node's tensor that grows with the batch; None if none grows."""
        return next(iter(self._grown(node)[0]), None)

    def from_last(self, node: fx.Node) -> int | None:
        """Return :meth:`dimension` as a negative index, counted from the last dimension."""
        dimension = self.dimension(node)
        return None if dimension is None else dimension - int(self._values[0][node].dim())

    def _run(self, nodes: fx.Graph, arguments: Mapping[str, Any], more: int) -> dict[fx.Node, Any]:
        grown = [
            torch.cat([value, *[value[:1]] * more]) if name in self._cut else value for name, value in arguments.items()
        ]
        run = _ShapeRun(self._root, garbage_collect_values=False, graph=nodes)
        run.run(*grown, enable_io_processing=False)
        return run.env

    def _grown(self, node: fx.Node) -> list[list[int]]:
        pairs = zip(*(pytree.tree_leaves(values[node]) for values in self._values), strict=False)
        return [
            [k for k, (a, b) in enumerate(zip(small.shape, large.shape, strict=False)) if a != b]
            for small, large in pairs
            if isinstance(small, Tensor)
        ]

    def _find_role(self, node: fx.Node) -> RowRole:
        if node.op == "placeholder":
            return "rows" if node.target in self._cut else "constant"
        inputs = {self._roles[arg] for arg in node.all_input_nodes}
        if inputs <= {"constant"}:
            return "constant"
        if not self._is_known(node) or "mixed" in inputs:
            return "mixed"
        grown = self._grown(node)
        if not grown:
            return "constant" if self._values[0][node] == self._values[1][node] else "size"
        if "rows" not in inputs and not any(grown):
            return "constant"
        is_sized = "size" not in inputs or name_of(node) in _SIZED
        return "rows" if is_sized and self._keeps_rows(node, grown) else "mixed"

    def _keeps_rows(self, node: fx.Node, grown: list[list[int]]) -> bool:
        """Return whether a dimension of the tensors is proportional to the rows, and the node does not mix rows."""
        small, large = (
            [leaf for leaf in pytree.tree_leaves(values[node]) if isinstance(leaf, Tensor)] for values in self._values
        )
        for a, b, dimensions in zip(small, large, grown, strict=True):
            if len(dimensions) > 1 or any(
                a.shape[k] * (self._rows + 2) != b.shape[k] * (self._rows + 1) for k in dimensions
            ):
                return False
        return any(grown) and [self._along(node, small[0].dim())] != grown[0]

    def _along(self, node: fx.Node, dims: int) -> int | None:
        if node.op == "call_module":
            dimension = getattr(self._root.get_submodule(str(node.target)), "dim", None)
        else:
            place = _ALONG.get(name_of(node))
            if place is None:
                return None
            given = node.args[place] if len(node.args) > place else -1 if place == 1 else 1
            dimension = node.kwargs.get("dim", node.kwargs.get("dims", given))
        first = dimension[0] if isinstance(dimension, (tuple, list)) and dimension else dimension
        return first % max(dims, 1) if isinstance(first, int) else None


def _has_rows(value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == rows


class _Unknown:
    """The value of a node that cannot be computed from shapes alone."""


class _ShapeRun(fx.Interpreter):
    @override
    def run_node(self, n: fx.Node) -> Any:
        if n.op != "output" and any(self.env.get(arg) is _Unknown for arg in n.all_input_nodes):
            return _Unknown
        try:
            return super().run_node(n)
        except Exception:  # a module may raise any error for tensors without values
            return _Unknown


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
