"""The processes of one training, as its strategy sees them: who they are, and how they agree."""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from paceline.collectives import Group, init
from paceline.environment import Environment, environment
from paceline.errors import PacelineError, UsageError, first_line
from paceline.torch.backend.registration import join_through

DEFAULT_TIMEOUT = timedelta(minutes=5)
_FAILURE = "failure of a rank"
_FIRST_PORT, _NUM_PORTS = 20000, 10000  # below those that systems give out by themselves


class Ranks:
    """The ranks of a training: one, or those that a launcher has started.

    `group` is theirs alone (None for a single rank): metrics, barriers and agreements do not get into the way of what
    the user's program or DistributedDataParallel sends.
    """

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0, group: Group | None = None) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.group = group
        self._owns_torch = False

    @classmethod
    def meet(cls, timeout: timedelta = DEFAULT_TIMEOUT, *, backend: str | None = None) -> Ranks:
        """Meet the ranks that the environment names (``RANK``, ``WORLD_SIZE``, … of torchrun, mpirun or Slurm).

        With a `backend`, ``torch.distributed`` is initialized with it, unless the program has done so, and the ranks
        meet through its store. Without RANK this process is the only rank.
        """
        told = environment()
        if told.rank is None and not dist.is_initialized():
            if backend is None:
                return cls()
            ranks = cls()
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
            ranks._owns_torch = True
            return ranks
        owns_torch = False
        if backend is not None and not dist.is_initialized():
            dist.init_process_group(
                backend,
                init_method=f"tcp://{_place(told)}" if _is_placeless(told) else None,
                rank=told.rank or 0,
                world_size=told.world_size or 1,
                timeout=timeout,
            )
            owns_torch = True
        if dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
            store = dist.distributed_c10d._get_default_store()
            group = join_through(store, rank, size, "strategy", timeout)
        else:
            group = init(address=_place(told) if _is_placeless(told) else None, timeout=timeout)
            rank, size = group.rank, group.size
        ranks = cls(rank, size, rank if told.local_rank is None else told.local_rank, group)
        ranks._owns_torch = owns_torch
        return ranks

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.group is not None:
            self.group.barrier()

    def exchange(self, value: Any) -> list[Any]:
        """Return every rank's `value` (what msgpack can hold), by rank."""
        return [value] if self.group is None else self.group.all_gather_objects(value)

    def exchange_as(self, doing: str, value: Any) -> list[Any]:
        """Do as :meth:`exchange` where ranks may be at different places of the program: `doing` says where.

        Raises UsageError on every rank if they are.
        """
        told = self.exchange([doing, value])
        for rank, (theirs, _) in enumerate(told):
            if theirs != told[0][0]:
                raise UsageError(f"rank {rank} {theirs}, and rank 0 {told[0][0]}: have every rank do the same")
        return [value for _, value in told]

    def agree(self, value: Any, describe: Callable[[int, Any, Any], str]) -> None:
        """Raise UsageError on every rank unless all have the same `value`.

        ``describe(rank, theirs, first)`` makes the sentence, for the first rank that differs from rank 0.
        """
        values = self.exchange(value)
        for rank, theirs in enumerate(values):
            if theirs != values[0]:
                raise UsageError(describe(rank, theirs, values[0]))

    def report_failure(self, error: BaseException) -> None:
        """Leave word for the other ranks that this one ends by an exception."""
        if self.group is not None:
            text = f"rank {self.rank} has ended by {first_line(error)}"
            with contextlib.suppress(PacelineError):  # another rank was first, or serves the store and has ended
                self.group._world.store.set(f"{_FAILURE} {self.group._world.name}", text.encode())

    def failure(self) -> str | None:
        """Return the report of a rank that has ended by an exception; None if there is none."""
        if self.group is not None:
            with contextlib.suppress(PacelineError):
                return self.group._world.store.get(f"{_FAILURE} {self.group._world.name}", time.monotonic()).decode()
        return None

    def close(self) -> None:
        """Leave the group, and ``torch.distributed`` if it was initialized here. Idempotent."""
        group, self.group = self.group, None
        if group is not None:
            group.close()
        if self._owns_torch and dist.is_initialized():
            self._owns_torch = False
            dist.destroy_process_group()


def _is_placeless(told: Environment) -> bool:
    """Whether the launcher has started several ranks, and said nothing about where they meet, as mpirun does."""
    return (told.world_size or 1) > 1 and not (told.master_addr and told.master_port)


def _place(told: Environment) -> str:
    """Return where the ranks of mpirun or srun meet, ``host:port``: the port is made of the job's number.

    Raises UsageError if the launcher did not say enough.
    """
    host, port = told.master_addr, told.master_port
    if host is None and told.local_world_size == told.world_size:
        host = "127.0.0.1"
    if port is None and told.job:
        port = _FIRST_PORT + zlib.crc32(told.job.encode()) % _NUM_PORTS
    if host is None or not port:
        missing = " and ".join(name for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)) if not value)
        raise UsageError(
            f"rank {told.rank} of {told.world_size}: the launcher did not say where the ranks meet: set {missing}, the "
            "same on every rank (the host of rank 0, and a free port on it)"
        )
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
