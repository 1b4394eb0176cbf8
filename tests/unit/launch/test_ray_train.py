"""The backend for Ray Train, with a small model of Ray. ``system/test_ray.py`` trains with Ray."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from tests.unit.launch.fake_ray import FakeBackend, FakeRay, fake_ray

from paceline.collectives.elastic import ElasticGroup
from paceline.environment import environment
from paceline.errors import PeerError, UsageError
from paceline.meeting.own_launcher import OwnLauncher, announce_rank


class Replacement:
    """A worker of Ray Train, which is this process, in place of one that has failed."""

    def execute(self, function: Callable[..., Any], *arguments: Any) -> None:
        function(*arguments)

    def execute_single(self, _: int, function: Callable[..., Any]) -> Any:
        return function()

    def __len__(self) -> int:
        return 1


class AllWorkers(Replacement):
    """The group of all workers."""

    def get_replica_groups(self) -> None:
        pass


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with fake_ray([]) as fake:
        fake.address = "127.0.0.1"
        yield fake


def make_config(**options: Any) -> Any:
    import paceline.ray

    return paceline.ray.PacelineConfig(**options)


def join() -> OwnLauncher:
    """Join the training as a rank, like ``paceline.torch.strategy()``."""
    launcher = announce_rank(environment(), None, 10.0)
    group = ElasticGroup(
        launcher.address, launcher.token, launcher.member,
        is_newcomer=launcher.is_newcomer, tls=None, timeout=timedelta(seconds=10),
    )  # fmt: skip
    group.enter()
    return launcher


def test_workers_get_the_variables_of_ranks(ray: FakeRay) -> None:
    config = make_config(strategy="sharded")
    backend = config.backend_cls()
    assert not backend.has_replica_groups
    backend.on_training_start(AllWorkers(), config)
    found = environment()
    assert (found.rank, found.master_addr, found.strategy) == (0, "127.0.0.1", "sharded")
    assert found.master_port
    assert found.token
    assert found.coordinator is None
    with config.train_func_context():
        pass


def test_the_end_of_the_function_ends_the_rank(ray: FakeRay) -> None:
    config = make_config(min_ranks=1)
    backend = config.backend_cls()
    assert backend.has_replica_groups
    backend.on_training_start(AllWorkers(), config)

    def end() -> None:
        join()
        raise SystemExit(0)

    with config.train_func_context():
        end()
    assert backend.coordinator.has_ended
    backend.on_training_start(Replacement(), config)
    backend.on_shutdown(Replacement(), config)
    assert backend.coordinator.has_ended
    backend.on_shutdown(AllWorkers(), config)
    assert backend.coordinator is None


def test_a_failed_training_ends_or_starts_again(ray: FakeRay) -> None:
    config = make_config(min_ranks=1)
    backend = config.backend_cls()
    backend.on_training_start(AllWorkers(), config)

    def fail() -> None:
        with config.train_func_context():
            join()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert backend.coordinator.failure
    backend.on_training_start(Replacement(), config)
    with pytest.raises(PeerError, match="--min-ranks is 1"):
        backend.on_training_start(Replacement(), config)
    backend.on_training_start(AllWorkers(), config)
    assert backend.coordinator.failure is None
    backend.on_shutdown(AllWorkers(), config)


def test_wrong_settings(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: list[dict[str, Any]] = [
        {"strategy": "unknown"},
        {"strategy": "hybrid"},
        {"min_ranks": 0},
        {"min_ranks": 1, "strategy": "sharded"},
    ]
    for options in wrong:
        with pytest.raises(UsageError):
            make_config(**options)
    monkeypatch.delattr(FakeBackend, "has_replica_groups")
    make_config()
    with pytest.raises(UsageError, match="Ray 2"):
        make_config(min_ranks=1)
