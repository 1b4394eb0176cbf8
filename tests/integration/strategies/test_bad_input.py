"""What `paceline run` and the strategies do with scripts that do wrong on one rank: one sentence, no hang."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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


def start(folder: Path, strategy: str, case: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, "-m", "paceline", "run", "--strategy", strategy, "--nproc-per-node", "2", str(script), case],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("unused", "rank 1: the parameters 1.weight, 1.bias got no gradient from this backward pass"),
        ("replace", "rank 1: parameter '0.weight' was replaced by another one after prepare()"),
    ],
)
def test_one_rank_that_does_wrong_is_the_one_that_is_blamed(tmp_path: Path, case: str, words: str) -> None:
    done = start(tmp_path, "all-reduce", case)
    assert done.returncode == 1, done.stderr
    assert "paceline run: rank 1 of 2 failed with exit status 1" in done.stderr
    assert words in done.stderr.splitlines()[-1]
    assert "[rank1]" not in done.stderr


def test_servers_wait_for_nobody_who_has_left_an_epoch_by_break(tmp_path: Path) -> None:
    done = start(tmp_path, "parameter-server", "break")
    assert done.returncode == 0, done.stderr
    said = sorted(line.partition("steps ")[2].split() for line in done.stdout.splitlines() if "steps" in line)
    assert [(rank, steps) for rank, steps, _ in said] == [("0", "8"), ("1", "3")], done.stdout
