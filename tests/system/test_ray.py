"""Paceline on a real Ray cluster of three nodes. The first node has no CPUs, so it runs no ranks.

The functions are nested, so that they are pickled by value and the ranks need not import this module.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.pages import ROOT
from tests.waiting import in_thread, wait_until

from paceline.errors import PeerError, UsageError

from . import ray_cluster
from .elastic_training import TRAIN, ends
from .running import (
    MARK,
    Commands,
    Running,
    interrupting,
    make_endless,
    make_push,
    wait_functions_ended,
    wait_ranks,
)

pytestmark = ray_cluster.MARKS

_DRIVER = """
import os, time
from pathlib import Path

import paceline.ray

def live(folder):
    Path(folder, os.environ["RANK"]).touch()
    time.sleep(1000)

paceline.ray.run(live, os.environ["FOLDER"], num_nodes=2)
"""
"""A program that does not call ``ray.init()``."""


@pytest.fixture(scope="module")
def cluster(session: Any) -> Iterator[Any]:
    """A cluster whose processes have the session's mark. This process is connected to it."""
    with ray_cluster.started(num_nodes=2, **{MARK: session.mark}) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _all_ended(cluster: Any, session: Any) -> Iterator[None]:
    """Check that after the test no process or file of a run is left, and all resources are free."""
    import ray

    yield
    wait_functions_ended(session.mark)
    wait_until(
        lambda: [ray.available_resources().get(name) for name in ("CPU", "GPU")] == [4.0, 4.0],
        "resources are not free",
    )
    groups = ray.util.placement_group_table().values()
    assert {group["state"] for group in groups} <= {"REMOVED"}


def run(function: Any, *arguments: Any, num_nodes: int = 2, **options: Any) -> list[Any]:
    """Import ``paceline.ray`` only if Ray is installed."""
    import paceline.ray

    return paceline.ray.run(function, *arguments, num_nodes=num_nodes, **options)


def test_the_values_of_ranks(cluster: Any) -> None:
    import ray

    def reduce(scale: int) -> tuple[int, float, list[str]]:
        import numpy

        import paceline.collectives

        with paceline.collectives.init() as group:
            total = group.all_reduce(numpy.full(2, group.rank + 1.0))
            return group.rank, float(total[0]) * scale, [os.environ[name] for name in names]

    names = "LOCAL_RANK", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"
    values = run(reduce, ray.put(2), cpus_per_rank=2, gpus_per_rank=1)
    assert values == [(0, 6.0, ["0", "2", "0"]), (1, 6.0, ["1", "2", "0"])]


def test_servers(cluster: Any) -> None:
    assert run(make_push(), strategy="hybrid", servers=2) == [[2.0, 2.0], [2.0, 2.0]]


def test_the_exception_of_a_rank(cluster: Any, tmp_path: Path) -> None:
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
        run(fail, tmp_path)
    assert caught.value.args == ("five", 5)
    cause = str(caught.value.__cause__)
    assert isinstance(caught.value.__cause__, PeerError)
    assert "rank 1" in cause
    assert cluster.head_node.node_ip_address in cause
    assert "in fail" in cause


def test_a_killed_node(cluster: Any, tmp_path: Path) -> None:
    node = min(cluster.worker_nodes, key=lambda node: str(node.node_id))
    killed_at = 0.0

    def kill() -> None:
        nonlocal killed_at
        wait_ranks(tmp_path, 2)
        killed_at = time.monotonic()
        cluster.remove_node(node, allow_graceful=False)

    with in_thread(kill):
        with pytest.raises(PeerError, match=node.node_id[:8]):
            run(make_endless(tmp_path))
        assert time.monotonic() - killed_at < 20
    cluster.add_node(**ray_cluster.NODE)


def test_a_killed_driver(cluster: Any, tmp_path: Path) -> None:
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "FOLDER": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", _DRIVER], env=environment) as driver:
        wait_ranks(tmp_path, 2)
        driver.send_signal(signal.SIGKILL)


def test_an_interrupted_run(cluster: Any, tmp_path: Path) -> None:
    with interrupting(lambda: wait_ranks(tmp_path, 2)), pytest.raises(KeyboardInterrupt):
        run(make_endless(tmp_path))


