"""``paceline stacks``: the rank that hangs is seen, also before a timeout, and in the files for PyTorch's analysis."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest
from tests.free_ports import two_free_ports
from tests.waiting import wait_until
from tests.warm.processes import RANKS, WarmProcess

from .running import Commands, Running

_HANG = """
import sys, time
from datetime import timedelta
import torch, torch.distributed as dist

def load():
    print("hangs", flush=True)
    time.sleep(600)

dist.init_process_group("paceline", timeout=timedelta(seconds=float(sys.argv[1])))
part = dist.new_group([1, 2, 3])
x = torch.ones(1000)
for step in range(5):
    if step == 3 and dist.get_rank() == 2:
        load()
    dist.all_reduce(x)
    if dist.get_rank() != 0:
        dist.all_gather([torch.empty(2) for _ in range(3)], torch.ones(2), group=part)
"""
_STALE = """
import os, time
import numpy as np
import paceline
with paceline.connect(rank=int(os.environ["RANK"]), timeout_s=60) as client:
    table = client.dense_table("net", size=4, update=paceline.SGD(lr=1.0))
    for step in range(3):
        table.pull()
        table.push(np.ones(4, np.float32))
        if step == 1 and client.rank == 1:
            print("hangs", flush=True)
            time.sleep(600)
        client.tick()
