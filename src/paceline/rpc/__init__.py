"""Remote calls, references to remote objects, and gradients across processes.

The interface is that of PyTorch's ``torch.distributed.rpc``. Connections use Paceline's transport and token. Only
``paceline.rpc.autograd`` and ``paceline.rpc.optimizer`` need torch, and they are imported at their first use.
"""

from __future__ import annotations

import importlib
from typing import Any

from paceline.rpc.allowed import allow
from paceline.rpc.api import (
    get_rpc_timeout,
    get_worker_info,
    init_rpc,
    is_available,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from paceline.rpc.functions import async_execution
from paceline.rpc.futures import Future, collect_all, wait_all
from paceline.rpc.options import BackendType, TensorPipeRpcBackendOptions
from paceline.rpc.rref import RRef
from paceline.rpc.wire.messages import RemoteError
from paceline.rpc.workers import WorkerInfo

__all__ = [
    "BackendType",
    "Future",
    "RRef",
    "RemoteError",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "allow",
    "async_execution",
    "collect_all",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "is_available",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "wait_all",
]


def __getattr__(name: str) -> Any:
    if name in ("autograd", "optimizer"):
        return importlib.import_module(f"paceline.rpc.{name}")
    raise AttributeError(f"module 'paceline.rpc' has no attribute {name!r}")
