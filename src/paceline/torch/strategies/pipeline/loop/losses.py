"""Compute a loss as a sum of parts, one per microbatch. The sum is exactly the loss of the whole batch.

Each part is divided by the number of targets in the whole batch. This number depends on the targets alone. So
microbatches of unequal size, ignored targets and class weights do not change the result.
"""

from __future__ import annotations

import inspect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from typing_extensions import Self, override

from paceline.torch.strategies.pipeline.loop.batches import row_bounds

ELEMENTWISE: Final[tuple[Any, ...]] = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
)  # fmt: skip
BY_CLASS: Final[tuple[Any, ...]] = (F.cross_entropy, F.nll_loss)
LOSSES: Final[tuple[Any, ...]] = (*ELEMENTWISE, *BY_CLASS)

_RESHAPING: Final = ("view", "reshape", "flatten", "squeeze", "unsqueeze", "transpose", "permute", "swapaxes", "mT")
_POINTWISE: Final = ("float", "double", "contiguous", "sigmoid", "tanh", "relu", "to")
_NORMALIZING: Final = ("log_softmax", "softmax")
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class RowOperation:
    """A call of a function on an output that is not computed yet. The pipeline makes the call for each microbatch."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __call__(self, tensor: Tensor) -> Tensor:
        result: Tensor = self.function(tensor, *self.args, **self.kwargs)
        return result


def as_operation(
    function: Any, shape: Sequence[int], rows: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[RowOperation, list[int]] | None:
    """If a call computes every row separately, return its operation and the shape of the result, else None.

    `shape` is the shape of the whole tensor, for a batch of `rows`. A view does not mix examples if the length of its
    first dimension is proportional to the number of examples.
    """
    name = getattr(function, "__name__", "")
    if not shape or shape[0] % rows or name not in (*_RESHAPING, *_POINTWISE, *_NORMALIZING):
        return None
    if any(isinstance(leaf, Tensor) for leaf in torch.utils._pytree.tree_leaves((args, kwargs))):
        return None
    if name in _NORMALIZING:
        dim = kwargs.get("dim", args[0] if args else None)
        if not isinstance(dim, int) or dim % max(len(shape), 1) == 0:
            return None
    operation = RowOperation(function, args, dict(kwargs))
    per_example = shape[0] // rows
    shapes = []
    try:
        for size in (rows, rows + 1, 2 * rows + 3):
            result = operation(torch.empty([per_example * size, *shape[1:]], device="meta"))
            shapes.append((size, list(result.shape)))
    except Exception:  # for example a view with a fixed number of rows
        return None
    whole = shapes[0][1]
    if not whole or whole[0] % rows:
        return None
    factor = whole[0] // rows
    if any(found != [factor * size, *whole[1:]] for size, found in shapes):
        return None
    return operation, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialLoss(ABC):
    """Abstract: a term of a loss, which is the sum of one part per microbatch."""

    leaf: int
    base: int = field(default_factory=lambda: next(_numbers))
    """A unique number of the term. The term times a factor has the same number."""
    scale: float | Tensor = 1.0

    @abstractmethod
    def part(self, output: Tensor, rows: int, parts: int, number: int) -> Tensor:
        """Return microbatch `number`'s part, without the factor `scale`. The batch has `rows` rows in `parts` parts."""

    def times(self, factor: float | Tensor) -> Self:
        return replace(self, scale=self.scale * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnedLoss(PartialLoss):
    """A loss that the model itself returns."""

    weights: Callable[[int], Sequence[float]]
    """A function that returns the weight of each microbatch's loss, given the loss's number in the output."""

    @override
    def part(self, output: Tensor, rows: int, parts: int, number: int) -> Tensor:
        weight = self.weights(self.leaf)[number]
        return output * weight if weight else output.nan_to_num() * 0.0  # the mean over no targets is NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLoss(PartialLoss):
    """One loss function of a model's output, as a sum over examples."""

    operations: tuple[RowOperation, ...]
    function: Callable[..., Tensor]
    target: Tensor
    options: Mapping[str, Any]
    norm: float | Tensor
    """The factor of the sum over examples; for a mean, 1 divided by the number of targets."""

    @override
    def part(self, output: Tensor, rows: int, parts: int, number: int) -> Tensor:
        for operation in self.operations:
            output = operation(output)
        bounds = row_bounds(rows, parts)
        factor = len(self.target) // rows
        target = self.target[bounds[number] * factor : bounds[number + 1] * factor]
        return self.function(output, target, **self.options) * self.norm


def as_term(
    function: Any,
    leaf: int,
    operations: tuple[RowOperation, ...],
    shape: Sequence[int],
    rows: int,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> OutputLoss | None:
    """Return the loss that a call of one of :data:`LOSSES` computes; None if the loss is not a sum over rows."""
    if function not in LOSSES or not shape:
        return None
    bound = inspect.signature(function).bind(None, *args, **kwargs)
    bound.apply_defaults()
    options = {name: value for name, value in bound.arguments.items() if name not in ("input", "target")}
    target, reduction = bound.arguments["target"], options.pop("reduction", "mean")
    if options.pop("size_average", None) is not None or options.pop("reduce", None) is not None:
        return None
    if type(target) is not Tensor and not isinstance(target, torch.nn.Parameter):
        return None
    if reduction not in ("mean", "sum") or target.requires_grad or not target.dim() or len(target) % rows:
        return None
    if function in ELEMENTWISE:
        if list(target.shape) != list(shape) or options.get("weight") is not None or shape[0] % rows:
            return None
        count: float | Tensor = float(target.numel())
    else:
        if options.get("weight") is not None and options["weight"].requires_grad:
            return None
        if len(target) != shape[0]:
            return None
        count = count_targets(target, options["ignore_index"], options.get("weight"))
    options["reduction"] = "sum"
    norm: float | Tensor = 1.0
    if reduction == "mean":
        norm = 1.0 / count if count else float("inf")  # as in torch, a mean over 0 targets is NaN
    return OutputLoss(leaf=leaf, operations=operations, function=function, target=target, options=options, norm=norm)


def count_targets(target: Tensor, ignored: int, weight: Tensor | None) -> float | Tensor:
    """Return the number by which PyTorch divides a classification loss's mean; `weight`: the weights of the classes."""
    if target.is_floating_point():  # class probabilities: [classes] for one example, [rows, classes, ...] for a batch
        return float(target.numel() // target.shape[1 if target.dim() > 1 else 0])
    counted = target[target != ignored]
    return float(counted.numel()) if weight is None else weight[counted].sum()
