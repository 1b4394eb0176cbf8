"""Connect the processes of one training, exchange values between them, and check that they agree."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from paceline.collectives import Group, init
from paceline.environment import environment
from paceline.errors import PacelineError, UsageError, first_line
from paceline.meeting.rendezvous import default_place, find_rank
from paceline.strategies import is_elastic
from paceline.torch.backend.registration import join_through

DEFAULT_TIMEOUT = timedelta(minutes=5)
_FAILURE = "failure of a rank"


class Ranks:
    """The ranks of a training. Only the strategy uses `group` (None for one rank), not the program."""

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0, group: Group | None = None) -> None:
        self._rank = rank
        self._size = size
        self.local_rank = local_rank
        self.group = group
        self._owns_torch = False

    @property
    def rank(self) -> int:
        """Number of this process among the ranks."""
        return self._rank

    @property
    def worker_rank(self) -> int | None:
        """The number of this process among the servers' workers; None: the scheduler chooses a free number."""
        return self.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._size

    @classmethod
    def meet(cls, timeout: timedelta = DEFAULT_TIMEOUT, *, backend: str | None = None) -> Ranks:
        """Connect the ranks that torchrun, mpirun or Slurm has started. Without RANK, this process is the only rank.

        With a `backend`, the ranks connect through ``torch.distributed``. This method initializes it if the program has
        not done so.
        """
        settings = environment()
        # With a wrong rank, torch would wait until its timeout.
        rank, size = (0, 0) if dist.is_initialized() else find_rank(settings)
        if size == 1:
            if backend is None:
                return cls()
            ranks = cls()
            be_alone(backend, timeout)
            ranks._owns_torch = True
            return ranks
        owns_torch = False
        if backend is not None and not dist.is_initialized():
            has_place = settings.master_addr and settings.master_port
            dist.init_process_group(
                backend,
                init_method=None if has_place else str(default_place(size, settings)),
                rank=rank,
                world_size=size,
                timeout=timeout,
            )
            owns_torch = True
        if dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
            store = dist.distributed_c10d._get_default_store()
            group = join_through(store, rank, size, "strategy", timeout)
        else:
            group = init(timeout=timeout)
            rank, size = group.rank, group.size
        ranks = cls(rank, size, rank if settings.local_rank is None else settings.local_rank, group)
        ranks._owns_torch = owns_torch
        return ranks

    def barrier(self) -> None:
        if self.group is not None:
            self.group.barrier()

    def exchange(self, value: Any) -> list[Any]:
        """Return the `value` of every rank, by rank. Values must have a type that msgpack supports."""
        return [value] if self.group is None else self.group.all_gather_objects(value)

    def share(self, key: str, value: Any) -> Any:
        """Return the value of rank 0. Ranks that join an elastic training later get it too, by its unique `key`."""
        return self.exchange(value)[0]

    def call_on_first(self, function: Callable[[], None]) -> None:
        """Call a function on rank 0. Every rank must call this method.

        If rank 0 of an elastic training dies during the call, the next rank 0 calls the function from its beginning.
        """
        if self.rank == 0:
            function()

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite the tensors of every rank with the values of rank 0. They may have any dtype and device."""
        if self.group is None:
            return
        with torch.no_grad():
            for tensor in tensors:
                if tensor.numel():
                    values = tensor.detach().to("cpu", copy=True).contiguous()
                    self.group.broadcast(values.reshape(-1).view(torch.uint8).numpy())
                    tensor.copy_(values)

    def exchange_as(self, doing: str, value: Any) -> list[Any]:
        """Exchange values. If the ranks pass a different `doing`, such as "saves", raises UsageError on every rank."""
        places = self.exchange([doing, value])
        for rank, (place, _) in enumerate(places):
            if place != places[0][0]:
                raise UsageError(f"rank {rank} {place}, but rank 0 {places[0][0]}: make every rank do the same")
        return [value for _, value in places]

    def agree(self, value: Any, describe: Callable[[int, Any, Any], str]) -> None:
        """If a value differs from rank 0's, raise UsageError on every rank: ``describe(rank, value, rank_0_value)``."""
        values = self.exchange(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise UsageError(describe(rank, other, values[0]))

    def report_failure(self, error: BaseException) -> None:
        """Report to the other ranks that this rank ends with an exception."""
        if self.group is not None:
            text = f"rank {self.rank} has ended with {first_line(error)}"
            with contextlib.suppress(PacelineError):  # another rank has reported, or the rank with the store has ended
                self.group._world.store.set(f"{_FAILURE} {self.group._world.name}", text.encode())

    def failure(self) -> str | None:
        """Return the report of a rank that has ended with an exception; None without a report."""
        if self.group is not None:
            with contextlib.suppress(PacelineError):
                return self.group._world.store.get(f"{_FAILURE} {self.group._world.name}", time.monotonic()).decode()
        return None

    def close(self) -> None:
        """Leave the group, and also ``torch.distributed`` if :meth:`meet` initialized it. Idempotent."""
        group, self.group = self.group, None
        if group is not None:
            group.close()
        if self._owns_torch and dist.is_initialized():
            self._owns_torch = False
            dist.destroy_process_group()


class ElasticEvents:
    """The events of an elastic training's ranks. The methods have no effect; strategies with servers override them."""

    @property
    def iterations(self) -> list[int]:
        """The number of the current iteration on servers, and each optimizer's number of steps on servers."""
        return []

    def join_iterations(self, iterations: list[int]) -> None:
        """On a new rank that has received the state, take part in the servers' iterations."""

    def end_transfer(self) -> None:
        """Record that new ranks have received the state, on every rank."""

    def begin_batch(self, share: float) -> None:
        """Record that the training loop receives a batch.

        `share` is this rank's number of samples divided by the mean of the ranks' numbers.
        """


def check_not_elastic(strategy: object) -> None:
    """Raise UsageError in an elastic training, for which ``strategy()`` creates strategies of another class."""
    if is_elastic(environment()):
        raise UsageError(
            f"{type(strategy).__name__}() in an elastic training (--min-ranks or PACELINE_COORDINATOR): create the "
            "strategy by paceline.torch.strategy()"
        )


def be_alone(backend: str, timeout: timedelta) -> None:
    """Initialize ``torch.distributed`` with this process as the only rank."""
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
