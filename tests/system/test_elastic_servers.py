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
strategy = pt.strategy(bucket_mb=0.0001, timeout=300)
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
        time.sleep(0.01 + 0.3 * (incarnation == "1" and os.path.exists("slow")))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        num_steps += strategy.has_joined
        if incarnation == "1" and not strategy.has_joined:
            Path("slow").unlink(missing_ok=True)
        if incarnation == last and num_steps >= 5 and not os.path.exists("slow"):
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

_LARGEST_LOSS = 0.8
"""The largest loss of the next script, which is 4 at the start. Without deaths it is 0.4 after six epochs."""
_PARAMETERS = """
import itertools, os, signal, sys, time
from pathlib import Path
import torch
from torch import nn
import paceline.torch as pt

victims, last, num_epochs = sys.argv[1].split(","), sys.argv[2], int(sys.argv[3])
incarnation = os.environ["PACELINE_INCARNATION"]
strategy = pt.strategy(bucket_mb=0.0001, timeout=300)
is_sequential = strategy.client.consistency.tau == 0
torch.manual_seed(0)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(121))
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, inputs):
        return self.layers(inputs)

def loss_of(model, inputs, targets, numbers):  # counts: its gradient shows how often each sample was applied
    counts = strategy.module.counts[numbers]
    counts = counts.mean() if is_sequential else counts.sum() / 4
    return nn.functional.mse_loss(model(inputs), targets) + counts

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.0625)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5 if epoch > 1 and is_sequential else 1.0)
inputs = torch.randn(121, 4, generator=torch.Generator().manual_seed(1))
targets = inputs.sum(1, keepdim=True)
data = torch.utils.data.TensorDataset(inputs, targets, torch.arange(121))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader, scheduler = strategy.prepare(model, optimizer, loader, scheduler)
average = torch.optim.swa_utils.AveragedModel(strategy.module)
strategy.register_state("average", average)
num_steps, changes = 0, 0.0

def die(_):
    if incarnation in victims and num_steps >= 7:
        os.kill(os.getpid(), signal.SIGKILL)

strategy.module.layers[0].weight.register_hook(die)
print("starts", incarnation, flush=True)
for epoch in itertools.count():
    for batch in loader:
        time.sleep(0.01)
        optimizer.zero_grad()
        loss_of(model, *batch).backward()
        optimizer.step()
        num_steps += strategy.has_joined
        changes += scheduler.get_last_lr()[0] / 0.0625
        if incarnation == last and num_steps == 5:
            Path("done").touch()
    scheduler.step()
    average.update_parameters(strategy.module)
    if strategy.has_joined and strategy.reduce(float(epoch + 1 >= num_epochs and os.path.exists("done")), "min"):
        break
strategy.save("model", loss=0.0)
values = sum(parameter.double().sum().item() for parameter in strategy.module.parameters())
strategy.module.train()
with torch.no_grad():
    loss = nn.functional.mse_loss(strategy.module(inputs), targets).item()
counts = strategy.module.counts.detach().double() / -0.0625
print("ends", incarnation, repr(values), repr(loss), flush=True)
print("counts", incarnation, epoch + 1, counts.min().item(), counts.max().item(), flush=True)
print("changes", incarnation, changes, counts.sum().item(), flush=True)
strategy.barrier()
strategy.load("model")
restored = sum(parameter.double().sum().item() for parameter in strategy.module.parameters())
print("restores", incarnation, restored == values, flush=True)
"""

_MEANS = """
import torch
from torch import nn
import paceline.torch as pt

class Counts(nn.Module):  # with SGD, each weight is the sample's weight in the mean
    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(43))

    def forward(self, numbers):
        return self.weights[numbers]

strategy, model = pt.strategy(), Counts()
loader = torch.utils.data.DataLoader(torch.arange(43), batch_size=4, shuffle=True)
model, optimizer, loader = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), loader)
for numbers in loader:
    optimizer.zero_grad()
    model(numbers).mean().backward()
    optimizer.step()
strategy.barrier()
print("weights", sorted(round(-weight, 4) for weight in strategy.module.weights.tolist())[38:], flush=True)
"""


@pytest.fixture
def elastic(paceline: Commands, tmp_path: Path) -> Commands:
    """Run commands whose ranks are forked from a process that has imported torch."""
    paceline.environment[RANKS] = "torch"
    (tmp_path / "hybrid.py").write_text(_HYBRID)
    (tmp_path / "parameters.py").write_text(_PARAMETERS)
    (tmp_path / "means.py").write_text(_MEANS)
    return paceline


def run(elastic: Commands, *options: str) -> Finished:
    return elastic.run("run", "--strategy", "hybrid", "--servers", "1", "--min-ranks", "1", *options)


def check_ends(finished: list[Finished], *members: str, largest_loss: float = 0.05) -> None:
    """Check that these members ended, with equal parameters and rows."""
    found = dict(match for each in finished for match in re.findall(r"ends (\d) (.*)", each.out))
    assert found.keys() == {*members}, finished
    assert len({*found.values()}) == 1, "the ranks differ"
    assert float(found[members[0]].split()[1]) < largest_loss, found


def pushes(finished: Finished, member: str) -> tuple[int, int]:
    """Return how often a member sent gradients of rows, while it took part and while it computed alone."""
    found = re.search(rf"pushes {member} (\d+) (\d+)", finished.out)
    assert found is not None, finished
    return int(found[1]), int(found[2])


