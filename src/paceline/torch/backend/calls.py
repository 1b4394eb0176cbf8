"""Run a process group's calls in the caller's thread or in the group's thread, and run its monitored barriers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.distributed import DistBackendError

from paceline.collectives import Group
from paceline.errors import CollectiveError, DeadlineError, PacelineError, PeerError
from paceline.torch.backend.errors import Terms, in_torch_terms
from paceline.torch.backend.tensors import After
from paceline.torch.backend.work import FinishedWork, TicketWork, TracedOperation, Value, is_in_callback, is_profiling


class Step(NamedTuple):
    """One call of the group: the name of the method, without ``_async``, and its arguments."""

    method: str
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012  (read only)


class Calls:
    """Runs the calls of one process group."""

    def __init__(self, group: Group, terms: Terms) -> None:
        self._group, self._terms = group, terms
        self._nested: Group | None = None

    def group(self) -> Group:
        """Return the group for this thread's calls. Calls inside a future's callback use a second group."""
        if not is_in_callback():
            return self._group
        if self._nested is None:
            self._nested = self._group.subgroup(range(self._group.size))
            assert self._nested is not None
        return self._nested

    def close(self) -> None:
        if self._nested is not None:
            self._nested.close()

    def run(
        self,
        event: str,
        steps: Sequence[Step],
        value: Value,
        *,
        is_async: bool,
        shown: Sequence[Tensor] = (),
        after: After | None = None,
    ) -> Work:
        """Run `steps`, then `after`. Synchronous calls run in the caller's thread, which avoids a thread switch."""
        if not steps:
            return FinishedWork(value)
        is_profiled = is_profiling()
        try:
            group = self.group()
            if (is_async or is_profiled) and group is self._group:
                recorded = TracedOperation(event, shown) if is_profiled else None
                tickets = [
                    getattr(group, f"{method}_async")(*arguments, **options) for method, arguments, options in steps
                ]
                work = TicketWork(tickets, value, self._terms, after=after, event=recorded)
                if not is_async:
                    work.wait()
                return work
            for method, arguments, options in steps:
                getattr(group, method)(*arguments, **options)
        except PacelineError as error:
            raise in_torch_terms(error, self._terms) from None
        if after is not None:
            after()
        return FinishedWork(value)


class MonitoredBarrier:
    """Barriers that report missing ranks. Each rank sends a message to rank 0: a collective would only wait."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._tags = itertools.count(-2, -2)
        """The tags of the barriers' messages, which are negative because users' tags are not. Each barrier uses two new
        tags, so that a late message cannot match a later barrier.
        """

    def wait(self, timeout: timedelta, *, wait_all_ranks: bool) -> None:
        """Wait for all ranks.

        Rank 0's error names the first missing rank or, with `wait_all_ranks`, all missing ranks.
        """
        tag = next(self._tags)
        if self._group.rank == 0:
            self._collect(tag, timeout, wait_all_ranks)
        else:
            self._report(tag, timeout)

    def _collect(self, tag: int, timeout: timedelta, wait_all_ranks: bool) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        word = torch.zeros(1, dtype=torch.uint8)
        missing: list[int] = []
        for rank in range(1, self._group.size):
            left = timedelta(seconds=max(deadline - time.monotonic(), 1e-6))
            try:
                self._group.recv_async(word, rank, tag=tag).wait(left)
            except DeadlineError:
                missing.append(rank)
                if not wait_all_ranks:
                    break
            except PeerError as error:  # the group has ended, so the remaining ranks cannot arrive
                missing += [lost for lost in getattr(error, "ranks", ()) or (rank,) if lost not in missing]
                break
        if missing:
            names = ", ".join(map(str, missing))
            ms = int(timeout.total_seconds() * 1000)
            raise DistBackendError(
                f"[Rank 0]: Rank {names} failed to pass monitoredBarrier in {ms} ms: Rank 0 timed out in "
                f"monitoredBarrier after {ms} ms"
            )
        try:
            for rank in range(1, self._group.size):
                self._group.send(word, rank, tag=tag - 1)
        except (CollectiveError, PeerError) as error:
            raise DistBackendError(f"[Rank 0]: every rank reached monitoredBarrier, then it failed: {error}") from None

    def _report(self, tag: int, timeout: timedelta) -> None:
        word = torch.zeros(1, dtype=torch.uint8)
        try:
            self._group.send_async(word, 0, tag=tag).wait(timeout)
            self._group.recv_async(word, 0, tag=tag - 1).wait(timeout)
        except (CollectiveError, PeerError) as error:
            raise DistBackendError(
                f"Rank {self._group.rank} successfully reached monitoredBarrier, but received errors while waiting "
                f"for send/recv from rank 0. Please check rank 0 logs for faulty rank. ({error})"
            ) from None
