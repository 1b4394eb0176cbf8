"""Elastic training with parameter servers: ranks are killed and replaced while the others train."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.free_ports import two_free_ports
from tests.warm.processes import RANKS

from .running import Commands, Finished

_HYBRID = """
import itertools, os, signal, sys, time
from pathlib import Path
import torch
from torch import nn
import paceline.torch as pt
from paceline.torch.embeddings import ClusterTables

victim, last = sys.argv[1], sys.argv[2]
incarnation = os.environ["PACELINE_INCARNATION"]
num_pushes = {True: 0, False: 0}

def push(tables, pushes):
    num_pushes[strategy.has_joined] += 1
    original(tables, pushes)

original, ClusterTables.push = ClusterTables.push, push
strategy = pt.strategy(bucket_mb=0.0001)
torch.manual_seed(0)

class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = pt.Embedding(4, name="rows", seed=1)
        self.dense = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, keys):
        return self.dense(self.rows(keys).flatten(1))

model = Clicks()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.95)
keys = torch.randint(0, 20, (121, 3), generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(keys, keys.sum(1, keepdim=True) / 20 - 1)
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader, scheduler = strategy.prepare(model, optimizer, loader, scheduler)
num_steps = 0

def die(_):
    if incarnation == victim and num_steps >= 15:
        os.kill(os.getpid(), signal.SIGKILL)

strategy.module.dense[2].weight.register_hook(die)
print("starts", incarnation, flush=True)
for epoch in itertools.count():
    for inputs, targets in loader:
        time.sleep(0.01)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        num_steps += strategy.has_joined
        if incarnation == last and num_steps == 5:
            Path("done").touch()
    scheduler.step()
    if strategy.has_joined and strategy.reduce(float(epoch >= 6 and os.path.exists("done")), "min"):
        break
strategy.save("model")
strategy.barrier()
with torch.no_grad():
    loss = nn.functional.mse_loss(model(keys), data.tensors[1]).item()
dense = sum(parameter.double().sum().item() for parameter in strategy.module.dense.parameters())
print("ends", incarnation, repr(dense), repr(loss), flush=True)
print("pushes", incarnation, num_pushes[True], num_pushes[False], flush=True)
"""


@pytest.fixture
def elastic(paceline: Commands, tmp_path: Path) -> Commands:
    """Run commands whose ranks are forked from a process that has imported torch."""
    paceline.environment[RANKS] = "torch"
    (tmp_path / "hybrid.py").write_text(_HYBRID)
    return paceline


def run(elastic: Commands, strategy: str, *options: str) -> Finished:
    ranks = ["--min-ranks", "1", "--nproc-per-node", "2", "--servers", "1"]
    return elastic.run("run", "--strategy", strategy, *ranks, *options)


@pytest.mark.parametrize("options", [[], ["--consistency", "sequential"]])
def test_a_killed_rank_of_a_hybrid_training_is_replaced(elastic: Commands, tmp_path: Path, options: list[str]) -> None:
    finished = run(elastic, "hybrid", *options, "hybrid.py", "1", "2")
    assert finished.status == 0, finished
    assert "rank 1 was killed by SIGKILL" in finished.err
    assert finished.out.count("starts 0") == 1, "restarted"
    ends = dict(re.findall(r"ends (\d) (.*)", finished.out))
    assert ends.keys() == {"0", "2"}, finished
    assert len({*ends.values()}) == 1, "the ranks differ"
    assert float(ends["0"].split()[1]) < 0.05, finished.out
    found = re.findall(r"pushes (\d) (\d+) (\d+)", finished.out)
    pushes = {member: (int(joined), int(alone)) for member, joined, alone in found}
    assert pushes["2"][0] >= 5, "the new rank does not train the rows"
    assert pushes["2"][1] == 0, "the new rank changes rows before it has joined"
    assert (tmp_path / "model").is_dir()


def test_a_third_node_joins_a_hybrid_training(elastic: Commands) -> None:
    """The servers are on the first two nodes. The third node is killed and started again."""
    elastic.environment["PACELINE_TOKEN"] = "a secret of the tests"
    command = ["run", "--strategy", "hybrid", "--servers", "2", "--min-ranks", "1", "--max-ranks", "3", "--nnodes", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(two_free_ports()), "--node-rank"]
    running = [elastic.start(*command, str(node), "hybrid.py", "", "3") for node in range(3)]
    running[2].wait_line("starts 2")
    running[2].kill()
    running[0].wait_line("node 2 is lost")
    running[2] = elastic.start(*command, "2", "hybrid.py", "", "3")
    finished = [each.wait() for each in running]
    assert [each.status for each in finished] == [0, 0, 0], finished
    ends = dict(found for each in finished for found in re.findall(r"ends (\d) (.*)", each.out))
    assert ends.keys() == {"0", "1", "3"}, finished
    assert len({*ends.values()}) == 1, "the ranks differ"
