"""In which dimension each tensor of a model's output has the batch: found on shapes alone, with two sizes of batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.torch.strategies.pipeline.graph import LayerGraph
from paceline.torch.strategies.pipeline.values import batch_size


def row_dimensions(graph: LayerGraph, arguments: Mapping[str, Any]) -> list[int]:
    """Return by tensor of a graph's output the first dimension that grows with the rows of `arguments`, else 0.

    An LSTM's state, say, has its layers in dimension 0 and the batch in dimension 1. Of a graph with modules whose
    result depends on values it is not known, and taken to be 0.
    """
    rows = batch_size(list(arguments.values()))
    try:
        found = [
            _shapes(graph, {name: _grown(value, rows, more) for name, value in arguments.items()}) for more in (1, 2)
        ]
    except Exception:  # whatever a module says that is run on shapes alone
        return []
    return [
        next((k for k, (a, b) in enumerate(zip(small, large, strict=False)) if a != b), 0)
        for small, large in zip(*found, strict=False)
    ]


def _grown(value: Any, rows: int, more: int) -> Any:
    is_cut = isinstance(value, Tensor) and value.dim() > 0 and len(value) == rows
    return torch.cat([value, *[value[:1]] * more]) if is_cut else value


def _shapes(graph: LayerGraph, arguments: Mapping[str, Any]) -> list[list[int]]:
    nodes: fx.Graph = graph.layers[0].nodes[0].graph
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        values = [mode.from_tensor(each) if isinstance(each, Tensor) else each for each in arguments.values()]
        returned = fx.Interpreter(graph.root, graph=nodes).run(*values, enable_io_processing=False)
    return [list(each.shape) for each in torch.utils._pytree.tree_leaves(returned) if isinstance(each, Tensor)]