def test_wrong_arguments(cluster: Any) -> None:
    missing: list[dict[str, Any]] = [{"num_nodes": 3, "cpus_per_rank": 2}, {"num_nodes": 1, "gpus_per_rank": 3}]
    for options in missing:
        with pytest.raises(UsageError) as caught:
            run(int, timeout=timedelta(seconds=1), **options)
        assert " CPU requested, 4 existing, 4 free, 2 on the largest node" in str(caught.value)
        assert ("1 x 3 GPU requested, 4 existing" in str(caught.value)) is ("gpus_per_rank" in options)
    wrong: list[dict[str, Any]] = [
        {"num_nodes": 0},
        {"nproc_per_node": 0},
        {"cpus_per_rank": 0},
        {"gpus_per_rank": -1},
        {"gpus_per_rank": 0.5, "nproc_per_node": 3},
        {"servers": 1, "strategy": "all-reduce"},
    ]
    for options in wrong:
        with pytest.raises(UsageError):
            run(int, **options)
    with pytest.raises(UsageError, match="pickled"):
        run(int, threading.Lock())


_PUSH = """
import numpy
import paceline
import paceline.collectives

with paceline.collectives.init() as group, paceline.connect() as cluster:
    table = cluster.dense_table("weights", size=2, update=paceline.SGD(lr=1.0))
    table.push(-numpy.ones(2, numpy.float32)).wait()
    group.barrier()
    print("pulled", table.pull().tolist())
"""
_LIVE = """
import time

print("lives", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def commands(cluster: Any, session: Any, tmp_path: Path) -> Commands:
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "TMPDIR": str(session.temporary)}
    return Commands(environment, tmp_path, [], afresh=True)


def start_script(commands: Commands, text: str, *options: str, words: tuple[str, ...] = ()) -> Running:
    (commands.folder / "script.py").write_text(text)
    return commands.start("run", "--on", "ray", "--nodes", "2", *options, "script.py", *words)


def test_a_script_with_servers(commands: Commands) -> None:
    options = "--strategy", "hybrid", "--servers", "2", "--nproc-per-node", "1"
    finished = start_script(commands, _PUSH, *options).wait()
    assert finished.status == 0, finished
    assert finished.out.count("pulled [2.0, 2.0]") == 2, finished


def test_an_interrupted_script(commands: Commands) -> None:
    running = start_script(commands, _LIVE)
    running.wait_line("lives")
    running.signal(signal.SIGINT)
    assert running.wait(20).status == 130


def test_a_script_on_a_killed_node(cluster: Any, commands: Commands) -> None:
    running = start_script(commands, _LIVE)
    running.wait_line("lives")
    node = cluster.worker_nodes.copy().pop()
    cluster.remove_node(node, allow_graceful=False)
    finished = running.wait(30)
    assert finished.status == 1, finished
    assert node.node_id[:8] in finished.err
    cluster.add_node(**ray_cluster.NODE)


def test_a_script_continues_on_another_node(cluster: Any, commands: Commands, tmp_path: Path) -> None:
    running = start_script(commands, TRAIN, "--min-ranks", "1", words=("", "2"))
    line = running.wait_line("starts 1 ")
    parents = {process.pid for process in psutil.Process(int(line.split()[-1])).parents()}
    node = next(node for node in cluster.worker_nodes if node.all_processes["raylet"][0].process.pid in parents)
    cluster.remove_node(node, allow_graceful=False)
    running.wait_line(f"({node.node_id[:8]})")
    cluster.add_node(**ray_cluster.NODE)
    finished = running.wait()
    assert finished.status == 0, finished
    last = ends(finished)
    assert last.keys() == {0, 2}
    assert last[0] == last[2]


def test_a_script_grows_with_the_cluster(cluster: Any, commands: Commands) -> None:
    """A node joins and dies, and another node joins in its place."""
    options = "--threads", "2", "--min-ranks", "1", "--max-ranks", "3"
    running = start_script(commands, TRAIN, *options, words=("", "3"))
    running.wait_line("starts 1 ")
    added = cluster.add_node(**ray_cluster.NODE)
    running.wait_line("starts 2 ")
    cluster.remove_node(added, allow_graceful=False)
    running.wait_line(f"({added.node_id[:8]})")
    added = cluster.add_node(**ray_cluster.NODE)
    finished = running.wait()
    cluster.remove_node(added)
    assert finished.status == 0, finished
    last = ends(finished)
    assert last.keys() == {0, 1, 3}
    assert len({*last.values()}) == 1, "the ranks differ"


def test_a_function_grows_with_the_cluster(cluster: Any, tmp_path: Path) -> None:
    def train() -> tuple[int, int]:
        import torch

        import paceline.torch as pt

        strategy: Any = pt.strategy()
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = torch.utils.data.TensorDataset(torch.randn(40, 4), torch.randn(40, 1))
        loader = torch.utils.data.DataLoader(data, batch_size=2)
        model, optimizer, loader = strategy.prepare(model, optimizer, loader)
        Path(tmp_path, f"started-{os.environ['RANK']}").touch()
        while True:
            for x, y in loader:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                time.sleep(0.02)
            if strategy.has_joined and strategy.reduce(float(strategy.world_size == 3), "min"):
                return strategy.rank, strategy.world_size

    with ThreadPoolExecutor(1) as threads:  # this thread adds a node, because Ray then sets the handlers of signals
        values = threads.submit(run, train, cpus_per_rank=2, min_ranks=1, max_ranks=4)
        wait_until(lambda: len([*tmp_path.iterdir()]) == 2, "the ranks have not started", 120)
        added = cluster.add_node(**ray_cluster.NODE)
        assert sorted(values.result(120)) == [(0, 3), (1, 3), (2, 3)]
    cluster.remove_node(added)


def test_wrong_scripts(commands: Commands) -> None:
    finished = start_script(commands, _LIVE, "--nproc-per-node", "3", "--queue-timeout", "1").wait()
    assert finished.status == 1, finished
    assert "2 x 3 CPU requested, 4 existing, 4 free, 2 on the largest node" in finished.err
    commands.environment["RAY_ADDRESS"] = "127.0.0.1:1"
    finished = start_script(commands, _LIVE).wait()
    assert finished.status == 2, finished
    assert "RAY_ADDRESS=127.0.0.1:1" in finished.err


_RAY_TRAIN = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
"""Ray's own warnings."""


