"""Losses that can be computed a microbatch at a time: the sum of the parts is the loss of the whole batch, exactly.

A mean over the batch is a sum over each microbatch divided by what the whole batch is divided by, which depends on the
targets alone. So parts of unequal size, ignored targets and class weights come out as in one process.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

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
    """A call on a tensor that is not there yet, to be made on each microbatch of it."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __call__(self, tensor: Tensor) -> Tensor:
        """Make the call on a tensor."""
        result: Tensor = self.function(tensor, *self.args, **self.kwargs)
        return result


def as_operation(
    function: Any, shape: Sequence[int], rows: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[RowOperation, list[int]] | None:
    """Return a call that does the same to each row of a batch, and its result's shape; None if it does not.

    `shape` is the whole tensor's, of a batch of `rows`. Views are tried on shapes alone: what puts rows first, as many
    as there are for each example, for batches of several sizes, keeps examples apart.
    """
    name = getattr(function, "__name__", "")
    if not shape or shape[0] % rows or name not in (*_RESHAPING, *_POINTWISE, *_NORMALIZING):
        return None
    if any(_has_tensor(each) for each in (args, kwargs)):
        return None
    if name in _NORMALIZING:
        dim = kwargs.get("dim", args[0] if args else None)
        if not isinstance(dim, int) or dim % max(len(shape), 1) == 0:
            return None
    operation = RowOperation(function, args, dict(kwargs))
    per_example = shape[0] // rows
    found = []
    try:
        for size in (rows, rows + 1, 2 * rows + 3):
            result = operation(torch.empty([per_example * size, *shape[1:]], device="meta"))
            found.append((size, list(result.shape)))
    except Exception:  # a view of a fixed size: of the whole batch only
        return None
    whole = found[0][1]
    if not whole or whole[0] % rows:
        return None
    factor = whole[0] // rows
    if any(found_shape != [factor * size, *whole[1:]] for size, found_shape in found):
        return None
    return operation, whole


class PartialLoss(Protocol):
    """A part of a loss that microbatches compute by themselves, as a sum of what each computes."""

    @property
    def leaf(self) -> int:
        """Which of the output's tensors it is computed from."""
        ...

    @property
    def base(self) -> int:
        """Its number among all terms; the same for multiples of it."""
        ...

    @property
    def scale(self) -> float | Tensor:
        """What the parts are multiplied by."""
        ...

    def part(self, output: Tensor, rows: int, parts: int, number: int) -> Tensor:
        """Return microbatch `number`'s part of the loss, without `scale`, of a batch of `rows` in `parts`."""
        ...

    def times(self, factor: float | Tensor) -> PartialLoss:
        """Return the term multiplied."""
        ...


@dataclass(frozen=True, slots=True)
class ReturnedLoss:
    """A loss that the model returns itself."""

    leaf: int
    weights: Callable[[int], Sequence[float]]
    """From the leaf to what each microbatch's number counts."""
    base: int = field(default_factory=lambda: next(_numbers))
    scale: float | Tensor = 1.0

    def part(self, output: Tensor, rows: int, parts: int, number: int) -> Tensor:
        """Return microbatch `number`'s part of the loss, without `scale`."""
        weight = self.weights(self.leaf)[number]
        return output * weight if weight else output.nan_to_num() * 0.0  # a mean of no target is NaN

    def times(self, factor: float | Tensor) -> ReturnedLoss:
        """Return the term multiplied."""
        return replace(self, scale=self.scale * factor)


@dataclass(frozen=True, slots=True)
class OutputLoss:
    """One loss over a model's output, as a sum over examples."""

    leaf: int
    """Which of the output's tensors."""
    operations: tuple[RowOperation, ...]
    """What is done to it first."""
    function: Callable[..., Tensor]
    target: Tensor
    options: Mapping[str, Any]
    norm: float | Tensor
    """What the sum is multiplied by: 1 over the count, of a mean."""
    base: int
    """Its number among all losses; the same for multiples of it."""
    scale: float | Tensor = 1.0

    def part(self, output: Tensor, rows: int, parts: int, number: int) -> Tensor:
        """Return microbatch `number`'s part of the loss, without `scale`, of a batch of `rows` in `parts`."""
        for operation in self.operations:
            output = operation(output)
        bounds = row_bounds(rows, parts)
        factor = len(self.target) // rows
        target = self.target[bounds[number] * factor : bounds[number + 1] * factor]
        return self.function(output, target, **self.options) * self.norm

    def times(self, factor: float | Tensor) -> OutputLoss:
        """Return the term multiplied."""
        return replace(self, scale=self.scale * factor)


def as_term(
    function: Any,
    leaf: int,
    operations: tuple[RowOperation, ...],
    shape: Sequence[int],
    rows: int,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> OutputLoss | None:
    """Return the loss of a call of one of :data:`LOSSES` on an output of this shape; None if it is no sum over rows."""
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
    norm = (
        (1.0 / count if count else float("inf")) if reduction == "mean" else 1.0
    )  # as torch: the mean of no target is NaN
    return OutputLoss(leaf, operations, function, target, options, norm, next(_numbers))


def count_targets(target: Tensor, ignored: int, weight: Tensor | None) -> float | Tensor:
    """Return what the mean of a loss by class is divided by, as PyTorch defines it; `weight` is what classes count."""
    if target.is_floating_point():  # probabilities of classes, in dimension 1 if there are rows
        return float(target.numel() // target.shape[1 if target.dim() > 1 else 0])
    kept = target[target != ignored]
    return float(kept.numel()) if weight is None else weight[kept].sum()


def _has_tensor(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in torch.utils._pytree.tree_leaves(value))
