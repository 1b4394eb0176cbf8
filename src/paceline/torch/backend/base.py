"""Identity and lifecycle of a process group."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, Store, Work

from paceline.collectives import Group
from paceline.torch.backend.calls import Calls
from paceline.torch.backend.errors import Terms
from paceline.torch.backend.host_copies import through_host
from paceline.torch.backend.monitored import MonitoredBarrier
from paceline.torch.device import DeviceGroups

_Method = TypeVar("_Method", bound=Callable[..., Any])
_PATIENCE_S: Final = 1.0
"""Time limit of a shutdown for pending asynchronous calls."""


def on_cpu(method: _Method) -> _Method:
    """Pass calls with tensors on another device to the group of that device."""

    @functools.wraps(method)
    def routed(self: BaseProcessGroup, *arguments: Any, **options: Any) -> Any:
        tensor = first_tensor(arguments)
        if tensor is None or tensor.is_cpu:
            return method(self, *arguments, **options)
        return self._on_device(tensor, method.__name__, *arguments, **options)

    return routed  # type: ignore[return-value]


def first_tensor(arguments: tuple[Any, ...]) -> Tensor | None:
    """Return the first tensor of a call's first two arguments, which may be lists of lists."""
    for argument in arguments[:2]:
        while isinstance(argument, (list, tuple)) and argument:
            argument = argument[0]
        if isinstance(argument, Tensor):
            return argument
    return None


_AnyProcessGroup: Any = ProcessGroup
"""Untyped, because its overloads do not match single methods."""


class BaseProcessGroup(_AnyProcessGroup):  # type: ignore[misc]
    """Abstract: identity and lifecycle of a process group over one of our groups."""

    def __init__(self, store: Store, group: Group, global_ranks: tuple[int, ...] = ()) -> None:
        super().__init__(group.rank, group.size)  # with a store, C++ would not find the methods of the Python object
        self._store = store
        self._group = group
        self._terms = Terms(group.timeout, global_ranks)
        self._calls = Calls(group, self._terms)
        self._devices = DeviceGroups(store, group.rank, group.size, group.timeout, group.name)
        self._monitored = MonitoredBarrier(group)
        self._name, self._description = group.name, ""

    @property
    def group(self) -> Group:
        """The group that runs the calls; :meth:`~paceline.collectives.Group.explain` shows the algorithms."""
        return self._group

    # identity; C++ uses the other names

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._group.rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._group.size

    getRank = rank  # noqa: N815
    getSize = size  # noqa: N815

    def getBackendName(self) -> str:  # noqa: N802
        """Return ``paceline``."""
        return "paceline"

    name = getBackendName

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the group's name in ``torch.distributed``."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        """Return the group's name in ``torch.distributed``."""
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Set the group's description."""
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the group's description."""
        return self._description

    def get_group_store(self) -> Store:
        """Return the store of the rendezvous."""
        return self._store

    # the interface of a device's backend

    @property
    def _device_types(self) -> list[torch.device]:
        cuda = [torch.device("cuda")] if torch.cuda.is_available() else []
        return [torch.device("cpu"), *cuda]

    def _get_backend(self, device: torch.device) -> Any:
        """Return the group for calls on tensors of a device."""
        device = torch.device(device)
        group = None if device.type == "cpu" else self._devices.of_device(device)
        return self if group is None else group._get_backend(device)

    def _on_device(self, tensor: Tensor, method: str, *arguments: Any, **options: Any) -> Work:
        """Run a call with a tensor that is not on the CPU."""
        group = self._devices.of(tensor)
        if group is None:
            return through_host(functools.partial(getattr(self, method), **options), arguments)
        work: Work = getattr(group, method)(*arguments, **options)
        return work

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: tensors are used in place."""
        return False

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def _has_hooks(self) -> bool:
        return False

    # the end

    def shutdown(self) -> None:
        """Leave the group after its pending calls; the other ranks' next call fails. Idempotent."""
        self._devices.close(abort=False)
        self._end(_PATIENCE_S)

    def abort(self) -> None:
        """Leave the group at once; pending calls fail on all ranks. Idempotent."""
        self._devices.close(abort=True)
        self._end(0.0)

    def _end(self, patience_s: float) -> None:
        group = self._group
        deadline = time.monotonic() + patience_s
        while group.num_pending and time.monotonic() < deadline:
            time.sleep(0.001)
        if group.num_pending:
            group.abort()
        self._calls.close()
        group.close()

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Return when every rank has called it; on rank 0 the error names the missing ranks."""
        self._monitored.wait(self._group.timeout if timeout is None else timeout, wait_all_ranks=wait_all_ranks)
