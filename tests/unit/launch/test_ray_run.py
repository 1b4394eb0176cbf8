"""``paceline.ray.run`` with a small model of Ray, whose actors run in threads. ``system/test_ray.py`` uses Ray."""

from __future__ import annotations

import math
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from tests.unit.launch.fake_ray import FakeRay, RayError, fake_ray, without_ray

from paceline.errors import PeerError, UsageError


@pytest.fixture
def ray() -> Iterator[FakeRay]:
    with fake_ray([2, 2]) as fake:
        yield fake


def _run_ranks(monkeypatch: pytest.MonkeyPatch, run_node: Callable[..., Any], **options: Any) -> list[Any]:
    import paceline.ray.running

    monkeypatch.setattr(paceline.ray.running, "run_node", run_node)
    return paceline.ray.run(int, **options)


def test_values_and_resources(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = []

    def run_node(call: Any, placement: Any, num_cores: int, is_needed: Callable[[], bool]) -> Any:
        groups.append(ray.groups[0])
        node = placement.launcher
        return 0, {rank: pickle.dumps((pickle.dumps((rank, num_cores)), None, "")) for rank in (2 * node, 2 * node + 1)}

    values = _run_ranks(monkeypatch, run_node, num_nodes=2, nproc_per_node=2, cpus_per_rank=1, timeout=60)
    assert values == [(0, 2), (1, 2), (2, 2), (3, 2)]
    assert groups == [[{"CPU": 2}] * 2] * 2
    assert ray.groups == []


def test_a_lost_node_ends_the_others(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    def run_node(call: Any, placement: Any, num_cores: int, is_needed: Callable[[], bool]) -> Any:
        if placement.launcher == 1:
            raise RayError("line of a traceback\nthe cause")
        deadline = time.monotonic() + 20
        while is_needed() and time.monotonic() < deadline:
            time.sleep(0.01)
        ended.append((placement.launcher, is_needed()))
        return -15, {}

    with pytest.raises(PeerError, match=r"10\.0\.0\.1 \(01234567\) has failed: the cause"):
        _run_ranks(monkeypatch, run_node, num_nodes=2)
    assert ended == [(0, False)]
    assert ray.groups == []


def _return(*ranks: int) -> tuple[int, dict[int, bytes]]:
    return 0, {rank: pickle.dumps((pickle.dumps(rank), None, "")) for rank in ranks}


def test_an_elastic_run_grows_and_starts_lost_nodes_again(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import paceline.ray.running

    monkeypatch.setattr(paceline.ray.running, "RETRY_S", 0.05)
    nodes: list[int] = []
    has_joined = threading.Event()

    def run_node(call: Any, placement: Any, num_cores: int, is_needed: Callable[[], bool]) -> Any:
        node = placement.launcher
        nodes.append(node)
        assert (placement.num_launchers, placement.can_grow) == (2, True)
        if node == 1 and nodes.count(1) == 1:
            ray.add_node(1)
            raise RayError("the node died")
        if nodes.count(1) == 2 and 2 in nodes:
            has_joined.set()
        assert has_joined.wait(20)
        return (75, {}) if node == 1 else _return(node)

    ray.num_cpus = [2]
    assert _run_ranks(monkeypatch, run_node, num_nodes=2, min_ranks=1, max_ranks=4) == [0, 2]
    assert sorted(nodes) == [0, 1, 1, 2]
    assert ray.groups == []
    errors = capfd.readouterr().err
    assert errors.count("has failed: the node died; the other nodes continue") == 1
    assert "ended with status 75; the other nodes continue" in errors


def test_an_elastic_run_ends_with_its_first_node(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    import paceline.ray.running

    monkeypatch.setattr(paceline.ray.running, "LAST_S", 0.1)
    has_started = threading.Event()

    def run_node(call: Any, placement: Any, num_cores: int, is_needed: Callable[[], bool]) -> Any:
        if placement.launcher == 0:
            assert has_started.wait(20)
            return result
        has_started.set()
        while is_needed():
            time.sleep(0.01)
        return 75, {}

    result = _return(0)
    assert _run_ranks(monkeypatch, run_node, min_ranks=1, max_ranks=2) == [0]
    result = (1, {0: pickle.dumps((None, pickle.dumps(KeyError("five")), "a traceback"))})
    with pytest.raises(KeyError, match="five"):
        _run_ranks(monkeypatch, run_node, min_ranks=1, max_ranks=2)
    assert ray.groups == []


def test_missing_resources(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="3 x 2 CPU requested, 4 existing, 4 free, 2 on the largest node"):
        _run_ranks(monkeypatch, print, num_nodes=3, cpus_per_rank=2, timeout=timedelta(seconds=0.01))
    assert ray.groups == []


@pytest.mark.parametrize("options", [{"cpus_per_rank": math.nan}, {"gpus_per_rank": math.nan}, {"gpus_per_rank": 1.5}])
def test_impossible_resources(ray: FakeRay, monkeypatch: pytest.MonkeyPatch, options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="expected more than 0 CPUs"):
        _run_ranks(monkeypatch, print, **options, timeout=timedelta(seconds=0.01))


def test_another_version(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.launch.engines import ray_nodes

    monkeypatch.setattr(ray_nodes.NodeActor, "find_place", lambda _: ray_nodes.NodePlace("10.0.0.1", "0", "0.0.1"))
    with pytest.raises(UsageError, match=r"0\.0\.1"):
        _run_ranks(monkeypatch, print)
    assert ray.groups == []


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with without_ray():
        import paceline.ray

        with pytest.raises(ImportError, match=r"pip install 'paceline\[ray\]'"):
            _ = paceline.ray.run
