"""Send gradients as shorter floats."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """The interface of compressors. This one does not change the tensors."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send, and a value for :meth:`decompress`. Arrays of NumPy are not changed."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the received tensor in its original dtype."""
        return tensor


class _ShortFloats(Compressor):
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:  # type: ignore[override]
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            return tensor.to(self._dtype), tensor.dtype
        return tensor, None

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:  # type: ignore[override]
        return tensor if ctx is None else tensor.to(ctx)


class Compression:
    """The compressors for the argument ``compression``."""

    none = Compressor()
    fp16 = _ShortFloats(torch.float16)
    bf16 = _ShortFloats(torch.bfloat16)
