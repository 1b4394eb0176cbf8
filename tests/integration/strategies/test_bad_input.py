"""Mistakes of a script on one rank, with `paceline run` and all strategies: a message of one sentence, no hang."""

from __future__ import annotations

import os
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
from tests.free_ports import free_port
from tests.warm.processes import RANKS, WarmProcess

from paceline.errors import UsageError

pytest.importorskip("torch")

SCRIPT = """
import sys
from datetime import timedelta

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline.torch as pt


class Net(nn.ModuleList):
    def forward(self, x, parts):
        return sum(part(x).mean() for part in parts)


strategy = pt.strategy(timeout=timedelta(seconds=20))
if sys.argv[1] == "two":
    pt.strategy()
model, rank = Net([nn.Linear(4, 1), nn.Linear(4, 1)]), strategy.rank
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=2)
model, optimizer, loader = strategy.prepare(model, optimizer, loader)
num_steps = 0
for epoch in range(2):
    for step, (x,) in enumerate(loader):
        if sys.argv[1] == "break" and rank == 1 and step == 1 + epoch:
            model[0](x).mean().backward()  # for nothing
            break
        optimizer.zero_grad()
        if sys.argv[1] == "replace" and rank == 1 and step == 2:
            strategy.module[0].weight = nn.Parameter(torch.zeros(1, 4))
        used = strategy.module if sys.argv[1] != "unused" or rank == 0 or step < 2 else strategy.module[:1]
        model(x, used).backward()
        optimizer.step()
        num_steps += 1
strategy.barrier()
print("steps", rank, num_steps, f"{strategy.reduce(float(model[0].weight.sum()), 'max'):.6f}")
"""


def run(folder: Path, strategy: str, case: str) -> tuple[int | None, str, str]:
    """Return the status, standard output and standard error."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    launcher = WarmProcess(
        ["-m", "paceline", "run", "--strategy", strategy, "--nproc-per-node", "2", script, case],
        env={**os.environ, RANKS: "torch"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
    return launcher.returncode, out, err


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("unused", "rank 1: the parameters 1.weight, 1.bias got no gradient from this backward pass"),
        ("replace", "rank 1: parameter '0.weight' was replaced after prepare()"),
    ],
)
def test_the_error_names_the_rank_with_the_mistake(tmp_path: Path, case: str, words: str) -> None:
    status, _, err = run(tmp_path, "all-reduce", case)
    assert status == 1, err
    assert "paceline run: rank 1 of 2 failed with exit status 1" in err
    assert words in err.splitlines()[-1]
    assert "[rank1]" not in err


@pytest.mark.parametrize("strategy", ["parameter-server", pytest.param("hybrid", marks=pytest.mark.thorough)])
def test_a_second_strategy_with_servers_is_refused(tmp_path: Path, strategy: str) -> None:
    status, _, err = run(tmp_path, strategy, "two")
    assert status == 1, err
    assert f"strategy {strategy}: this process already has a strategy with servers" in err.splitlines()[-1]


def test_servers_do_not_wait_for_ranks_after_a_break_from_an_epoch(tmp_path: Path) -> None:
    status, out, err = run(tmp_path, "parameter-server", "break")
    assert status == 0, err
    printed_steps = sorted(line.partition("steps ")[2].split() for line in out.splitlines() if "steps" in line)
    assert [(rank, steps) for rank, steps, _ in printed_steps] == [("0", "8"), ("1", "3")], out


def test_a_rank_beyond_the_world_size_does_not_wait_for_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.distributed would wait until its timeout."""
    from paceline.torch.strategies.ranks import Ranks

    variables = {"RANK": "3", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="RANK is 3 and WORLD_SIZE is 2"):
        Ranks.meet(timedelta(seconds=5), backend="gloo")
