"""How the ranks of a torch.distributed group become a group of ours."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore
from torch._C._distributed_c10d import Store as CStore

from paceline.collectives import Group, join
from paceline.collectives.rendezvous import is_loopback, own_host
from paceline.environment import environment
from paceline.errors import DeadlineError, RankLostError
from paceline.torch._errors import Terms, in_torch_terms
from paceline.torch._store import TorchStore
from paceline.torch.process_group import PacelineProcessGroup
from paceline.transport.authentication import make_token

BACKEND: Final = "paceline"
_LOOPBACK: Final = "127.0.0.1"


def register() -> None:
    """Make the backend known to ``torch.distributed``; for all devices, of which CPU and CUDA are supported."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, _: Any = None) -> PacelineProcessGroup:
    """Meet the other ranks of a group, in the store of ``init_process_group``."""
    store, rank, size, timeout = options.store, options.group_rank, options.group_size, options.timeout
    global_ranks = tuple(options.global_ranks_in_group)  # none of them for the group of all
    try:
        group = join_through(store, rank, size, options.group_id, timeout)
    except (RankLostError, DeadlineError) as error:
        raise in_torch_terms(error, Terms(timeout, global_ranks)) from None
    return PacelineProcessGroup(store, group, global_ranks)


def join_through(store: CStore, rank: int, size: int, name: str, timeout: timedelta) -> Group:
    """Return a group of the ranks that share one of PyTorch's stores; `name` tells groups apart."""
    # The same store may serve a program's second life, after destroy_process_group.
    life = store.add(f"paceline {name} lives of rank {rank}", 1)
    shared = TorchStore(store, f"paceline {name} {life}")
    if rank == 0:
        shared.set("token", make_token().encode())
    token = shared.get("token", time.monotonic() + timeout.total_seconds()).decode()
    told = environment()
    return join(
        shared,
        rank,
        size,
        token=token,
        host=_host(store, told.master_addr),
        name=f"torch {name}",
        timeout=timeout,
        algorithm=told.algorithm,
    )


def _host(store: CStore, master: str | None) -> str:
    """Return the address at which the other ranks reach this one: loopback if the store leads no further."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        host = store.host
    elif isinstance(store, FileStore):
        host = master or _LOOPBACK  # a file that several hosts see, if a launcher says where the first is
    else:
        host = _LOOPBACK
    return _LOOPBACK if is_loopback(host) else own_host(host)
