"""A rank of ``paceline.horovod`` dies. The other ranks get HorovodInternalError, and do not hang."""

from __future__ import annotations

import os
import signal
import time

import torch
from horovod_calls import raises  # type: ignore[import-not-found]

import paceline.horovod as hvd


def start(rank: int, size: int) -> None:
    hvd.init()


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
