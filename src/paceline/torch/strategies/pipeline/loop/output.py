"""The output of a pipeline in the training loop: a tensor whose values are computed at first use.

If the loop calls ``backward()`` on a loss of this output, and microbatches can compute parts of the loss, the whole
schedule runs in ``backward()``. If the loop reads a value before, the forwards run when the value is read, and the
backwards run later, in PyTorch's ordinary backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import override

from paceline.torch.strategies.pipeline.loop.call import ModelCall
from paceline.torch.strategies.pipeline.loop.losses import PartialLoss, RowOperation, as_operation, as_term

_PLAIN: Final = (
    "shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "dtype", "device", "layout", "is_cuda",
    "__len__",
    "is_sparse", "is_floating_point", "is_complex", "element_size", "is_cpu", "is_quantized", "is_nested", "is_meta",
)  # fmt: skip
"""Attributes and functions that do not need the values of a tensor."""


class _PendingTensor(torch.Tensor):
    """Abstract: a tensor that computes its values at first use."""

    @staticmethod
    def __new__(cls, *_: Any, shape: Sequence[int] = (), dtype: torch.dtype) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, list(shape), dtype=dtype, device=torch.device("cpu"))

    def value(self) -> Tensor:
        """Return the tensor with its values."""
        raise NotImplementedError

    def follow(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a call that needs no values of this tensor; ``NotImplemented`` if it needs values."""
        return NotImplemented

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        owner = args[0] if args and isinstance(args[0], _PendingTensor) else None
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
            if name in ("requires_grad", "is_leaf") and owner is not None and not owner.has_values:
                return name == "requires_grad"
        if name in _PLAIN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if owner is not None:
            result = owner.follow(func, args, kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = torch.utils._pytree.tree_map(_with_values, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = torch.utils._pytree.tree_map(_with_values, (args, kwargs or {}))
        return func(*args, **kwargs)

    @property
    def has_values(self) -> bool:
        return bool(self.__dict__.get("is_known"))

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.value())


class PendingOutput(_PendingTensor):
    """One tensor of a model's output, whose values are not computed yet."""

    def __init__(
        self,
        forward: ModelCall,
        leaf: int,
        operations: tuple[RowOperation, ...] = (),
        *,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        self.forward, self.leaf, self.operations = forward, leaf, operations

    @override
    def value(self) -> Tensor:
        self.is_known = True
        tensor = self.forward.values()[self.leaf]
        return functools.reduce(lambda value, operation: operation(value), self.operations, tensor)

    @override
    def follow(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.has_values:
            return NotImplemented
        shape, rows = list(self.shape), self.forward.rows
        term = as_term(function, self.leaf, self.operations, shape, rows, args[1:], kwargs)
        if term is not None:
            return PendingLoss(
                self.forward,
                (term,),
                lambda: function(self.value(), *args[1:], **kwargs),
                dtype=self.dtype,
            )
        row_operation = as_operation(function, shape, rows, args[1:], kwargs)
        if row_operation is None:
            return NotImplemented
        operation, whole = row_operation
        dtype = (
            operation(torch.empty(0 if not shape else [1, *shape[1:]], dtype=self.dtype, device="meta")).dtype
            if getattr(function, "__name__", "") in ("to", "float", "double")
            else self.dtype
        )
        return PendingOutput(self.forward, self.leaf, (*self.operations, operation), shape=whole, dtype=dtype)


class PendingLoss(_PendingTensor):
    """A loss of outputs whose values are not computed yet.

    The loss's ``backward()`` runs the schedule, which also computes the loss.
    """

    def __init__(
        self,
        forward: ModelCall,
        terms: tuple[PartialLoss, ...],
        compute: Callable[[], Tensor],
        *,
        dtype: torch.dtype,
    ) -> None:
        self.forward, self.terms, self.compute = forward, terms, compute
        self.known_value: Tensor | None = None

    @override
    def value(self) -> Tensor:
        if self.known_value is None:
            self.is_known = True
            trained = self.forward.value_of(self.terms)
            self.known_value = self.compute() if trained is None else trained
        return self.known_value

    @override
    def follow(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.known_value is not None:
            return NotImplemented
        if function is torch.Tensor.backward:
            return self._backward(*args[1:], **kwargs)
        name = getattr(function, "__name__", "")
        other = args[1] if len(args) > 1 else None
        if name in ("add", "__add__", "__radd__") and isinstance(other, PendingLoss) and other.forward is self.forward:
            if other.known_value is None and not kwargs:
                return self._with((*self.terms, *other.terms), lambda: self.value() + other.value())
        elif other is not None and len(args) == 2 and not kwargs and _is_number(other):
            if name in ("mul", "__mul__", "__rmul__"):
                return self._times(other, other)
            if name in ("div", "true_divide", "__truediv__"):
                return self._times(1 / other, 1 / other)
            if name in ("add", "__add__", "__radd__") and not isinstance(other, Tensor) and other == 0:
                return self  # the built-in sum() adds the first loss to 0
        elif name in ("neg", "__neg__") and len(args) == 1:
            return self._times(-1.0, -1.0)
        return NotImplemented

    def _backward(
        self,
        gradient: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        if retain_graph or create_graph or inputs is not None or self.forward.is_forward_done:
            self.value().backward(gradient, retain_graph, create_graph, inputs)  # type: ignore[no-untyped-call]
            return
        self.forward.train(self.terms, 1.0 if gradient is None else gradient)
        self.known_value = self.forward.value_of(self.terms)

    def _times(self, factor: Any, value_factor: Any) -> PendingLoss:
        return self._with(tuple(term.times(factor) for term in self.terms), lambda: self.value() * value_factor)

    def _with(self, terms: tuple[PartialLoss, ...], compute: Callable[[], Tensor]) -> PendingLoss:
        return PendingLoss(self.forward, terms, compute, dtype=self.dtype)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return type(value) is Tensor and value.numel() == 1 and value.dim() == 0 and not value.requires_grad
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _with_values(value: Any) -> Any:
    return value.value() if isinstance(value, _PendingTensor) else value
