"""A small model of Ray, whose actors run in threads of this process."""

from __future__ import annotations

import concurrent.futures
import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

Futures = list["concurrent.futures.Future[Any]"]


class RayError(Exception):
    """The base class of Ray's errors."""


class FakeRay(ModuleType):
    """The functions of Ray that Paceline uses. `num_cpus` has the number of CPUs of each node."""

    def __init__(self, num_cpus: list[int]) -> None:
        super().__init__("ray")
        self.__version__ = "2.0"
        self.num_cpus = num_cpus
        self.address = "10.0.0.1"
        self.is_started = False
        self.groups: list[list[dict[str, float]]] = []
        self._waiting: list[tuple[list[dict[str, float]], concurrent.futures.Future[None]]] = []
        """The placement groups without resources."""
        self.killed: list[Any] = []
        self.ObjectRef = bytes
        self.util = self
        self._threads = concurrent.futures.ThreadPoolExecutor(64)  # one for each call that waits

    def close(self) -> None:
        self._threads.shutdown()

    def init(self, **options: Any) -> None:
        self.is_started = True

    def is_initialized(self) -> bool:
        return self.is_started

    def placement_group(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        assert self.is_started
        ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.groups.append(bundles)
        self._waiting.append((bundles, ready))
        self._reserve()
        return SimpleNamespace(bundles=bundles, ready=lambda: ready)

    def add_node(self, num_cpus: int) -> None:
        self.num_cpus.append(num_cpus)
        self._reserve()

    def _reserve(self) -> None:
        for entry in [*self._waiting]:
            waiting = {id(bundles) for bundles, _ in self._waiting if bundles is not entry[0]}
            used = sum(bundle["CPU"] for group in self.groups for bundle in group if id(group) not in waiting)
            if used <= sum(self.num_cpus):
                self._waiting.remove(entry)
                entry[1].set_result(None)

    def remove_placement_group(self, group: Any) -> None:
        self.groups = [bundles for bundles in self.groups if bundles is not group.bundles]
        self._waiting = [entry for entry in self._waiting if entry[0] is not group.bundles]

    def remote(self, **options: Any) -> Callable[[type], Any]:
        assert options["max_restarts"] == 0
        return lambda kind: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: self._actor(kind())))

    def _actor(self, actor: Any) -> Any:
        methods = {}
        for name in [name for name in dir(actor) if not name.startswith("_")]:
            call = getattr(actor, name)
            methods[name] = SimpleNamespace(remote=lambda *words, call=call: self._threads.submit(call, *words))
        return SimpleNamespace(**methods)

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)

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
        return self.address

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "0123456789abcdef")


class FakeBackend:
    """The base class of backends for Ray Train."""

    has_replica_groups = False


class FakeContext:
    """The context of the only worker of a training."""

    def get_world_rank(self) -> int:
        return 0

    def get_world_size(self) -> int:
        return 1

    get_local_rank, get_local_world_size = get_world_rank, get_world_size


@contextlib.contextmanager
def fake_ray(num_cpus: list[int]) -> Iterator[FakeRay]:
    """Put a model of Ray in place of the package. It has nodes with these numbers of CPUs."""
    fake: Any = FakeRay(num_cpus)
    contents: dict[str, dict[str, Any]] = {
        "exceptions": {"RayError": RayError},
        "util": {name: getattr(fake, name) for name in ("placement_group", "remove_placement_group")},
        "util.placement_group": {"PlacementGroup": object},
        "train": {"get_context": FakeContext},
        "train.backend": {"Backend": FakeBackend, "BackendConfig": object},
        "util.scheduling_strategies": {"PlacementGroupSchedulingStrategy": lambda *_, **__: None},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setitem(sys.modules, "ray", fake)
        for name, values in contents.items():
            module = ModuleType(f"ray.{name}")
            vars(module).update(values)
            patch.setitem(sys.modules, f"ray.{name}", module)
        fake.train = sys.modules["ray.train"]
        with without_ray():
            yield fake
            fake.close()


@contextlib.contextmanager
def without_ray() -> Iterator[None]:
    """Import the modules that use Ray again in the block and after it, because each import uses another ``ray``."""
    _unload()
    yield
    _unload()


def _unload() -> None:
    users = ("paceline.ray", "paceline.launch.engines.ray")
    for name in [name for name in sys.modules if name.startswith(users)]:
        parent, _, child = name.rpartition(".")
        vars(sys.modules.get(parent, ModuleType(""))).pop(child, None)
        del sys.modules[name]
