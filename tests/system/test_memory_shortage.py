"""Servers without further memory reject pushes, or end if their state is uncertain. No acknowledged push is lost."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np
import psutil
import pytest

import paceline
from paceline.errors import PacelineError
from paceline.protocol import Consistency, Eventual, Sequential
from paceline.ps import Client, messages
from paceline.tables.types import Keys

if sys.platform != "linux":
    pytest.skip("the memory of another process can be limited on Linux only", allow_module_level=True)
import resource

pytestmark = pytest.mark.usefixtures("warm_clusters")

DIM = 64
ROWS = 2000
SPARE_BYTES = 24 << 20


def ones(count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return -np.ones((count, DIM), np.float32)


def keys_of(number: int) -> Keys:
    return np.arange(number * ROWS, (number + 1) * ROWS, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def wait_complete(client: Client, without: int) -> None:
    """Wait until two servers other than the process `without` have each bucket."""
    for _ in range(600):
        found: messages.View = client.link.get_view()
        is_whole = all(len(group.members) == 2 and group.filling is None for group in found.groups)
        if is_whole and not psutil.pid_exists(without):
            return
        time.sleep(0.1)
    raise AssertionError("the server was not replaced")


@pytest.mark.parametrize("consistency", [pytest.param(Eventual(), marks=pytest.mark.thorough), Sequential()], ids=str)
def test_a_server_short_of_memory_loses_nothing(consistency: Consistency) -> None:
    """Otherwise a replica would have a push in its filter but not in its table, and acknowledge the repeated push."""
    with paceline.local_cluster(servers=2, workers=1, replicas=1, consistency=consistency) as cluster:
        client = cluster.connect(timeout_s=60.0)
        table = client.sparse_table("t", dim=DIM, update=paceline.SGD(lr=1.0))
        table.push(keys_of(0), ones(ROWS), tick=True).wait()
        table.pull(keys_of(0))
        short, other = cluster.pids("server")
        taken = psutil.Process(short).memory_info().vms + SPARE_BYTES
        resource.prlimit(short, resource.RLIMIT_AS, (taken, resource.RLIM_INFINITY))
        num_refused, acknowledged = 0, [0]
        for number in range(1, 80):
            try:
                table.push(keys_of(number), ones(ROWS), tick=True).wait()
                table.pull(keys_of(number)[:1])  # with sequential consistency, the chain has the iteration
                acknowledged.append(number)
            except PacelineError:
                num_refused += 1
            if not psutil.pid_exists(short) or num_refused > 5:
                break
        else:
            raise AssertionError("the memory was sufficient")
        if psutil.pid_exists(short):
            os.kill(short, signal.SIGKILL)
        wait_complete(client, short)
        os.kill(other, signal.SIGKILL)
        for number in acknowledged:
            assert set(table.pull(keys_of(number)).reshape(-1)) == {1.0}, number
