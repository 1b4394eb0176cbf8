"""After all ranks of a script have ended, the next start continues from the snapshot and uses each sample once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.free_ports import free_port
from tests.warm.processes import RANKS

from .running import Commands, read_outputs

_SCRIPT = """
import os, signal
from pathlib import Path
import torch
import paceline.torch as pt

class Counts(torch.nn.Module):  # with SGD, each weight counts in how many means its sample was
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(80, dtype=torch.float64))

    def forward(self, numbers):
        return self.weight[numbers]

class Counter:
    num_steps = 0

    def state_dict(self):
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state):
        self.num_steps = state["num_steps"]

strategy = pt.strategy()
model, counter = Counts(), Counter()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 2.0 ** epoch)
loader = torch.utils.data.DataLoader(torch.arange(80), batch_size=4, shuffle=True)
model, optimizer, loader, scheduler = strategy.prepare(model, optimizer, loader, scheduler)
strategy.register_state("counter", counter)
for epoch in range(int(os.environ.get("EPOCHS", 3))):
    for number, numbers in enumerate(loader):
        optimizer.zero_grad()
        loss = model(numbers).mean()
        loss.backward()
        optimizer.step()
        counter.num_steps += 1
        if epoch == 1 and number == 9 and strategy.rank == strategy.world_size - 1 and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    scheduler.step()
    strategy.print("epoch", epoch, loss.item())
    strategy.save("model", epoch=epoch)
values = strategy.gather_values()
if strategy.is_main:
    least, most = -values["weight"].max().item(), -values["weight"].min().item()
    print("ends", strategy.world_size, least, most, counter.num_steps, flush=True)
"""


def expected(num_ranks: int) -> str:
    """Return the expected last line. In epoch e, each sample has the weight 2^e."""
    return f"ends {num_ranks} {7 / (4 * num_ranks)} {7 / (4 * num_ranks)} {60 // num_ranks}"


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        pytest.param(1, [], marks=pytest.mark.thorough),
        (2, []),
        (2, ["--min-ranks", "2"]),
        (2, ["--strategy", "sharded"]),
    ],
)
def test_a_script_continues_from_its_snapshot(
    paceline: Commands, tmp_path: Path, num_ranks: int, options: list[str]
) -> None:
    paceline.environment[RANKS] = "torch"
    (tmp_path / "script.py").write_text(_SCRIPT)
    command = ["run", "--nproc-per-node", str(num_ranks), *options, "--snapshot-dir", "snapshots"]
    first = paceline.run(*command, "--snapshot-every", "1ms", "script.py")
    assert first.status not in (0, 2), first
    assert (tmp_path / "died").exists()
    second = paceline.run(*command, "--snapshot-every", "1h", "script.py")
    assert second.status == 0, second
    assert second.err.count("the training continues in epoch 1") == 1, second.err
    assert second.out.count(expected(num_ranks)) == 1, second.out
    assert "epoch 0 " not in second.out, "rank 0 prints in an epoch that the snapshot contains"
    assert "epoch 1 " in second.out


def test_a_script_with_fewer_epochs_than_its_snapshot(paceline: Commands, tmp_path: Path) -> None:
    paceline.environment[RANKS] = "torch"
    (tmp_path / "script.py").write_text(_SCRIPT)
    (tmp_path / "died").touch()
    for epochs, every in (("2", "1ms"), ("1", "1h")):
        paceline.environment["EPOCHS"] = epochs
        finished = paceline.run("run", "--snapshot-dir", "snapshots", "--snapshot-every", every, "script.py")
        assert finished.status == 0, finished
        assert ("ended before epoch 1 of the snapshot" in finished.err) == (epochs == "1"), finished


@pytest.mark.thorough
def test_torchrun_restarts_all_workers_and_the_training_continues(paceline: Commands, tmp_path: Path) -> None:
    """There are two agents. After the death of one rank, each agent restarts its worker."""
    (tmp_path / "script.py").write_text(_SCRIPT)
    variables = {"PACELINE_SNAPSHOT_DIR": "snapshots", "PACELINE_SNAPSHOT_EVERY": "1ms"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2:4", "--nproc-per-node", "1"]
    command += ["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    command += ["--rdzv-conf", "last_call_timeout=1", "--log-dir", str(tmp_path / "logs"), "script.py"]
    agents = [
        subprocess.Popen(
            command, cwd=tmp_path, env={**paceline.environment, **variables}, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    outputs = read_outputs(agents)
    assert [agent.returncode for agent in agents] == [0, 0]
    assert (tmp_path / "died").exists()
    assert any(expected(2) in output for output in outputs), outputs


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--snapshot-dir", "snapshots", "--snapshot-every", "often"], "--snapshot-every often"),
        (["--snapshot-every", "5m"], "--snapshot-every 5m"),
        (["--strategy", "hybrid", "--snapshot-dir", "snapshots"], "--snapshot-dir snapshots"),
    ],
)
def test_impossible_options(paceline: Commands, tmp_path: Path, options: list[str], named: str) -> None:
    (tmp_path / "script.py").write_text("")
    finished = paceline.run("run", *options, "script.py")
    assert finished.status == 2, finished
    assert named in finished.err
