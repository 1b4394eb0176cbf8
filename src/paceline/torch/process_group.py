"""The process group that ``init_process_group("paceline")`` makes.

Methods are named and called as PyTorch does it: most by ``torch.distributed``, and those that DistributedDataParallel and
the functional collectives use by C++.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Work

from paceline.collectives import Group
from paceline.errors import GroupClosedError, PacelineError, UsageError
from paceline.torch import _profiling, _tensors
from paceline.torch._calls import Calls, Step
from paceline.torch._device import DeviceGroups
from paceline.torch._errors import in_torch_terms
from paceline.torch._monitored import MonitoredBarrier
from paceline.torch._reductions import NAMES, op_and_factor, scaled
from paceline.torch._sparse import all_reduce_sparse
from paceline.torch._work import FinishedWork, MessageWork

_ALL_REDUCE: Final = c10d.AllreduceOptions()
_COALESCED: Final = c10d.AllreduceCoalescedOptions()
_BROADCAST: Final = c10d.BroadcastOptions()
_REDUCE: Final = c10d.ReduceOptions()
_GATHER: Final = c10d.GatherOptions()
_SCATTER: Final = c10d.ScatterOptions()
_ALL_GATHER: Final = c10d.AllgatherOptions()
_REDUCE_SCATTER: Final = c10d.ReduceScatterOptions()
_ALL_TO_ALL: Final = c10d.AllToAllOptions()
_BARRIER: Final = c10d.BarrierOptions()

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _on_cpu(method: _Method) -> _Method:
    """Give calls whose tensors are on another device to the group for it."""

    @functools.wraps(method)
    def routed(self: PacelineProcessGroup, *arguments: Any, **options: Any) -> Any:
        tensor = _first(arguments)
        if tensor is None or tensor.is_cpu:
            return method(self, *arguments, **options)
        return getattr(self._devices.of(tensor), method.__name__)(*arguments, **options)

    return routed  # type: ignore[return-value]


class PacelineProcessGroup(c10d.ProcessGroup):
    """The ranks of a torch.distributed group, over a :class:`paceline.collectives.Group`."""
