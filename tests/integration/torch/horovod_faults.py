"""Ranks of ``paceline.horovod`` do not call, or die. The other ranks get HorovodInternalError, and do not hang."""

from __future__ import annotations

import mmap
import os
import signal
import time

import torch
from horovod_calls import raises  # type: ignore[import-not-found]

import paceline.horovod as hvd

_failures = mmap.mmap(-1, 1)
"""The number of failures that rank 1 has seen, in memory that all ranks share because they are forked."""


def start(rank: int, size: int) -> None:
    os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "2"
    os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "5"
    hvd.init()


def check_ranks_that_do_not_call(rank: int, size: int) -> None:
    for step in range(1, 3):  # in the first step the request is not in the cache
        if rank == 1:
            with raises(hvd.HorovodInternalError, "'late'", "ranks 0 and 2"):
                hvd.allreduce(torch.ones(1), name="late")
            _failures[0] = step
        deadline = time.monotonic() + 60.0
        while _failures[0] < step and time.monotonic() < deadline:
            time.sleep(0.05)
        assert hvd.allreduce(torch.ones(1), name="late").item() == 1.0


def last_killed_rank_fails_all_operations(rank: int, size: int) -> None:
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    for _ in range(2):
        with raises(hvd.HorovodInternalError, "rank 2"):
            hvd.allreduce(torch.ones(1), name="lost")
    with raises(hvd.HorovodInternalError, "rank 2"):
        hvd.join()
    assert time.monotonic() - began < 15.0
    hvd.shutdown()
