"""``paceline run --replicas``: servers and the scheduler are killed, and the training continues without loss."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
from tests.free_ports import free_port, two_free_ports
from tests.warm.processes import RANKS

from paceline.launch.local import wait_cluster
from paceline.transport import SocketTransport

from .running import MARK, PROMPT_S, Commands, Running, our_processes
from .test_run import script

_TOKEN = "a token for tests"
_LINE = (
    r"paceline run: server (\d) was killed by SIGKILL: its replicas serve its data, and another server "
    r"replaces it\n"
)
_COUNT = """
import os, time
from pathlib import Path
import numpy as np
import paceline
with paceline.connect(rank=int(os.environ["RANK"]), timeout_s=20) as client:
    table = client.dense_table("net", size=5000, update=paceline.SGD(lr=1.0))
    for step in range(1, 201):
        table.push(np.full(5000, -1, np.float32), tick=True)
        assert (table.pull() == step).all()
        if step == 100:
            print("waits", flush=True)
            while not Path("go").exists():
                time.sleep(0.01)
print("counted", flush=True)
while not Path(os.environ.get("END", "go")).exists():
    time.sleep(0.01)
"""
_TRAIN = """
import os, time
from pathlib import Path
import torch
from torch import nn
import paceline.torch as pt

torch.set_num_threads(1)
rank, size, steps = int(os.environ["RANK"]), 2, 80
generator = torch.Generator().manual_seed(3)
inputs = torch.randn(steps, size, 8, 16, generator=generator)
targets = inputs.sum(-1, keepdim=True).sin()

