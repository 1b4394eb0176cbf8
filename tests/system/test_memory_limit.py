"""Servers with more rows than their memory limit: a killed server loses no rows and leaves no file."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

import paceline
from paceline.protocol import Sequential

if sys.platform != "linux":
    pytest.skip("what a process has mapped is read on Linux only", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("warm_clusters")

ROWS, DIM = 50_000, 64


def maps_files(pid: int, folder: Path) -> bool:
    return str(folder) in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.thorough
def test_rows_beyond_the_limit_survive_the_death_of_a_server(tmp_path: Path) -> None:
    limit = paceline.MemoryLimit(num_bytes=1 << 20, spill_dir=str(tmp_path))
    keys = np.arange(ROWS, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    grads = np.random.default_rng(0).standard_normal((ROWS, DIM), np.float32)
    with paceline.local_cluster(
        servers=2, workers=1, replicas=1, consistency=Sequential(), memory_limit=limit
    ) as cluster:
        client = cluster.connect(timeout_s=60.0)
        table = client.sparse_table("t", dim=DIM, update=paceline.SGD(lr=1.0))
        for _ in range(2):
            table.push(keys, grads, tick=True).wait()
        expected = table.pull(keys)
        first, second = cluster.pids("server")
        assert maps_files(first, tmp_path)
        assert maps_files(second, tmp_path)
        os.kill(first, signal.SIGKILL)
        np.testing.assert_array_equal(table.pull(keys), expected)
        np.testing.assert_array_equal(expected, -(grads + grads))
        assert os.listdir(tmp_path) == []
    assert os.listdir(tmp_path) == []
