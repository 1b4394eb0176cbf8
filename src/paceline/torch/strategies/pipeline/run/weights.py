"""Compute the weight gradients of linear layers in place; defer them if the schedule splits backwards.

For a weight of n bytes, autograd moves 5n bytes per microbatch, because it writes the gradient to new memory and then
adds it. A product that adds in place moves 2n bytes (Megatron-LM: gradient accumulation fusion). Deferred products are
the second half of a split backward (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024).

A product costs 0.1 ms of Python code, so autograd computes the gradients of small weights, unless they are deferred.
Processor time per step, in place and by autograd: 236 and 275 ms (3 layers of 2048 x 2048, 32 rows), 162 and 145 ms (4
transformer layers of width 256, 64 rows).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

_LARGE_BYTES: Final = 4 << 20
_top_hooks: Final = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)


class WeightProducts(TorchFunctionMode):
    """Computes weight gradients in one microbatch's backward through one stage.

    Run the forward in this context, and the backward in the context :meth:`active`. In other backwards, autograd
    computes the gradients as usual.
    """

    def __init__(self, *, defers: bool) -> None:
        super().__init__()
        self.is_open = False
        self._puts_off = defers
        self._deferred: list[tuple[nn.Parameter, Tensor, Tensor]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and len(args) + len(kwargs) in (2, 3):
            named: dict[str, Any] = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            x, weight, bias = named["input"], named["weight"], named.get("bias")
            if _is_plain(x, weight) and (self._puts_off or is_large(weight)):
                return _Linear.apply(self, x, weight, bias)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Return a context in which the backward gives the gradients of weights to this object."""
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False

    def add(self, weight: nn.Parameter, grad: Tensor, x: Tensor) -> None:
        """Add to a weight's gradient the product of an output's gradient and an input, both as matrices."""
        if self._puts_off:
            self._deferred.append((weight, grad, x))
        else:
            _accumulate(weight, grad, x)

    def finish(self) -> None:
        for weight, grad, x in self._deferred:
            _accumulate(weight, grad, x)
        self._deferred.clear()


class _Linear(torch.autograd.Function):
    """A linear layer. Its backward lets :class:`WeightProducts` compute the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, products: WeightProducts, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.products, ctx.parameter = products, weight
        ctx.save_for_backward(x, weight)
        # F.linear may return a view, which must not be changed in place if a custom function returns it.
        output = x.new_empty(*x.shape[:-1], weight.shape[0])
        rows, into = x.reshape(-1, x.shape[-1]), output.view(-1, weight.shape[0])
        if bias is None:
            torch.mm(rows, weight.t(), out=into)
        else:
            torch.addmm(bias, rows, weight.t(), out=into)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grads, rows = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        input_grad = (grads @ weight).view(x.shape) if ctx.needs_input_grad[1] else None
        bias_grad = grads.sum(0) if ctx.needs_input_grad[3] else None
        if ctx.products.is_open:
            ctx.products.add(ctx.parameter, grads, rows)
            return None, input_grad, None, bias_grad
        return None, input_grad, grads.t() @ rows, bias_grad


def is_large(weight: Tensor) -> bool:
    return weight.numel() * weight.element_size() >= _LARGE_BYTES


def _is_plain(x: Any, weight: Any) -> bool:
    """Return whether computing the weight's gradient here, not in autograd, has no effect on any hook or mode."""
    return (
        type(weight) is nn.Parameter
        and weight.requires_grad
        and weight.dim() == 2
        and isinstance(x, Tensor)
        and x.dim() > 0
        and x.dtype == weight.dtype
        and torch.is_grad_enabled()
        and not weight._backward_hooks
        and not getattr(weight, "_post_accumulate_grad_hooks", None)
        and not torch.is_autocast_enabled("cpu")
        and torch._C._functorch.peek_interpreter_stack() is None
        # Under torch.utils.checkpoint, autograd repeats the forward without WeightProducts.
        and _top_hooks(True) is None
    )


def _accumulate(weight: nn.Parameter, grad: Tensor, x: Tensor) -> None:
    with torch.no_grad():
        if weight.grad is None:
            weight.grad = grad.t() @ x
        elif weight.grad.layout is torch.strided:
            weight.grad.addmm_(grad.t(), x)
        else:
            weight.grad = weight.grad + grad.t() @ x