def train(parts, prepare, when=lambda step: None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 300), nn.Tanh(), nn.Linear(300, 60), nn.Tanh(), nn.Linear(60, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    module, optimizer = prepare(model, optimizer)
    for step in range(steps):
        when(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(module(inputs[step, parts].flatten(0, 1)), targets[step, parts].flatten(0, 1)).backward()
        optimizer.step()
    return model

def wait(step):
    if step == 20 and rank == 0:
        print("kill", os.environ["PACELINE_SCHEDULER"], flush=True)
    while step == 40 and not Path("go").exists():
        time.sleep(0.01)

with pt.strategy(bucket_mb=0.02) as strategy:
    found = train(slice(rank, rank + 1), strategy.prepare, wait)
    found = torch.cat([parameter.detach().flatten() for parameter in found.parameters()])
alone = torch.cat([weight.detach().flatten() for weight in train(slice(0, size), lambda *given: given).parameters()])
print("difference", (found - alone).abs().max().item(), flush=True)
"""
_CLICKS = """
import math, os, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import paceline.torch as pt

torch.set_num_threads(1)
torch.manual_seed(0)
keys = torch.randint(0, 500, (1920, 4))
model = nn.Sequential(pt.Embedding(8), nn.Flatten(), nn.Linear(32, 1))
with pt.strategy() as strategy:
    loader = DataLoader(TensorDataset(keys, (keys.sum(1, keepdim=True) % 2).float()), batch_size=16)
    model, optimizer, loader = strategy.prepare(model, torch.optim.Adagrad(model.parameters(), lr=0.05), loader)
    for epoch in range(3):
        for step, (x, y) in enumerate(loader):
            if (epoch, step) == (0, 20) and strategy.is_main:
                print("kill", os.environ["PACELINE_SCHEDULER"], flush=True)
            while (epoch, step) == (1, 5) and not Path("go").exists():
                time.sleep(0.01)
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
            loss.backward()
            optimizer.step()
    assert math.isfinite(loss.item())
    strategy.save("model")
print("trained", flush=True)
"""


@pytest.fixture
def replicated(paceline: Commands, tmp_path: Path) -> Commands:
    """Run commands with a token that the test knows."""
    paceline.environment["PACELINE_TOKEN"] = _TOKEN
    paceline.environment[RANKS] = "torch"
    # otherwise torch leaves a folder in the temporary folder
    paceline.environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)
    return paceline


def start(paceline: Commands, strategy: str, *arguments: str) -> Running:
    """Start two ranks, and two servers with one replica."""
    return paceline.start(
        "run", "--nproc-per-node", "2", "--strategy", strategy, "--servers", "2", "--replicas", "1", *arguments
    )


def kill(running: Running, role: str, scheduler: str) -> None:
    """Kill a process, and wait for its replacement."""
    running.children(role)[-1].kill()
    if role == "scheduler":
        running.wait_line("the scheduler was killed by SIGKILL. Another scheduler replaces it")
        wait_cluster(SocketTransport(_TOKEN), scheduler, 10.0)
    else:
        running.wait_line("another server replaces it")


def test_a_killed_server_does_not_change_the_model(replicated: Commands, tmp_path: Path) -> None:
    running = start(replicated, "parameter-server", script(tmp_path, _TRAIN))
    scheduler = running.wait_line("kill").split()[-1]
    for role in ("scheduler", "server"):
        kill(running, role, scheduler)
    (tmp_path / "go").touch()
    finished = running.wait()
    assert finished.status == 0, finished
    differences = [float(line.split()[-1]) for line in finished.out.splitlines() if "difference" in line]
    assert len(differences) == 2
    assert max(differences) < 1e-5
    lines = [
        "paceline run: the scheduler was killed by SIGKILL. Another scheduler replaces it\n",
        _LINE,
    ]
    assert re.fullmatch("".join(lines), finished.err), finished.err


@pytest.mark.thorough
def test_hybrid_training_continues_after_deaths(replicated: Commands, tmp_path: Path) -> None:
    running = start(replicated, "hybrid", script(tmp_path, _CLICKS))
    kill(running, "server", running.wait_line("kill").split()[-1])
    (tmp_path / "go").touch()
    finished = running.wait()
    assert finished.status == 0, finished
    assert finished.out.count("trained") == 2
    assert re.fullmatch(_LINE, finished.err), finished.err


def test_more_deaths_than_replicas_end_the_run(replicated: Commands, tmp_path: Path) -> None:
    running = start(replicated, "parameter-server", script(tmp_path, _COUNT))
    for rank in range(2):
        running.wait_line(f"[rank {rank}] waits")
    for server in running.children("server"):
        server.kill()
    finished = running.wait(PROMPT_S)
    assert finished.status == 1
    expected = (
        r"paceline run: servers? [01]( and 1)? died: 512 of 512 buckets of the tables were lost, because they had no "
        r"replica. The ranks cannot continue and were ended\n"
    )
    assert re.fullmatch(expected, finished.err), finished.err
    assert our_processes(replicated.environment[MARK]) == []


@pytest.mark.thorough
def test_a_node_replaces_local_servers(replicated: Commands, tmp_path: Path) -> None:
    """If a rank ends after the cluster, its node does not report lost data."""
    command = ["run", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(two_free_ports())]
    command += ["--strategy", "parameter-server", "--servers", "2", "--replicas", "1", "--heartbeat-timeout", "3"]
    command.append("--node-rank")
    name = script(tmp_path, _COUNT)
    first = replicated.start(*command, "0", name)
    replicated.environment["END"] = "end"
    second = replicated.start(*command, "1", name)
    first.wait_line("waits")
    second.wait_line("waits")
    # a stopped server that is declared dead does not end
    second.children("server")[0].send_signal(signal.SIGSTOP)
    second.wait_line("another server replaces it")
    (tmp_path / "go").touch()
    finished = first.wait()
    assert finished.status == 0, finished
    assert re.fullmatch(r"paceline scheduler: server 1 .* is declared dead: it was silent for 3 s\n", finished.err)
    (tmp_path / "end").touch()
    finished = second.wait()
    assert finished.status == 0, finished
    line = _LINE.replace("was killed by SIGKILL", "sent no heartbeat and was killed")
    assert re.fullmatch(line, finished.err), finished.err


def test_a_static_cluster_replaces_servers_at_the_same_addresses(replicated: Commands, tmp_path: Path) -> None:
    places = [f"127.0.0.1:{free_port()}" for _ in range(4)]
    (tmp_path / "cluster.json").write_text(json.dumps({"server": places[:2], "worker": places[2:]}))
    common_arguments = [
        "run",
        "--cluster",
        "cluster.json",
        "--strategy",
        "parameter-server",
        "--replicas",
        "1",
        "--job",
    ]
    servers = [replicated.start(*common_arguments, "server", "--index", str(index)) for index in range(2)]
    name = script(tmp_path, _COUNT)
    workers = [replicated.start(*common_arguments, "worker", "--index", str(index), name) for index in range(2)]
    for worker in workers:
        worker.wait_line("waits")
    servers[1].children("server")[0].send_signal(signal.SIGTERM)
    servers[1].wait_line("server 1 was killed by SIGTERM: its replicas serve its data, and another server replaces")
    assert json.loads(servers[1].children("server")[0].cmdline()[-1])["address"] == places[1]
    (tmp_path / "go").touch()
    for running in (*workers, *servers):
        finished = running.wait()
        assert finished.status == 0, finished
