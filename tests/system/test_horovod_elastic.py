"""Elastic training with Horovod's API: ranks are killed, replaced and added."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.free_ports import two_free_ports
from tests.warm.processes import RANKS

from .running import Commands, Finished

_TRAIN = """
import os, signal, sys, time
import torch
import paceline.horovod as hvd

incarnation, victim, last, num_late = int(os.environ["PACELINE_INCARNATION"]), *map(int, sys.argv[1:])
if incarnation >= num_late:
    time.sleep(100)
hvd.init()
data = torch.utils.data.TensorDataset(torch.arange(32))
sampler = hvd.elastic.ElasticSampler(data)
loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
model = torch.nn.Embedding(32, 1)  # with SGD, each weight counts how often its sample was processed
torch.nn.init.constant_(model.weight, incarnation)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Sum)

@hvd.elastic.run
def train(state):
    print("begins", incarnation, hvd.rank(), hvd.size(), flush=True)
    while not state.is_over:
        for batch, (items,) in enumerate(loader):
            if incarnation == victim and batch == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.02)
            optimizer.zero_grad()
            model(items).sum().backward()
            optimizer.step()
            sampler.record_batch(batch, len(items))
            if batch % 2:
                state.commit()
        state.epoch += 1
        sampler.set_epoch(state.epoch)
        state.is_over = hvd.allreduce(torch.tensor(incarnation), op=hvd.Max).item() >= last
        state.commit()

state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, is_over=False)
state.register_reset_callbacks([lambda: print("resets", incarnation, hvd.size(), flush=True)])
train(state)
counts = {-round(weight, 3) for weight in model.weight.reshape(-1).tolist()}
print("ends", incarnation, state.epoch, *counts, flush=True)
"""

_FAIL = """
import paceline.horovod as hvd

hvd.init()

@hvd.elastic.run
def train(state):
    print("begins", state.batch, flush=True)
    for state.batch in range(state.batch, 20):
        if state.batch == 6:
            raise hvd.HorovodInternalError("mismatch")
        state.commit()

train(hvd.elastic.ObjectState(batch=0))
"""


@pytest.fixture
def horovod(paceline: Commands, tmp_path: Path) -> Commands:
    """Run commands whose ranks are forked from a process that has imported torch."""
    pytest.importorskip("torch")
    paceline.environment[RANKS] = "torch"
    (tmp_path / "train.py").write_text(_TRAIN)
    return paceline


def words(finished: Finished, first: str) -> list[list[int]]:
    """Return the numbers in the lines that begin with a word, in the order of output."""
    lines = re.findall(rf"(?:^|\] ){first} (.*)$", finished.out, re.MULTILINE)
    return [[int(float(word)) for word in line.split()] for line in lines]


def check_ends(finished: list[Finished], *members: int) -> None:
    """Check that these members ended in the same epoch, and that each epoch had each sample once."""
    assert [each.status for each in finished] == [0] * len(finished), finished
    ends = sorted(numbers for each in finished for numbers in words(each, "ends"))
    epoch = ends[0][1]
    assert ends == [[member, epoch, epoch] for member in members], finished


@pytest.mark.parametrize("min_ranks", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_killed_rank_is_replaced(horovod: Commands, min_ranks: int) -> None:
    options = ["--min-ranks", str(min_ranks), "--nproc-per-node", "2"]
    finished = horovod.run("run", *options, "train.py", "1", "2", "100")
    check_ends([finished], 0, 2)
    begins = words(finished, "begins")
    sizes = [size for member, _, size in begins if member == 0]
    assert sizes == [2, 1, 2] if min_ranks == 1 else [2, 2]  # with 1 rank, the training waits
    assert [2, 1, 2] in begins
    assert words(finished, "resets") == [[0, size] for size in sizes[1:]]


def test_a_rank_is_added(horovod: Commands) -> None:
    horovod.environment["PACELINE_TOKEN"] = "a secret of the tests"
    place = ["--master-addr", "127.0.0.1", "--master-port", str(two_free_ports())]
    options = ["run", "--strategy", "all-reduce", "--min-ranks", "1", "--max-ranks", "2", "--nnodes", "1", *place]
    first = horovod.start(*options, "train.py", "-1", "1", "100")
    first.wait_line("begins 0 0 1")
    second = horovod.start(*options, "--node-rank", "1", "train.py", "-1", "1", "100")
    finished = [first.wait(), second.wait()]
    check_ends(finished, 0, 1)
    assert words(finished[0], "begins") == [[0, 0, 1], [0, 0, 2]]
    assert words(finished[0], "resets") == [[0, 2]]
    assert words(finished[1], "begins") == [[1, 1, 2]]


def test_a_failure_that_returns_after_each_restart_ends_the_run(horovod: Commands, tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text(_FAIL)
    finished = horovod.run("run", "--strategy", "all-reduce", "--min-ranks", "1", "fail.py")
    assert finished.status == 1, finished
    assert words(finished, "begins") == [[0], *[[5]] * 5]
    assert "HorovodInternalError: mismatch" in finished.err


def test_too_few_ranks_end_the_run_after_the_timeout(horovod: Commands) -> None:
    horovod.environment["HOROVOD_ELASTIC_TIMEOUT"] = "1"
    finished = horovod.run("run", "--min-ranks", "2", "--nproc-per-node", "2", "train.py", "1", "2", "2")
    assert finished.status == 1
    assert "1 rank is left, no new rank has joined within 1 s, and --min-ranks is 2" in finished.err
