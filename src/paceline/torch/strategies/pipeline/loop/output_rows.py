"""Combine the outputs of microbatches into the output of the batch: join rows, add numbers such as a loss.

The model's graph shows how a number is computed. If the number is a sum over rows, the microbatches' numbers are added.
If it is a mean, they are averaged. The weight of a microbatch is its number of rows or, for a classification loss, its
number of targets that are not ignored. The targets depend on the model's arguments alone, so the weights are known
before the forward.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch import Tensor, fx

from paceline.errors import UsageError
from paceline.torch.capture.graph import attribute, changes_in_place, draws, name_of
from paceline.torch.strategies.pipeline.loop.batches import add_numbers, row_bounds
from paceline.torch.strategies.pipeline.loop.losses import BY_CLASS, ELEMENTWISE, count_targets
from paceline.torch.strategies.pipeline.loop.row_dimensions import RowShapes
from paceline.torch.strategies.pipeline.run.layers import LayerGraph
from paceline.torch.strategies.pipeline.run.values import plain_values, put_together, take_apart
from paceline.torch.strategies.splitting import check_outputs

_PASSING: Final = {"alias", "clone", "contiguous", "detach", "double", "float", "neg", "squeeze", "to", "_to_copy"}
_BY_CLASS: Final = {*(loss.__name__ for loss in BY_CLASS), "cross_entropy_loss", "nll_loss_nd"}
_ELEMENTWISE: Final = {*(loss.__name__ for loss in ELEMENTWISE), "soft_margin_loss", "kl_div"}
_REDUCTIONS: Final = ("none", "mean", "sum")  # the indexes are the numbers in PyTorch's operations


@dataclass(frozen=True, slots=True)
class NumberRule:
    """The rule for computing the batch's number from the microbatches' numbers."""

    kind: Literal["constant", "sum", "mean over rows", "mean over targets"]
    counted: fx.Node | None = None
    """For a mean over targets: the node that computes the targets, or the number by which the model divides a sum."""
    ignored: int | None = None
    by_class: fx.Node | None = None
    plain: Mapping[fx.Node, Any] = field(default_factory=dict, compare=False)
    """The values of nodes that compute the same number in all batches."""
    terms: tuple[NumberRule, ...] = ()
    """If the number is a sum of two numbers: their rules, which must result in equal weights."""

    def weights(self, graph: LayerGraph, arguments: Sequence[Mapping[str, Any]], rows: Sequence[int]) -> list[float]:
        """Return the weight of each microbatch's number, given each microbatch's arguments and number of rows."""
        if self.terms:
            first, second = (term.weights(graph, arguments, rows) for term in self.terms)
            if first != second:
                raise UsageError(
                    "the model returns a sum of two losses whose counted examples or targets have different shares in "
                    "the microbatches. Return the losses separately, and add them in the training loop"
                )
            return first
        if self.kind == "sum":
            return [1.0] * len(rows)
        counts = [float(count) for count in rows]
        if self.counted is not None:
            counts = [self._count(graph, part) for part in arguments]
        total = sum(counts)
        return [count / total if total else float("nan") for count in counts]

    def _count(self, graph: LayerGraph, arguments: Mapping[str, Any]) -> float:
        assert self.counted is not None
        counted = _evaluate(self.counted, graph, arguments, self.plain)
        if self.ignored is None:
            return float(counted)
        by_class = None if self.by_class is None else _evaluate(self.by_class, graph, arguments, self.plain)
        return float(count_targets(counted, self.ignored, by_class))


def rule_of(node: fx.Node, graph: LayerGraph, shapes: RowShapes) -> NumberRule:
    """Return the rule for a number that a graph computes. Raises UsageError if no rule fits."""
    rule = _find(node, graph, shapes)
    if rule is None:
        raise UsageError(
            f"the model returns a number ({node.name}) without a known rule for combining the microbatches' numbers. "
            "A pipeline supports means and sums over a whole tensor with independent rows, and torch's losses of the "
            "model's arguments, times constants. Return the tensor, and compute the number in the training loop"
        )
    return rule


def _find(node: Any, graph: LayerGraph, shapes: RowShapes) -> NumberRule | None:
    if not isinstance(node, fx.Node) or shapes.role(node) == "constant":
        return NumberRule("constant")
    name = name_of(node)
    if name in ("mean", "sum") and len(node.args) == 1 and not {"dim", "axis"} & set(node.kwargs):
        return NumberRule("sum" if name == "sum" else "mean over rows") if _has_rows(node.args, shapes) else None
    if name in _BY_CLASS or name in _ELEMENTWISE:
        return _of_loss(name, _arguments_of(node), graph, shapes)
    if name in _PASSING:
        return _find(node.args[0], graph, shapes)
    rules = [_find(arg, graph, shapes) for arg in node.args[:2]]
    if len(rules) < 2 or None in rules:
        return None
    return _combined(name, node, rules[0], rules[1], graph)  # type: ignore[arg-type]


def _combined(name: str, node: fx.Node, a: NumberRule, b: NumberRule, graph: LayerGraph) -> NumberRule | None:
    if name in ("add", "sub", "iadd", "add_", "rsub"):
        if a == b:
            return a
        constants = [rule.kind == "constant" for rule in (a, b)]
        other = b if constants[0] else a
        if any(constants):
            return other if other.kind != "sum" else None
        return None if "sum" in (a.kind, b.kind) else NumberRule(a.kind, terms=(a, b))
    if name in ("mul", "imul", "mul_"):
        return b if a.kind == "constant" else a if b.kind == "constant" else None
    if name in ("div", "truediv", "true_divide", "div_"):
        if b.kind == "constant":
            return a
        divisor = node.args[1]
        if a.kind == b.kind == "sum" and divisor in graph.free:
            return NumberRule("mean over targets", divisor)  # type: ignore[arg-type]
    return None


def _has_rows(values: Sequence[Any], shapes: RowShapes) -> bool:
    """Return whether one dimension of an elementwise operation's tensors has a row for each example."""
    nodes = [value for value in values if isinstance(value, fx.Node)]
    rows = [node for node in nodes if shapes.role(node) == "rows"]
    return len({shapes.from_last(node) for node in rows}) == 1 and all(
        node in rows or shapes.role(node) == "constant" for node in nodes
    )


