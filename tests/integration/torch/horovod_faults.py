"""Ranks of ``paceline.horovod`` do not call, or die. The other ranks get HorovodInternalError, and do not hang."""

from __future__ import annotations

import logging
import os
import signal
import time

import torch
from horovod_calls import raises  # type: ignore[import-not-found]

import paceline.horovod as hvd

_warnings: list[str] = []
LINE = "in check_ranks_that_do_not_call: time.sleep(8.0)"


class _Warnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _warnings.append(record.getMessage())


def start(rank: int, size: int) -> None:
    os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "1"
    os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "2"
    logging.getLogger("paceline.horovod").addHandler(_Warnings())
    hvd.init()


def check_ranks_that_do_not_call(rank: int, size: int) -> None:
    hvd.barrier()
    for _ in range(2):  # at the second time, the request would be in the cache, but a new start has no cache
        if rank != 1:
            time.sleep(8.0)
        with raises(
            hvd.HorovodInternalError, "'late'", "ranks 0 and 2", "in check_ranks_that_do_not_call: time.sleep(8.0)"
        ):
            hvd.allreduce(torch.ones(1), name="late")
        hvd.shutdown()
        hvd.init()
        assert hvd.allreduce(torch.ones(1), name="late").item() == 1.0
    if rank == 0:
        assert len(_warnings) == 2
        for missing in (0, 2):
            assert f"\n{missing}: [late]\n" in _warnings[0]
        assert _warnings[0].count(LINE) == 2


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
    assert time.monotonic() - began < 25.0
    hvd.shutdown()
