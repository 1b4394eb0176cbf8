"""Gradients of parameters on other processes. They have shapes and norms, but no values.

Norm functions such as ``torch.nn.utils.clip_grad_norm_`` work as in one process. Elementwise changes in place have no
effect here, because the process with the gradient applies them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from paceline.errors import UsageError

NormOf = Callable[[str, float], float]
"""The function returns the norm of a parameter's gradient, given the parameter's name and the order of the norm."""

_PLAIN: Final = (
    "shape", "size", "dim", "ndim", "numel", "dtype", "device", "layout", "is_sparse", "requires_grad", "grad_fn",
    "is_leaf", "is_cuda", "grad", "is_floating_point", "is_complex", "is_cpu", "is_nested", "_is_view",
)  # fmt: skip


class AbsentGrad(torch.Tensor):
    """The gradient of one parameter of another process."""

    @staticmethod
    def __new__(cls, parameter: Tensor, name: str, norm_of: NormOf) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, list(parameter.shape), dtype=parameter.dtype, device=parameter.device
        )

    def __init__(self, parameter: Tensor, name: str, norm_of: NormOf) -> None:
        self.parameter_name, self.norm_of = name, norm_of

    def norm_value(self, order: Any) -> Tensor:
        order = 2.0 if order in (None, "fro") else float(order)
        with torch._C.DisableTorchFunctionSubclass():
            dtype = self.dtype
        return torch.tensor(self.norm_of(self.parameter_name, order), dtype=dtype)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call functions that need no values, and norms; reject all others."""
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
                grad.norm_value(order)
                if isinstance(grad, AbsentGrad)
                else torch.linalg.vector_norm(grad, 2.0 if order is None else order)
                for grad in args[0]
            )
        if name.endswith("_") and not name.endswith("__") and not name.startswith("_amp"):
            return _change_local(func, args, kwargs)
        absent = _absent_in((args, kwargs))[0]
        raise UsageError(
            f"{name}() of the gradient of {absent.parameter_name!r}, which is on another process of the pipeline: only "
            "its norm and changes in place are available; do the rest in a hook of the parameter"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise UsageError(f"{func} of a gradient that is on another process of the pipeline")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AbsentGrad({self.parameter_name!r}, on another process)"


def _change_local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = args[0]
    if not isinstance(first, (list, tuple)):
        return first
    local = [number for number, grad in enumerate(first) if not isinstance(grad, AbsentGrad)]

    def local_of(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and len(value) == len(first):
            return [value[number] for number in local]
        return value

    if local:
        func(*map(local_of, args), **{key: local_of(value) for key, value in kwargs.items()})
    return None


def _absent_in(value: Any) -> list[AbsentGrad]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, AbsentGrad)]
