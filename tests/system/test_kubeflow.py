"""Trainings in a Kubeflow TrainJob report their progress."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kubeflow import StatusServer
from tests.warm.processes import RANKS

from .running import Commands

_SCRIPT = """
import torch, paceline.torch as pt

strategy = pt.strategy()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(10, 2))
loader = torch.utils.data.DataLoader(data, batch_size=2)
model, optimizer, loader = strategy.prepare(model, optimizer, loader)
for epoch in range(3):
    for (x,) in loader:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    strategy.report_progress((epoch + 1) / 3, loss=loss)
"""


@pytest.fixture
def server(paceline: Commands, tmp_path: Path) -> Iterator[StatusServer]:
    server = StatusServer(tmp_path)
    paceline.environment.update({**server.variables, RANKS: "torch"})
    yield server
    server.close()


def test_a_click_model(paceline: Commands, server: StatusServer, tmp_path: Path) -> None:
    lines = (f"{number % 2}\t{number % 7}\t{number % 3}" for number in range(2000))
    (tmp_path / "data.tsv").write_text("label\ta\tb\n" + "\n".join(lines))
    finished = paceline.run("train", "data.tsv", "--epochs", "2", "--eval", "data.tsv")
    assert finished.status == 0, finished
    assert server.received[-1]["progressPercentage"] == 100
    metrics = server.metrics()
    assert {"loss", "examples", "currentEpoch", "totalEpochs"} <= metrics.keys()
    assert metrics["totalEpochs"] == "2"


@pytest.mark.parametrize("options", [[], ["--min-ranks", "1"]])
def test_a_script(paceline: Commands, server: StatusServer, tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    ranks = ["--strategy", "all-reduce", "--nproc-per-node", "2", *options]
    finished = paceline.run("run", *ranks, "train.py")
    assert finished.status == 0, finished
    assert server.received[-1]["progressPercentage"] == 100
    metrics = server.metrics()
    assert float(metrics.pop("loss")) >= 0
    assert metrics == {"currentEpoch": "3", "samples": "10", "samplesPerEpoch": "10"}


def test_a_failing_server_does_not_disturb_the_training(
    paceline: Commands, server: StatusServer, tmp_path: Path
) -> None:
    server.status = 500
    (tmp_path / "train.py").write_text(_SCRIPT)
    finished = paceline.run("run", "train.py")
    assert finished.status == 0, finished
    assert finished.err.count("Kubeflow does not accept the progress") == 1
