"""The choice of the strategy, and options that it does not use."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.protocol import BoundedDelay, Eventual, Sequential
from paceline.strategies import STRATEGIES, StrategyFlags, choose_strategy, needs_servers
from paceline.strategies.elastic import ElasticFlags


@pytest.mark.parametrize(
    ("processes", "servers", "name"),
    [(1, None, "one-device"), (2, None, "all-reduce"), (2, 0, "all-reduce"), (1, 1, "hybrid"), (3, 2, "hybrid")],
)
def test_defaults(processes: int, servers: int | None, name: str) -> None:
    assert choose_strategy(None, processes=processes, servers=servers).name == name


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_by_name(name: str) -> None:
    choice = choose_strategy(name, processes=1)
    assert choice.name == name
    assert (choice.servers, choice.consistency is not None) == ((1, True) if needs_servers(name) else (0, False))
    if STRATEGIES[name].is_one_process:
        with pytest.raises(UsageError, match=f"strategy {name} runs in one process, got 2"):
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
    ("options", "message"),
    [
        ({"name": "nothing"}, "strategy='nothing': expected one of one-device, mirrored"),
        ({"name": "all-reduce", "servers": 1}, "has no servers, got 1"),
        ({"name": "all-reduce", "consistency": "eventual"}, "Leave --consistency eventual out"),
        ({"name": "all-reduce", "replicas": 2}, "Leave --replicas 2 out"),
        ({"name": None, "replicas": 2}, "strategy one-device has neither servers nor replicas in one process"),
        ({"name": "mirrored", "replicas": 0}, "0 replicas, expected 1 or more"),
        ({"name": "hybrid", "replicas": -1}, "-1 replicas, expected 0 or more"),
        ({"name": "hybrid", "servers": 0}, "expected 1 or more"),
        ({"name": "parameter-server", "servers": -1}, "expected 1 or more"),
        ({"name": "parameter-server", "consistency": "soon"}, "'soon'"),
        (
            {
                "name": "parameter-server",
                "flags": StrategyFlags(elastic=ElasticFlags(min_ranks=1, drop_stragglers=3.0)),
            },
            "--drop-stragglers 3: not supported by strategy parameter-server",
        ),
        (
            {"name": "parameter-server", "flags": StrategyFlags(elastic=ElasticFlags(min_ranks=1, global_batch=8))},
            "--global-batch 8: not supported with parameter servers",
        ),
        (
            {"name": "sharded", "flags": StrategyFlags(elastic=ElasticFlags(min_ranks=1))},
            "each rank has the only copy of a part of the model. Leave --min-ranks 1 out and pass --snapshot-dir DIR",
        ),
        (
            {"name": "pipeline", "flags": StrategyFlags(elastic=ElasticFlags(min_ranks=1))},
            "the only copy of a stage of the model. Leave --min-ranks 1 out and call strategy.save()",
        ),
        (
            {"name": "hybrid", "flags": StrategyFlags(elastic=ElasticFlags(min_ranks=1, global_batch=8))},
            "--global-batch 8: not supported with parameter servers",
        ),
    ],
)
def test_impossible_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose_strategy(processes=1, **options)
    assert message in str(caught.value)


def test_replicas() -> None:
    """The option means replicas of the model in one process, or replicas of the servers' rows, but never both."""

    def chosen(name: str, replicas: int | None) -> tuple[int | None, int]:
        choice = choose_strategy(name, processes=1, replicas=replicas)
        return choice.replicas, choice.server_replicas

    assert chosen("mirrored", 8) == (8, 0)
    assert chosen("central-storage", None) == (None, 0)
    for name in ("parameter-server", "hybrid"):
        assert [chosen(name, replicas) for replicas in (None, 0, 2)] == [(None, 0), (None, 0), (None, 2)]
