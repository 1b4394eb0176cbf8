"""Create groups for CUDA tensors, over NCCL. NCCL rejects ranks that share a device, so these ranks have no group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import torch
from torch._C._distributed_c10d import BarrierOptions, PrefixStore, ProcessGroup, Store

from paceline.errors import UsageError

_CUDA: Final = "cuda"


class DeviceGroups:
    """An additional NCCL group of the same ranks, created by all ranks at the first call with a CUDA tensor."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, name: str) -> None:
        self._store, self._rank, self._size, self._timeout, self._name = store, rank, size, timeout, name
        self._group: Any = None
        self._is_shared = False

    @property
    def is_made(self) -> bool:
        return self._group is not None

    def barrier(self) -> None:
        """Run a barrier of the NCCL group on the current CUDA device. The default, the CPU, would fail."""
        options = BarrierOptions()
        options.device = torch.device(_CUDA, torch.cuda.current_device())
        self._group.barrier(options).wait()

    def of_device(self, device: torch.device) -> Any:
        """Return the group for a device; None if several ranks use one device. Raises UsageError without NCCL."""
        if device.type != _CUDA or not torch.distributed.is_nccl_available():
            raise UsageError(
                f"got a tensor on {device}: expected one on the CPU or, with NCCL in PyTorch, on CUDA; move it with "
                ".cpu()"
            )
        if self._group is None and not self._is_shared:
            self._is_shared = self._size > 1 and self._find_shared(device)
            self._group = None if self._is_shared else self._make()
        return self._group

    def close(self, *, abort: bool) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort() if abort else group.shutdown()

    def _find_shared(self, device: torch.device) -> bool:
        store = PrefixStore("CUDA devices", self._store)
        store.set(str(self._rank), str(torch.cuda.get_device_properties(device).uuid))
        return len({store.get(str(rank)) for rank in range(self._size)}) < self._size

    def _make(self) -> Any:
        from torch._C._distributed_c10d import ProcessGroupNCCL

        store = PrefixStore("nccl", self._store)
        options = ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        group: Any = ProcessGroup(store, self._rank, self._size)
        backend: Any = ProcessGroupNCCL(store, self._rank, self._size, options)
        group._set_default_backend(ProcessGroup.BackendType.NCCL)
        group._register_backend(torch.device(_CUDA), ProcessGroup.BackendType.NCCL, backend)
        group._set_group_name(f"{self._name} on CUDA")
        group._set_group_desc("paceline's CUDA tensors")
        return group