"""


def _script(folder: Path, text: str) -> str:
    (folder / "train.py").write_text(text)
    return "train.py"


def _blocks(text: str) -> dict[str, str]:
    """Return the groups of processes by their first line."""
    return {block.partition("\n")[0]: block for block in text.strip().split("\n\n")}


def _analyse(commands: Commands, folder: Path) -> str:
    words = ["-m", "torch.distributed.flight_recorder.fr_trace", str(folder)]
    pipe = subprocess.PIPE
    analysis = WarmProcess(words, kind="torch", env=commands.environment, stdout=pipe, stderr=pipe, text=True)
    output, errors = analysis.communicate(60)
    assert analysis.returncode == 0, errors
    return f"{output}{errors}"


def _wait_waiting(paceline: Commands, run: Running, text: str) -> str:
    """Return the output of ``paceline stacks`` when a process waits in an operation with this text."""
    for _ in range(30):
        out = paceline.succeed("stacks", str(run.process.pid)).out
        if text in out:
            return out
    raise AssertionError(out)


@pytest.fixture
def with_torch(paceline: Commands) -> Commands:
    """Run commands whose ranks are forked from a process that has imported torch."""
    paceline.environment[RANKS] = "torch"
    return paceline


def test_the_rank_that_hangs_is_seen_in_one_look(with_torch: Commands, tmp_path: Path) -> None:
    run = with_torch.start("run", "--nproc-per-node", "4", _script(tmp_path, _HANG), "100")
    run.wait_line("hangs")
    out = _wait_waiting(with_torch, run, "ranks 0-1, 3")
    assert len(out.splitlines()) < 25
    blocks = _blocks(out)
    waiting, hanging = blocks["ranks 0-1, 3"], blocks["rank 2"]
    assert re.search(r"in all_reduce\(float32\[1000\], sum\), call 4 of group '.*', for [\d.]+ s", waiting)
    assert "dist.all_reduce(x)" in waiting
    assert "in no operation; the last was all_gather(float32[2]), call 3 of group" in hanging
    assert "in load: time.sleep(600)" in hanging

    written = with_torch.succeed("stacks", str(run.process.pid), "--flight-recorder", "now")
    assert "wrote the last collectives of 4 ranks to now" in written.out
    found = _analyse(with_torch, tmp_path / "now")
    assert "Not all ranks joining collective, sequence number: 4" in found
    assert "missing ranks: {2}" in found

    run.process.send_signal(signal.SIGSTOP)  # the launcher is not needed
    assert "load" in with_torch.succeed("stacks", "--full").out
    run.process.send_signal(signal.SIGCONT)


def test_a_timeout_prints_the_stacks_once_and_writes_the_last_collectives(with_torch: Commands, tmp_path: Path) -> None:
    script = _script(tmp_path, _HANG)
    finished = with_torch.run("run", "--nproc-per-node", "4", "--flight-recorder", "failed", script, "4")
    assert finished.status == 1
    assert finished.err.count("The processes on this machine:") == 1
    assert finished.err.count("ranks 0-1, 3\n") == 1
    assert finished.err.count("in load: time.sleep(600)") == 1
    assert "the last collectives of 4 ranks are in failed" in finished.err
    assert sorted(path.name for path in (tmp_path / "failed").iterdir()) == [
        f"paceline_rank_{rank}" for rank in range(4)
    ]
    assert "missing ranks: {2}" in _analyse(with_torch, tmp_path / "failed")


def test_workers_that_wait_for_a_worker_are_seen(paceline: Commands, tmp_path: Path) -> None:
    paceline.environment[RANKS] = "plain"
    options = ["--strategy", "parameter-server", "--consistency", "sequential", "--servers", "1"]
    run = paceline.start("run", *options, "--nproc-per-node", "2", _script(tmp_path, _STALE))
    run.wait_line("hangs")
    blocks = _blocks(_wait_waiting(paceline, run, "in pull"))
    assert re.search(r"in pull of 4 keys of table 'net' at server 0, request \d+, iteration 2", blocks["rank 0"])
    assert "time.sleep(600)" in blocks["rank 1"]
    assert {"scheduler", "server 0"} <= blocks.keys()


@pytest.mark.parametrize(
    ("words", "status", "expected"),
    [
        ([], 1, "no job runs on this machine"),
        (["99999999"], 2, "there is no process with this id"),
        (["1"], 2, "belongs to "),
        (["127.0.0.1:1"], 2, "no process of a cluster with this scheduler runs on this machine"),
    ],
)
def test_bad_input(words: list[str], status: int, expected: str, paceline: Commands) -> None:
    finished = paceline.run("stacks", *words)
    assert (finished.status, finished.out) == (status, "")
    assert finished.err.startswith("paceline: ")
    assert expected in finished.err
    assert finished.err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [pytest.param("all-reduce", marks=pytest.mark.thorough), "parameter-server"])
def test_the_processes_of_all_nodes(with_torch: Commands, tmp_path: Path, strategy: str) -> None:
    port = two_free_ports()
    with_torch.environment["PACELINE_TOKEN"] = "a token for tests"
    command = ["run", "--nnodes", "2", "--nproc-per-node", "2", "--strategy", strategy]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    script, seconds = _script(tmp_path, _HANG), "100"
    nodes = [with_torch.start(*command, "--node-rank", str(node), script, seconds) for node in range(2)]
    nodes[1].wait_line("hangs")
    for _ in range(30):
        out = with_torch.succeed("stacks", f"127.0.0.1:{port + 1}").out
        if "ranks 0-1, 3" in out and "in load" in out:
            break
    blocks = _blocks(out)
    assert "dist.all_reduce(x)" in blocks["ranks 0-1, 3"]
    assert "in load: time.sleep(600)" in blocks["rank 2"]
    assert ("scheduler" in blocks) == (strategy == "parameter-server")
    nodes[1].kill()
    found = with_torch.run("stacks", f"127.0.0.1:{port + 1}")
    assert "no answer from the launcher on " in found.err or "rank 2" not in found.out


@pytest.mark.slow
def test_the_processes_of_a_cluster_by_hand(paceline: Commands, tmp_path: Path) -> None:
    token = tmp_path / "token"
    scheduler = paceline.start("scheduler", "--port", "0", "--token-file", token)
    address = scheduler.wait_line("listening on ").split()[-1].removeprefix("tcp://")
    server = paceline.start("server", "--scheduler", address, "--token-file", token)
    server.wait_line("listening on ")
    wait_until(
        lambda: {"scheduler", "server 0"} <= _blocks(paceline.run("stacks", address, "--token-file", token).out).keys(),
        "the processes do not answer",
    )
    found = paceline.run("stacks", address, "--token-file", token, "--flight-recorder", "x")
    assert (found.status, found.err.count("\n")) == (2, 1)
    scheduler.signal(signal.SIGINT)
    assert scheduler.wait().status == 0
    assert server.wait().status == 0
    gone = paceline.run("stacks", address, "--token-file", token)
    assert (gone.status, gone.err.count("\n")) == (1, 1)
