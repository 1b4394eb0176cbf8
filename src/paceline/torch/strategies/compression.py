"""Compress gradients by PyTorch's own communication hooks."""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import UsageError

_POWER_SGD_STARTS = 10


def check_compression(compression: str | None) -> None:
    """Raise UsageError unless `compression` is None, ``fp16``, ``bf16``, ``powersgd`` or ``powersgd:R``."""
    if compression is None or compression in ("fp16", "bf16"):
        return
    name, _, rank = compression.partition(":") if isinstance(compression, str) else ("", "", "")
    if name == "powersgd" and compression != "powersgd:" and (not rank or (rank.isdecimal() and int(rank) > 0)):
        return
    raise UsageError(
        f"compression={compression!r}: expected None, 'fp16', 'bf16', 'powersgd', or 'powersgd:R' for rank R from 1 up"
    )


def compress(model: DistributedDataParallel, compression: str) -> None:
    """Compress a model's gradients in messages.

    ``fp16`` and ``bf16`` cast them. ``powersgd:R`` sends a matrix as two factors of R columns with error feedback
    (Vogels et al., "PowerSGD: Practical low-rank gradient compression", NeurIPS 2019), default R = 1. The first 10
    iterations are uncompressed, because gradients change fastest in them.
    """
    group = model.process_group
    if compression == "fp16":
        model.register_comm_hook(group, default_hooks.fp16_compress_hook)
    elif compression == "bf16":
        model.register_comm_hook(group, _cast_to_bf16)
    else:
        rank = int(compression.partition(":")[2] or 1)
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=rank, start_powerSGD_iter=_POWER_SGD_STARTS
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


# A separate function, because PyTorch accepts its own hook only with NCCL. PyTorch compares the annotations, so they
# are not postponed.
def _cast_to_bf16(state: Any, bucket: GradBucket) -> Future[Tensor]:
    group: dist.ProcessGroup = state
    return default_hooks.bf16_compress_hook(group, bucket)
