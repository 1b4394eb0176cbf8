"""The monitored barrier: rank 0 reports the missing ranks."""

from __future__ import annotations

import itertools
import time
from datetime import timedelta

import torch
from torch.distributed import DistBackendError

from paceline.collectives import Group
from paceline.errors import CollectiveError, DeadlineError, PeerError


class MonitoredBarrier:
    """The monitored barriers of one group. They use messages, because a collective may hang."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._tags = itertools.count(-2, -2)
        """Users' tags are not negative. Each barrier has two tags, so that late messages cannot match another barrier.
        """

    def wait(self, timeout: timedelta, *, wait_all_ranks: bool) -> None:
        """Return when every rank has called it; rank 0 raises an error with all missing ranks, or the first one."""
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
            except PeerError as error:  # the group has ended
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
