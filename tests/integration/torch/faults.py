"""Checks of failures: every rank gets an error, without delay."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import DeadlineError, GroupClosedError, MismatchError, RankLostError


def _error(call: Any) -> RuntimeError:
    try:
        call()
    except RuntimeError as error:
        return error
    raise AssertionError("no error")


def check_mismatch_raises_on_every_rank(rank: int, size: int) -> None:
    for is_async in (False, True):
        group = dist.new_group()

        def call(group: Any = group, is_async: bool = is_async) -> None:
            work = dist.all_reduce(torch.zeros(3 if rank == 1 else 4), group=group, async_op=is_async)
            if work is not None:
                work.wait()

        error = _error(call)
        assert {MismatchError, dist.DistBackendError} <= set(type(error).__mro__)
        assert "float32[3]" in str(error)
        assert "float32[4]" in str(error)
        assert isinstance(_error(lambda group=group: dist.barrier(group)), GroupClosedError)


def check_a_missing_rank(rank: int, size: int) -> None:
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=2))
    if rank != 1:
        start = time.monotonic()
        error = _error(lambda: dist.barrier(group))
        assert isinstance(error, RankLostError), error
        assert 1 in error.ranks
        assert "timeout of this process group is 2 s" in str(error)
        assert 1.9 < time.monotonic() - start < 25.0  # the other groups have 30 s
    dist.barrier()


def check_waiting_with_a_timeout(rank: int, size: int) -> None:
    group = dist.new_group()
    tensor = torch.ones(1)
    if rank == 0:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        assert not work.is_completed()
        assert isinstance(_error(lambda: work.wait(timedelta(seconds=0.2))), DeadlineError)
    dist.barrier()
    if rank == 0:
        assert work is not None
        work.wait()  # the other rank has continued
    else:
        dist.all_reduce(tensor, group=group)
    assert tensor.item() == size


def check_abort_ends_a_running_call(rank: int, size: int) -> None:
    group = dist.new_group()
    if rank == 0:
        work = dist.barrier(group, async_op=True)
        time.sleep(0.2)
        group.abort()
        assert work is not None
        assert isinstance(_error(work.wait), RuntimeError)
    elif rank == 1:
        assert "rank 0" in str(_error(lambda: dist.barrier(group)))
    dist.barrier()


def last_killed_rank_is_named(rank: int, size: int) -> None:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    error = _error(lambda: dist.all_reduce(tensor))
    assert isinstance(error, RankLostError), error
    assert 2 in error.ranks, error
    assert time.monotonic() - start < 20.0  # the time-out is 30 s
    assert isinstance(_error(lambda: dist.all_reduce(tensor)), GroupClosedError)
