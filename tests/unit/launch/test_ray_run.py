"""``paceline.ray.run`` with a small model of Ray, whose actors run in threads. ``system/test_ray.py`` uses Ray."""

from __future__ import annotations

import concurrent.futures
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from paceline.errors import PeerError, UsageError

Futures = list["concurrent.futures.Future[Any]"]


class RayError(Exception):
    """The base class of Ray's errors."""


class FakeRay(ModuleType):
    """The functions of Ray that Paceline uses. `num_cpus` has the number of CPUs of each node."""

    def __init__(self, num_cpus: list[int]) -> None:
        super().__init__("ray")
        self.num_cpus = num_cpus
        self.is_started = False
        self.groups: list[list[dict[str, float]]] = []
        self.ObjectRef = bytes
        self.util = self
        self._threads = concurrent.futures.ThreadPoolExecutor()

    def close(self) -> None:
        self._threads.shutdown()

    def init(self) -> None:
        self.is_started = True

    def is_initialized(self) -> bool:
        return self.is_started

    def placement_group(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        assert self.is_started
        ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        if sum(bundle["CPU"] for bundle in bundles) <= sum(self.num_cpus):
            ready.set_result(None)
        self.groups.append(bundles)
        return SimpleNamespace(bundles=bundles, ready=lambda: ready)

    def remove_placement_group(self, group: Any) -> None:
        self.groups.remove(group.bundles)

    def remote(self, **options: Any) -> Callable[[type], Any]:
        assert options["max_restarts"] == 0
        return lambda kind: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: self._actor(kind())))

    def _actor(self, actor: Any) -> Any:
        methods = {}
        for name in ("describe", "run", "stop"):
            call = getattr(actor, name)
            methods[name] = SimpleNamespace(remote=lambda *words, call=call: self._threads.submit(call, *words))
        return SimpleNamespace(**methods)

    def wait(self, references: Futures, num_returns: int = 1, timeout: float = 0) -> tuple[Futures, Futures]:
        when = concurrent.futures.FIRST_COMPLETED if num_returns < len(references) else concurrent.futures.ALL_COMPLETED
        done, missing = concurrent.futures.wait(references, timeout, when)
        return [*done], [*missing]

    def get(self, references: Any) -> Any:
        return [future.result() for future in references] if isinstance(references, list) else references.result()

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": sum(self.num_cpus)}

    available_resources = cluster_resources

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": number}} for number in self.num_cpus]

    def get_node_ip_address(self) -> str:
        return "10.0.0.1"

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "0123456789abcdef")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    """The model of Ray, in place of the package."""
    fake: Any = FakeRay([2, 2])
    contents: dict[str, dict[str, Any]] = {
        "exceptions": {"RayError": RayError},
        "util": {name: getattr(fake, name) for name in ("placement_group", "remove_placement_group")},
        "util.placement_group": {"PlacementGroup": object},
        "util.scheduling_strategies": {"PlacementGroupSchedulingStrategy": lambda *_, **__: None},
    }
    monkeypatch.setitem(sys.modules, "ray", fake)
    for name, values in contents.items():
        module = ModuleType(f"ray.{name}")
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, f"ray.{name}", module)
    yield fake
    fake.close()


@pytest.fixture(autouse=True)
def _unloaded() -> Iterator[None]:
    """Import ``paceline.ray`` again in each test and later, because each import uses another ``ray``."""
    _unload()
    yield
    _unload()


def _unload() -> None:
    for name in [name for name in sys.modules if name.startswith("paceline.ray")]:
        del sys.modules[name]


def _run_ranks(monkeypatch: pytest.MonkeyPatch, run_node: Callable[..., Any], **options: Any) -> list[Any]:
    import paceline.ray
    import paceline.ray.node

    monkeypatch.setattr(paceline.ray.node, "run_node", run_node)
    return paceline.ray.run(int, **options)


def test_values_and_resources(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = []

    def run_node(request: Any, num_cores: int, is_needed: Callable[[], bool]) -> Any:
        groups.append(ray.groups[0])
        node = request.placement.launcher
        return 0, {rank: pickle.dumps((pickle.dumps((rank, num_cores)), None, "")) for rank in (2 * node, 2 * node + 1)}

    values = _run_ranks(monkeypatch, run_node, num_nodes=2, nproc_per_node=2, cpus_per_rank=1)
    assert values == [(0, 2), (1, 2), (2, 2), (3, 2)]
    assert groups == [[{"CPU": 2}] * 2] * 2
    assert ray.groups == []


def test_a_lost_node_ends_the_others(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    def run_node(request: Any, num_cores: int, is_needed: Callable[[], bool]) -> Any:
        if request.placement.launcher == 1:
            raise RayError("line of a traceback\nthe cause")
        deadline = time.monotonic() + 20
        while is_needed() and time.monotonic() < deadline:
            time.sleep(0.01)
        ended.append((request.placement.launcher, is_needed()))
        return -15, {}

    with pytest.raises(PeerError, match=r"10\.0\.0\.1 \(01234567\) has failed: the cause"):
        _run_ranks(monkeypatch, run_node, num_nodes=2)
    assert ended == [(0, False)]
    assert ray.groups == []


def test_missing_resources(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="3 x 2 CPU requested, 4 existing, 4 free, 2 on the largest node"):
        _run_ranks(monkeypatch, print, num_nodes=3, cpus_per_rank=2, timeout=timedelta(seconds=0.01))
    assert ray.groups == []


def test_another_version(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    import paceline.ray.node

    monkeypatch.setattr(paceline.ray.node, "__version__", "0.0.1")
    with pytest.raises(UsageError, match=r"0\.0\.1"):
        _run_ranks(monkeypatch, print)
    assert ray.groups == []


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    import paceline.ray

    with pytest.raises(ImportError, match=r"pip install 'paceline\[ray\]'"):
        _ = paceline.ray.run
