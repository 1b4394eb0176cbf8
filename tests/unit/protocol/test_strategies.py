"""Which strategy is meant, and what it has no use for."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.protocol import (
    STRATEGIES,
    BoundedDelay,
    Eventual,
    Sequential,
    choose_strategy,
    is_one_process,
    needs_servers,
)


@pytest.mark.parametrize(
    ("processes", "servers", "name"),
    [(1, None, "one-device"), (2, None, "all-reduce"), (2, 0, "all-reduce"), (1, 1, "hybrid"), (3, 2, "hybrid")],
)
def test_what_nobody_said(processes: int, servers: int | None, name: str) -> None:
    assert choose_strategy(None, processes=processes, servers=servers).name == name


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_by_its_name(name: str) -> None:
    choice = choose_strategy(name, processes=1)
    assert choice.name == name
    assert (choice.servers, choice.consistency is not None) == ((1, True) if needs_servers(name) else (0, False))
    if is_one_process(name):
        with pytest.raises(UsageError, match=f"strategy {name} is one process, 2 were asked for"):
            choose_strategy(name, processes=2)
    else:
        assert choose_strategy(name, processes=2).name == name


def test_consistency() -> None:
    def chosen(name: str, consistency: str | None) -> object:
        return choose_strategy(name, processes=2, consistency=consistency).consistency

    assert chosen("parameter-server", None) == Sequential(aggregate="mean")
    assert chosen("parameter-server", "sequential") == Sequential(aggregate="mean")
    assert chosen("parameter-server", "sequential:sum") == Sequential(aggregate="sum")
    assert chosen("hybrid", None) == BoundedDelay(tau=4)
    assert chosen("hybrid", "eventual") == Eventual()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "nothing"}, "there is no strategy 'nothing': expected one of one-device, mirrored"),
        ({"name": "all-reduce", "servers": 1}, "has no servers, 1 were asked for"),
        ({"name": "all-reduce", "consistency": "eventual"}, "leave --consistency eventual out"),
        ({"name": "all-reduce", "replicas": 2}, "leave --replicas out"),
        ({"name": "hybrid", "replicas": 2}, "leave --replicas out"),
        ({"name": "mirrored", "replicas": 0}, "0 replicas were asked for"),
        ({"name": "hybrid", "servers": 0}, "expected 1 or more"),
        ({"name": "parameter-server", "servers": -1}, "expected 1 or more"),
        ({"name": "parameter-server", "consistency": "soon"}, "'soon'"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose_strategy(processes=1, **options)
    assert said in str(caught.value)


def test_replicas() -> None:
    assert choose_strategy("mirrored", processes=1, replicas=8).replicas == 8
    assert choose_strategy("central-storage", processes=1).replicas is None
