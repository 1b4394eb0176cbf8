"""All strategies guarantee that a training loop has the same result with each strategy.

The ranks of strategies with several processes run this file as a program. Two processes serve all strategies one after
another, because importing torch takes seconds.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import paceline
from paceline.errors import UsageError
from paceline.protocol import Sequential
from paceline.torch import strategy

SIZE = 2
STEPS = 10
ROWS = 6
PATIENCE_S = 180
ONE_PROCESS: list[tuple[str, dict[str, Any]]] = [
    ("mirrored", {"replicas": 2}),
    ("mirrored", {"replicas": 5}),
    ("central-storage", {"replicas": 2}),
]
COMPILED = ["before eager", "after aot_eager"]
SEVERAL = ["all-reduce", "parameter-server, 1 server", "parameter-server, 2 servers"]


def momentum(parameters: Iterator[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters: Iterator[nn.Parameter]) -> Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


OPTIMIZERS: list[Callable[[Iterator[nn.Parameter]], Optimizer]] = [momentum, adam]


def train(
    name: str,
    make_optimizer: Callable[[Iterator[nn.Parameter]], Optimizer],
    rank: int = 0,
    size: int = 1,
    compiled: str = "",
    **options: Any,
) -> torch.Tensor:
    """Return all parameters after the same training loop on this rank's part of each batch.

    `compiled` is ``before`` or ``after``: whether the model is compiled before or after ``prepare``.
    """
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 64), nn.Tanh(), nn.Linear(64, 5)
    )
    when, _, backend = compiled.partition(" ")
    generator = torch.Generator().manual_seed(2)
    with strategy(name, device="cpu", **options) as chosen:
        assert chosen.world_size == size
        given: Any = torch.compile(model, backend=backend) if when == "before" else model
        prepared, optimizer = chosen.prepare(given, make_optimizer(model.parameters()))
        if when == "after":
            prepared = torch.compile(prepared, backend=backend)
        for _ in range(STEPS):
            x = torch.randn(SIZE * ROWS, 1, 8, 8, generator=generator).chunk(size)[rank]
            y = torch.randint(0, 5, (SIZE * ROWS,), generator=generator).chunk(size)[rank]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(prepared(x), y)
            loss.backward()
            optimizer.step()
        chosen.gather_values()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread, because threads of an operator wait for one another if other tests use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train_on_ranks(folder: Path) -> list[dict[str, list[float]]]:
    """Return each rank's parameters after training, by ``strategy, optimizer``."""
    from tests.integration.strategies.rank_checks import run_ranks

    consistency = Sequential(aggregate="mean")
    with (
        paceline.local_cluster(servers=1, workers=SIZE, consistency=consistency) as one,
        paceline.local_cluster(servers=2, workers=SIZE, consistency=consistency) as two,
    ):
        clusters = {cluster.scheduler: cluster.token for cluster in (one, two)}
        run_ranks([__file__, folder, json.dumps(clusters)], SIZE, "equal-results", patience_s=PATIENCE_S)
    return [json.loads((folder / f"rank{rank}").read_text()) for rank in range(SIZE)]


@pytest.mark.timeout(300)
def test_every_strategy_gives_the_result_of_one_device(tmp_path: Path) -> None:
    """One test runs all checks, so that each pytest worker does not start its own ranks."""
    results = train_on_ranks(tmp_path)
    for make_optimizer in OPTIMIZERS:
        expected = train("one-device", make_optimizer)
        found = {f"{name} {options}": train(name, make_optimizer, **options) for name, options in ONE_PROCESS}
        assert_close(expected, found, results, make_optimizer.__name__)
    for compiled in COMPILED:
        expected = train("one-device", momentum)
        found = {"one device": train("one-device", momentum, compiled=compiled)}
        for name, options in ONE_PROCESS[1:]:
            if compiled.startswith("after"):
                found[name] = train(name, momentum, compiled=compiled, **options)
            else:
                with pytest.raises(UsageError, match=r"prepare\(\) the model first, then compile it"):
                    train(name, momentum, compiled=compiled, **options)
        assert_close(expected, found, results, compiled)


def assert_close(
    expected: torch.Tensor, found: dict[str, torch.Tensor], results: list[dict[str, list[float]]], case: str
) -> None:
    """Compare the parameters of one process with the parameters of each strategy, on every rank."""
    for rank, values in enumerate(results):
        for name in SEVERAL:
            found[f"{name}, rank {rank}"] = torch.tensor(values[f"{name}, {case}"])
    distances = {name: float((values - expected).abs().max()) for name, values in found.items()}
    assert max(distances.values()) < 1e-5, (case, distances)


def main(folder: Path, clusters: dict[str, str]) -> None:
    """Run one rank: train with the strategies of several processes, and write the values of each strategy."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    results: dict[str, list[float]] = {}
    surroundings: list[tuple[str, str]] = [("", ""), *clusters.items()]
    for name, (scheduler, token) in zip(SEVERAL, surroundings, strict=True):
        os.environ["PACELINE_SCHEDULER"], os.environ["PACELINE_TOKEN"] = scheduler, token
        for make_optimizer in OPTIMIZERS:
            # each strategy uses a separate part of the store
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(len(results))
            values = train(name.split(",")[0], make_optimizer, rank, SIZE)
            results[f"{name}, {make_optimizer.__name__}"] = values.tolist()
        for compiled in COMPILED:
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(len(results))
            values = train(name.split(",")[0], momentum, rank, SIZE, compiled)
            results[f"{name}, {compiled}"] = values.tolist()
    (folder / f"rank{rank}").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
