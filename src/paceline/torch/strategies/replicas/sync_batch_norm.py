"""Batch normalization over the batches of all ranks, on the CPU. torch's ``SyncBatchNorm`` supports only GPUs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.errors import UsageError


class RankSums:
    """Sums over the ranks of ``torch.distributed``. Subclasses use other groups of ranks."""

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def size(self) -> int:
        return dist.get_world_size()

    def add_(self, tensor: Tensor) -> None:
        """Add the tensors of all ranks, in place."""
        dist.all_reduce(tensor)


class SyncBatchNorm(_BatchNorm):
    """``BatchNorm1d``, ``2d`` or ``3d`` over the inputs [N, C, ...] of all ranks; N may differ between ranks."""

    sums = RankSums()

    @classmethod
    def of(cls, layer: _BatchNorm) -> SyncBatchNorm:
        sync = cls(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        sync._parameters, sync._buffers = layer._parameters, layer._buffers
        sync.training = layer.training
        return sync

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.size(1) != self.num_features:
            raise UsageError(
                f"batch normalization of {self.num_features} channels got an input of shape {list(input.shape)}, "
                f"expected [N, {self.num_features}, ...]"
            )

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        output, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps, self.sums)  # type: ignore[no-untyped-call]
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            unbiased = variance * (count / (count - 1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)
        normalized: Tensor = output
        return normalized


class _Normalize(torch.autograd.Function):
    """Normalization by the statistics of all ranks, and its derivative (Ioffe and Szegedy, 2015, section 3)."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, sums: RankSums) -> Any:
        dims = [0, *range(2, input.dim())]
        shape = [1, -1] + [1] * (input.dim() - 2)
        count = input.numel() // input.size(1)
        wide = input.detach().to(torch.float64 if input.dtype == torch.float64 else torch.float32)
        if count:
            own_variance, own_mean = torch.var_mean(wide, dims, correction=0)
        else:
            own_variance = own_mean = wide.new_zeros(input.size(1))
        own = torch.cat([wide.new_tensor([count]), own_mean, own_variance]).to(torch.float64)
        table = own.new_zeros(sums.size, own.numel())
        table[sums.rank] = own
        sums.add_(table)
        counts = table[:, :1]
        means, variances = table[:, 1:].chunk(2, 1)
        total = float(counts.sum())
        if total <= 1:
            raise UsageError(
                f"rank {sums.rank}: batch normalization in training got {int(total)} values per channel over all "
                "ranks, expected 2 or more; make the batch larger"
            )
        mean = (counts * means).sum(0) / total
        # Combine the ranks' variances and means as in Chan, Golub and LeVeque (1979), without cancellation.
        variance = (counts * (variances + (means - mean).square())).sum(0) / total
        inverse = (variance + eps).rsqrt().to(wide.dtype)
        normalized = (wide - mean.to(wide.dtype).view(shape)) * inverse.view(shape)
        output = normalized if weight is None else normalized * weight.view(shape).to(wide.dtype)
        output = output if bias is None else output + bias.view(shape).to(wide.dtype)
        ctx.save_for_backward(normalized, weight, inverse)
        ctx.dims, ctx.shape, ctx.total, ctx.sums = dims, shape, total, sums
        ctx.mark_non_differentiable(mean, variance)
        return output.to(input.dtype), mean, variance, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> Any:
        normalized, weight, inverse = ctx.saved_tensors
        grad = grad_output.to(normalized.dtype)
        sum_grad = grad.sum(ctx.dims)
        sum_product = (grad * normalized).sum(ctx.dims)
        totals = torch.cat([sum_grad, sum_product])
        ctx.sums.add_(totals)
        mean_grad, mean_product = (totals / ctx.total).chunk(2)
        shape = ctx.shape
        scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
        grad_input = (grad - mean_grad.view(shape) - normalized * mean_product.view(shape)) * scale.view(shape)
        needs = ctx.needs_input_grad
        return (
            grad_input.to(grad_output.dtype) if needs[0] else None,
            sum_product.to(weight.dtype) if needs[1] else None,
            sum_grad.to(grad_output.dtype if weight is None else weight.dtype) if needs[2] else None,
            None,
            None,
        )


def with_sync_batch_norm(model: nn.Module) -> nn.Module:
    """Return a model whose batch normalization uses the batches of all ranks.

    A model on CUDA gets the ``SyncBatchNorm`` of PyTorch, and other models get :class:`SyncBatchNorm`.
    """
    if any(parameter.is_cuda for parameter in model.parameters()):
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        return converted
    if isinstance(model, _BatchNorm) and not isinstance(model, SyncBatchNorm | nn.SyncBatchNorm):
        return SyncBatchNorm.of(model)
    for name, child in list(model.named_children()):
        synced = with_sync_batch_norm(child)
        if synced is not child:
            setattr(model, name, synced)
    return model