def _of_loss(name: str, options: Mapping[str, Any], graph: LayerGraph, shapes: RowShapes) -> NumberRule | None:
    reduction = options.get("reduction", "mean")
    reduction = _REDUCTIONS[reduction] if isinstance(reduction, int) else reduction
    if reduction not in ("mean", "sum"):
        return None
    if name in _ELEMENTWISE:
        has_rows = _has_rows(list(options.values()), shapes)
        return NumberRule("sum" if reduction == "sum" else "mean over rows") if has_rows else None
    target, by_class = options["target"], options.get("weight")
    score = options.get("input", options.get("self"))
    if any(shapes.role(node) != "rows" or shapes.dimension(node) != 0 for node in (score, target)):
        return None
    if reduction == "sum":
        return NumberRule("sum")
    ignored = options.get("ignore_index", -100)
    plain = shapes.plain_values()
    if not _is_known(target, graph, plain) or (isinstance(ignored, fx.Node) and ignored not in plain):
        return None
    if by_class is not None and by_class.op != "get_attr":
        return None
    return NumberRule("mean over targets", target, int(plain.get(ignored, ignored)), by_class, plain)


def _arguments_of(node: fx.Node) -> dict[str, Any]:
    if isinstance(node.target, torch._ops.OpOverload):
        names = [argument.name for argument in node.target._schema.arguments]
        return {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    function: Callable[..., Any] = node.target  # type: ignore[assignment]
    return dict(inspect.signature(function).bind(*node.args, **node.kwargs).arguments)


def _is_known(node: fx.Node, graph: LayerGraph, plain: Mapping[fx.Node, Any]) -> bool:
    """Return whether a node can be computed from the model's arguments and constant numbers alone."""
    if node.op == "placeholder" or node in graph.free or node in plain:
        return True
    root = graph.captured.root
    is_call = node.op in ("call_function", "call_method") and not changes_in_place(node, root)
    return is_call and not draws(node, root) and all(_is_known(arg, graph, plain) for arg in node.all_input_nodes)


def _evaluate(node: fx.Node, graph: LayerGraph, arguments: Mapping[str, Any], plain: Mapping[fx.Node, Any]) -> Any:
    if node in plain:
        return plain[node]
    if node.op == "placeholder":
        return arguments[str(node.target)]
    if node.op == "get_attr":
        return attribute(graph.captured.root, str(node.target))
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: _evaluate(arg, graph, arguments, plain))
    with torch.no_grad():
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]


NumberWeights = Callable[[int], Sequence[float]]
"""A function that returns the weights of the microbatches' numbers, given the number of an output."""


class OutputRows:
    """Finds the batch dimension of a model's outputs, and the weights of numbers, for one batch."""

    def __init__(
        self, graph: LayerGraph, shapes: Callable[[], RowShapes] | None, arguments: Sequence[Mapping[str, Any]]
    ) -> None:
        """`shapes` is None on a rank without the last stage. `arguments` are the model's arguments by microbatch."""
        self._graph = graph
        self._shapes = shapes
        self._arguments = arguments

    def dimension(self, leaf: int) -> int | None:
        """Return the batch dimension of an output tensor; None if it is unknown, 0 on ranks without the last stage."""
        return 0 if self._shapes is None else self._shapes().output_dimension(leaf)

    def number_weights(self, leaf: int, rows: Sequence[int]) -> list[float]:
        """Return one weight per microbatch for output `leaf`, which is a single number such as a loss.

        The batch's number is the sum of the microbatches' numbers times their weights. `rows` has the number of rows of
        each microbatch. Raises UsageError if the weights are unknown.
        """
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
                "the model returns a plain number that depends on the batch, such as its size, so microbatches return "
                "different numbers. Return a tensor from which the loop can compute the number"
            )


def joined_output(
    parts: Sequence[Any], rows: int, dimension_of: Callable[[int], int | None], weights: NumberWeights
) -> tuple[Any, list[Tensor]]:
    """Join the outputs of microbatches. Return the description and the tensors of the output of a batch of `rows`.

    If ``dimension_of(leaf)`` is None (unknown), the batch dimension is 0, unless the shapes allow another dimension.
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
            f"the model returned a tensor of shape {tuple(column[0].shape)} for {sizes[0]} examples, and its batch "
            "dimension is unknown, because a module depends on values and cannot run on shapes alone. Use another "
            "number of --microbatches, or remove the dependence on values"
        )
    return 0
