"""``paceline.dask.run`` on a cluster of two real Dask workers.

The functions are nested, so that they are pickled by value and the ranks need not import this module.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from distributed import Client
from tests.waiting import in_thread, wait_until

import paceline.dask
from paceline.errors import PeerError, UsageError

from .running import MARK, interrupting, make_endless, make_push, wait_functions_ended, wait_ranks

_CLUSTER = """
import sys
from distributed import LocalCluster

if __name__ == "__main__":
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        print(cluster.scheduler_address, flush=True)
        sys.stdin.read()
"""
_QUIET = {
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "1s",
    "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__INTERVAL": "10s",
}
"""Settings with which idle processes of Dask use less of the processor."""
_SOON = timedelta(seconds=0.3)


@pytest.fixture(scope="module")
def client(session: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a cluster with two workers. Their processes have the session's mark in their environment."""
    folder = tmp_path_factory.mktemp("dask")
    environment = {**os.environ, **_QUIET, MARK: session.mark, "DASK_TEMPORARY_DIRECTORY": str(folder)}
    with subprocess.Popen(
        [sys.executable, "-c", _CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as cluster:
        assert cluster.stdin is not None
        assert cluster.stdout is not None
        with Client(cluster.stdout.readline().strip()) as client:
            client.wait_for_workers(2, timeout=60)
            yield client
        cluster.stdin.close()


@pytest.fixture(autouse=True)
def _all_ended(client: Client, session: Any) -> Iterator[None]:
    """Check after the test that no process or file of a run is left."""
    yield

    wait_functions_ended(session.mark)


def test_the_values_of_ranks(client: Client) -> None:
    def reduce(scale: int) -> tuple[int, float, list[str]]:
        import numpy

        import paceline.collectives

        with paceline.collectives.init() as group:
            total = group.all_reduce(numpy.full(2, group.rank + 1.0))
            return group.rank, float(total[0]) * scale, [os.environ[name] for name in ("LOCAL_RANK", "OMP_NUM_THREADS")]

    assert paceline.dask.run(client, reduce, 2) == [(0, 6.0, ["0", "1"]), (1, 6.0, ["1", "1"])]


@pytest.mark.thorough
def test_servers(client: Client) -> None:
    assert paceline.dask.run(client, make_push(), strategy="hybrid", servers=2) == [[2.0, 2.0], [2.0, 2.0]]


@pytest.mark.parametrize(("num_nodes", "num_ranks"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.thorough)])
def test_the_exception_of_a_rank(client: Client, tmp_path: Path, num_nodes: int, num_ranks: int) -> None:
    class OwnError(Exception):
        pass

    def fail(folder: Path) -> None:
        if os.environ["RANK"] == "0":
            Path(folder, "0").touch()
            time.sleep(1000)
        while not Path(folder, "0").exists():
            time.sleep(0.01)
        raise OwnError("five", 5)

    with pytest.raises(OwnError) as caught:
        paceline.dask.run(client, fail, tmp_path, num_nodes=num_nodes, nproc_per_node=num_ranks)
    assert caught.value.args == ("five", 5)
    cause = str(caught.value.__cause__)
    assert isinstance(caught.value.__cause__, PeerError)
    assert "rank 1" in cause
    assert "in fail" in cause


@pytest.mark.thorough
def test_a_rank_that_exits(client: Client) -> None:
    with pytest.raises(PeerError, match=r"\b3\b"):
        paceline.dask.run(client, lambda: sys.exit(3), num_nodes=1)


def test_a_killed_worker(client: Client, tmp_path: Path) -> None:
    worker = sorted(client.nthreads())[1]
    pid = client.run(os.getpid, workers=[worker])[worker]
    killed_at = 0.0

    def kill() -> None:
        nonlocal killed_at
        wait_ranks(tmp_path, 2)
        killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)

    with in_thread(kill):
        with pytest.raises(PeerError, match=worker):
            paceline.dask.run(client, make_endless(tmp_path))
        assert time.monotonic() - killed_at < 10
    wait_until(lambda: len(client.nthreads()) == 2, "Dask has not restarted the worker")


@pytest.mark.thorough
def test_an_interrupted_run(client: Client, tmp_path: Path) -> None:
    with interrupting(lambda: wait_ranks(tmp_path, 1)), pytest.raises(KeyboardInterrupt):
        paceline.dask.run(client, make_endless(tmp_path), num_nodes=1)


@pytest.mark.thorough
def test_a_disconnected_client(client: Client, tmp_path: Path) -> None:
    other = Client(client.scheduler.address, set_as_default=False)

    def disconnect() -> None:
        wait_ranks(tmp_path, 1)
        other.close()

    with in_thread(disconnect), pytest.raises(PeerError):
        paceline.dask.run(other, make_endless(tmp_path), num_nodes=1)


def test_wrong_arguments(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(**options: Any) -> None:
        paceline.dask.run(client, int, **options)

    with pytest.raises(UsageError, match="2 of 3"):
        run(num_nodes=3, timeout=_SOON)
    with pytest.raises(UsageError, match=r"without tcp://127\.0\.0\.1:1\b"):
        run(workers=["tcp://127.0.0.1:1"], timeout=_SOON)
    servers: dict[str, Any] = {"servers": 1, "strategy": "all-reduce"}
    numbers: list[dict[str, Any]] = [{"num_nodes": -1}, {"num_nodes": 0}, {"workers": []}, {"nproc_per_node": 0}]
    for options in [*numbers, servers]:
        with pytest.raises(UsageError):
            run(**options)
    with pytest.raises(UsageError, match="client"):
        paceline.dask.run(None, int)
    with pytest.raises(UsageError, match="pickled"):
        paceline.dask.run(client, int, threading.Lock())
    found = client.get_versions(packages=["paceline"])
    found["workers"][min(found["workers"])]["packages"]["paceline"] = None
    monkeypatch.setattr(client, "get_versions", lambda packages: found)
    with pytest.raises(UsageError, match="None of paceline"):
        run()


def test_a_busy_worker(client: Client) -> None:
    worker = min(client.nthreads())
    busy = client.submit(time.sleep, 2, workers=[worker], pure=False)
    with pytest.raises(UsageError, match=worker):
        paceline.dask.run(client, int, timeout=timedelta(seconds=1))
    busy.result()