@pytest.mark.parametrize("options", [[], pytest.param(["--consistency", "sequential"], marks=pytest.mark.thorough)])
def test_a_killed_rank_of_a_hybrid_training_is_replaced(elastic: Commands, tmp_path: Path, options: list[str]) -> None:
    finished = run(elastic, "--nproc-per-node", "2", *options, "hybrid.py", "1", "2")
    assert finished.status == 0, finished
    assert "rank 1 was killed by SIGKILL" in finished.err
    assert finished.out.count("starts 0") == 1, "restarted"
    check_ends([finished], "0", "2")
    num_joined, num_alone = pushes(finished, "2")
    assert num_joined >= 5, "the new rank does not train the rows"
    assert num_alone == 0, "the new rank changes rows before it has joined"
    assert (tmp_path / "model").is_dir()


@pytest.mark.parametrize("options", [pytest.param([], marks=pytest.mark.thorough), ["--consistency", "sequential"]])
def test_a_slow_rank_of_a_hybrid_training_is_left_out(elastic: Commands, tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "slow").touch()
    finished = run(elastic, "--nproc-per-node", "3", "--drop-stragglers", "5", *options, "hybrid.py", "", "1")
    assert finished.status == 0, finished
    assert "rank 1 is left out" in finished.err
    assert "rank 1 has recovered" in finished.err
    check_ends([finished], "0", "1", "2")
    assert pushes(finished, "1")[1] == 0, "the slow rank changes rows while it is left out"


@pytest.mark.thorough
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
    check_ends(finished, "0", "1", "3")


def run_parameters(
    elastic: Commands, victims: str, last: str, *options: str, num_ranks: int = 3, min_ranks: int = 1
) -> Finished:
    command = ["run", "--strategy", "parameter-server", "--servers", "2", "--min-ranks", str(min_ranks)]
    command += ["--nproc-per-node", str(num_ranks), *options, "parameters.py", victims, last, "6"]
    return elastic.run(*command)


def check_counts(finished: Finished) -> None:
    """Check that the servers applied the gradient of each sample once in each epoch."""
    found = re.findall(r"counts \d (\d+) (\S+) (\S+)", finished.out)
    assert len({*found}) == 1, found
    epochs, least, most = map(float, found[0])
    assert least == pytest.approx(epochs / 4, rel=1e-4)
    assert most == pytest.approx(epochs / 4, rel=1e-4)


@pytest.mark.parametrize(
    "consistency",
    ["sequential", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("bounded:2", "eventual"))],
)
def test_killed_ranks_of_a_training_with_servers_are_replaced(
    elastic: Commands, tmp_path: Path, consistency: str
) -> None:
    """Rank 0 and a replacement are killed."""
    finished = run_parameters(elastic, "0,3", "4", "--consistency", consistency)
    assert finished.status == 0, finished
    assert finished.err.count("was killed by SIGKILL") == 2
    check_ends([finished], "1", "2", "4", largest_loss=_LARGEST_LOSS)
    assert finished.out.count("True") == 3, "the checkpoint differs"
    assert (tmp_path / "model").is_dir()
    if consistency == "sequential":
        changes = {
            member: tuple(map(float, rest)) for member, *rest in re.findall(r"changes (\d) (\S+) (\S+)", finished.out)
        }
        expected, total = changes["1"]
        assert total == pytest.approx(expected, rel=1e-4), "a step was not applied, or applied twice"
    else:
        check_counts(finished)


@pytest.mark.parametrize("consistency", ["sequential", pytest.param("sequential:sum", marks=pytest.mark.thorough)])
def test_gradients_on_servers_are_the_mean_over_samples(elastic: Commands, consistency: str) -> None:
    """Two ranks have 43 samples: five steps of 4 and 4 samples, and then a step of 2 samples and 1 sample."""
    options = ["--min-ranks", "1", "--nproc-per-node", "2", "--consistency", consistency]
    finished = elastic.run("run", "--strategy", "parameter-server", *options, "means.py")
    assert finished.status == 0, finished
    assert finished.out.count(f"weights {[0.125] * 2 + [0.3333] * 3}") == 2, finished.out


def test_a_third_node_joins_a_training_with_servers(elastic: Commands) -> None:
    elastic.environment["PACELINE_TOKEN"] = "a secret of the tests"
    command = ["run", "--strategy", "parameter-server", "--servers", "2", "--min-ranks", "1", "--max-ranks", "3"]
    command += ["--nnodes", "2", "--consistency", "bounded:1", "--master-addr", "127.0.0.1"]
    command += ["--master-port", str(two_free_ports()), "--node-rank"]
    running = [elastic.start(*command, str(node), "parameters.py", "", "2", "6") for node in range(3)]
    finished = [each.wait() for each in running]
    assert [each.status for each in finished] == [0, 0, 0], finished
    check_ends(finished, "0", "1", "2", largest_loss=_LARGEST_LOSS)
    check_counts(finished[0])


def test_too_few_ranks_end_a_training_with_servers(elastic: Commands) -> None:
    finished = run_parameters(elastic, "1,2", "9", min_ranks=2)
    assert finished.status == 1, finished
    assert "1 rank is left, and --min-ranks is 2" in finished.err or "no rank is left" in finished.err