def fit(train: Any, folder: Path, *, num_workers: int = 2, max_failures: int = 0, **options: Any) -> Any:
    import ray.train
    from ray.train.torch import TorchTrainer

    import paceline.ray

    return TorchTrainer(
        train,
        torch_config=paceline.ray.PacelineConfig(**options),
        scaling_config=ray.train.ScalingConfig(num_workers=num_workers),
        run_config=ray.train.RunConfig(
            storage_path=str(folder / "results"), failure_config=ray.train.FailureConfig(max_failures=max_failures)
        ),
    ).fit()


@_RAY_TRAIN
def test_ray_train(cluster: Any, tmp_path: Path) -> None:
    def train() -> dict[str, Any]:
        import ray.train

        import paceline.torch as pt

        strategy = pt.strategy()
        rank = ray.train.get_context().get_world_rank()
        return {"total": strategy.reduce(strategy.rank + 1.0, "sum"), "name": strategy.name, "rank": rank}

    assert fit(train, tmp_path).return_value == {"total": 3.0, "name": "all-reduce", "rank": 0}


@_RAY_TRAIN
def test_ray_train_replaces_a_worker(cluster: Any, tmp_path: Path) -> None:
    def train() -> None:
        import torch

        import paceline.torch as pt

        strategy: Any = pt.strategy()
        Path(tmp_path, f"started-{os.getpid()}").touch()
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = torch.utils.data.TensorDataset(torch.randn(40, 4), torch.randn(40, 1))
        loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
        model, optimizer, loader = strategy.prepare(model, optimizer, loader)
        for _ in range(100):
            for x, y in loader:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                if strategy.has_joined and strategy.world_size == 2:
                    Path(tmp_path, f"trained-{os.getpid()}").touch()
                if len(list(tmp_path.glob("trained-*"))) < 3:  # until a new worker takes part
                    time.sleep(0.1)
        values = [parameter.tolist() for parameter in strategy.module.parameters()]
        Path(tmp_path, f"ended-{os.getpid()}").write_text(repr((strategy.world_size, values)))

    def pids(state: str) -> set[int]:
        return {int(path.name.partition("-")[2]) for path in tmp_path.glob(f"{state}-*")}

    killed: list[int] = []

    def kill() -> None:
        wait_until(lambda: len(pids("trained")) == 2, "the workers do not train", 280)
        killed.append(pids("trained").pop())
        os.kill(killed[0], signal.SIGKILL)

    with in_thread(kill):
        fit(train, tmp_path, min_ranks=1, max_failures=1)
    assert len(pids("started")) == 3
    assert pids("ended") == pids("started") - {*killed}
    assert len({path.read_text() for path in tmp_path.glob("ended-*")}) == 1


@_RAY_TRAIN
def test_the_guide(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # for the results of Ray Train
    text = (ROOT / "docs" / "guides" / "ray.md").read_text().replace("ray.init()\n", "")
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, names)
    assert len(names["losses"]) == 4
    assert max(names["errors"]) < 1e-3
    assert names["result"].return_value > 0
