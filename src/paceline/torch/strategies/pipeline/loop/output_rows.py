"""Combine the outputs of microbatches to the output of the batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.torch.strategies.pipeline.loop.batches import add_numbers, row_bounds
from paceline.torch.strategies.pipeline.loop.numbers import rule_of
from paceline.torch.strategies.pipeline.loop.row_dimensions import RowShapes
from paceline.torch.strategies.pipeline.run.layers import LayerGraph
from paceline.torch.strategies.pipeline.run.values import plain_values, put_together, take_apart
from paceline.torch.strategies.splitting import check_outputs

NumberWeights = Callable[[int], Sequence[float]]
"""The function returns the weights of the microbatches' numbers, given the leaf of the output."""


class OutputRows:
    """The rows of one batch in the output of a model."""

    def __init__(
        self, graph: LayerGraph, shapes: Callable[[], RowShapes] | None, arguments: Sequence[Mapping[str, Any]]
    ) -> None:
        """`shapes`: None on a rank without the last stage. `arguments`: the model's, by microbatch."""
        self._graph = graph
        self._shapes = shapes
        self._arguments = arguments

    def dimension(self, leaf: int) -> int | None:
        """Return the batch dimension of an output tensor; 0 on ranks without the last stage; None if unknown."""
        return 0 if self._shapes is None else self._shapes().output_dimension(leaf)

    def number_weights(self, leaf: int, rows: Sequence[int]) -> list[float]:
        """Return the weight of each microbatch's number in the batch's. Raises UsageError if it is unknown."""
        assert self._shapes is not None
        shapes = self._shapes()
        return rule_of(shapes.output_node(leaf), self._graph, shapes).weights(self._graph, self._arguments, rows)

    def check_plain(self, outputs: Sequence[Any]) -> None:
        """Raise UsageError if the model returns plain numbers that differ between microbatches."""
        if len(outputs) < 2:
            return
        assert self._shapes is not None
        found = [plain_values(take_apart(output, "the model's output")[0]) for output in outputs]
        if any(numbers != found[0] for numbers in found) or self._shapes().has_plain_of_rows:
            raise UsageError(
                "the model returns a plain number that depends on the batch, for instance its size, so that each "
                "microbatch returns another one: return a tensor from which the loop can compute it"
            )


def joined_output(
    parts: Sequence[Any], rows: int, dimension_of: Callable[[int], int | None], weights: NumberWeights
) -> tuple[Any, list[Tensor]]:
    """Return the description and the tensors of the output of a batch of `rows`, given its microbatches' outputs.

    If ``dimension_of(leaf)`` is None (unknown), the batch dimension is 0, unless the shapes allow another one.
    Raises UsageError for an ambiguous or wrong dimension.
    """
    apart = [take_apart(part, "the model's output") for part in parts]
    sizes = [end - first for first, end in itertools.pairwise(row_bounds(rows, len(parts)))]
    dimensions = [
        _dimension(dimension_of(leaf), column, sizes)
        for leaf, column in enumerate(zip(*(tensors for _, tensors in apart), strict=False))
    ]
    rows_first = [
        [tensor.movedim(dimensions[leaf], 0) if tensor.dim() else tensor for leaf, tensor in enumerate(tensors)]
        for _, tensors in apart
    ]
    check_outputs(rows_first, sizes)
    tensors = [
        torch.cat(column).movedim(0, dimensions[leaf]) if column[0].dim() else add_numbers(column, weights(leaf))
        for leaf, column in enumerate(zip(*rows_first, strict=True))
    ]
    whole = put_together(apart[0][0], tensors)
    return take_apart(whole, "the model's output")


def _dimension(known: int | None, column: Sequence[Tensor], sizes: Sequence[int]) -> int:
    if known is not None:
        return known
    later = range(1, min(tensor.dim() for tensor in column))
    if len(column) > 1 and any(all(t.shape[k] == n for t, n in zip(column, sizes, strict=True)) for k in later):
        raise UsageError(
            f"the model returned a tensor of shape {tuple(column[0].shape)} for {sizes[0]} examples, and it is not "
            "known which dimension is the batch: a module within it decides by values, so that it cannot be "
            "tried on shapes alone; take another number of --microbatches, or have the module not decide by values"
        )
    return 0
