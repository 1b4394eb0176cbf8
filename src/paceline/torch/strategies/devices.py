"""Choose the device of a rank."""

from __future__ import annotations

import torch

from paceline.errors import UsageError


def choose_device(requested: torch.device | str | None, local_rank: int) -> torch.device:
    num_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if requested is None:
        return torch.device("cuda", local_rank % num_cuda) if num_cuda else torch.device("cpu")
    try:
        device = torch.device(requested)
    except RuntimeError as error:
        raise UsageError(f"local rank {local_rank}: device={requested!r}: {error}") from None
    if device.type != "cuda":
        return device
    if not num_cuda:
        raise UsageError(
            f"local rank {local_rank}: device={str(requested)!r}, but this host has no CUDA device: leave device out"
        )
    device = torch.device("cuda", local_rank % num_cuda) if device.index is None else device
    if device.index >= num_cuda:
        raise UsageError(
            f"local rank {local_rank}: device={str(requested)!r}, but there are {num_cuda} CUDA devices here"
        )
    return device
