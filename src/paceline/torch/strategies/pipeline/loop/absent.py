"""Gradients of parameters that are on other processes: they have shapes and norms, and no values.

So ``torch.nn.utils.clip_grad_norm_`` and what else looks at norms works as in one process, elementwise changes in
place do nothing here (they are made where the gradient is), and whatever needs values is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from paceline.errors import UsageError

NormOf = Callable[[str, float], float]
"""From a parameter's name and the order of a norm to the norm of its gradient, wherever that is."""

_PLAIN: Final = (
    "shape", "size", "dim", "ndim", "numel", "dtype", "device", "layout", "is_sparse", "requires_grad", "grad_fn",
    "is_leaf", "is_cuda", "grad", "is_floating_point", "is_complex", "is_cpu", "is_nested", "_is_view",
)  # fmt: skip


class AbsentGrad(torch.Tensor):
    """The gradient of one parameter of another process."""

    @staticmethod
    def __new__(cls, parameter: Tensor, name: str, norm_of: NormOf) -> Any:
        """Make a tensor of the parameter's shape, without values."""
        return torch.Tensor._make_wrapper_subclass(
            cls, list(parameter.shape), dtype=parameter.dtype, device=parameter.device
        )

    def __init__(self, parameter: Tensor, name: str, norm_of: NormOf) -> None:
        self.parameter_name, self.norm_of = name, norm_of

    def norm_value(self, order: Any) -> Tensor:
        """Return the gradient's norm."""
        order = 2.0 if order in (None, "fro") else float(order)
        with torch._C.DisableTorchFunctionSubclass():
            dtype = self.dtype
        return torch.tensor(self.norm_of(self.parameter_name, order), dtype=dtype)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer what asks for no values, or for a norm; refuse the rest."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _PLAIN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        owner = args[0] if args else None
        if name in ("vector_norm", "linalg_vector_norm", "norm") and isinstance(owner, AbsentGrad):
            return owner.norm_value(args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p")))
        if name == "_foreach_norm":
            order = args[1] if len(args) > 1 else kwargs.get("ord")
            return tuple(
                each.norm_value(order)
                if isinstance(each, AbsentGrad)
                else torch.linalg.vector_norm(each, 2.0 if order is None else order)
                for each in args[0]
            )
        if name.endswith("_") and not name.endswith("__") and not name.startswith("_amp"):
            return _change_others(func, args, kwargs)
        shown = next(each for each in _absent_in((args, kwargs)))
        raise UsageError(
            f"{name}() of the gradient of {shown.parameter_name!r}, which is on another process of the pipeline: its "
            "norm can be asked for, and changes in place be made; do the rest in a hook of the parameter"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise UsageError(f"{func} of a gradient that is on another process of the pipeline")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AbsentGrad({self.parameter_name!r}, on another process)"


def _change_others(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a change in place to those tensors of a call that are here."""
    first = args[0]
    if not isinstance(first, (list, tuple)):
        return first
    here = [number for number, each in enumerate(first) if not isinstance(each, AbsentGrad)]

    def kept(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and len(value) == len(first):
            return [value[number] for number in here]
        return value

    if here:
        func(*(kept(each) for each in args), **{key: kept(value) for key, value in kwargs.items()})
    return None


def _absent_in(value: Any) -> list[AbsentGrad]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, AbsentGrad)]
