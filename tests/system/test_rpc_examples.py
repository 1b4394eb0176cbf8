"""The examples of rpc, and a worker that dies during a call."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.warm.processes import RANKS

from .running import Commands

PROGRAM = Path(__file__).with_name("rpc_program.py")
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_examples_learn_and_a_dead_worker_is_reported(paceline: Commands, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    # otherwise torch leaves a folder in the temporary folder
    paceline.environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)
    paceline.environment[RANKS] = "torch"
    finished = paceline.run("run", "--strategy", "all-reduce", "--nproc-per-node", "3", PROGRAM)
    assert finished.status == 0, finished.err
    lines = [json.loads(re.sub(r"^\[rank \d\] ", "", line)) for line in finished.out.splitlines()]
    servers = [line for line in lines if "accuracy" in line]
    assert [line["trainer"] for line in sorted(servers, key=lambda line: line["trainer"])] == [1, 2]
    assert all(line["last_loss"] < line["first_loss"] * 0.6 for line in servers)
    assert max(line["calls"] for line in servers) == 82  # 40 steps and one evaluation, on both workers
    batches = [line for line in lines if "steps" in line]
    assert [line["steps"] for line in batches] == [15, 15]
    assert all(line["difference"] < 1e-5 for line in batches)
    (pipeline,) = (line for line in lines if "images_per_s" in line)
    assert pipeline["difference"] < 1e-5
    assert pipeline["last_loss"] < pipeline["first_loss"]
    caller, other = sorted((line for line in lines if "rank" in line), key=lambda line: line["rank"])
    assert caller["call"].startswith("worker 'worker2' died or left before it answered rpc_program:die")
    assert "worker 'worker2'" in caller["to_here"]
    assert caller["held"] == [1, 0]
    assert caller["quick"]
    assert "rank 2" in caller["shutdown"]
    assert "rank 2" in other["shutdown"]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_program_for_torch_rpc_runs_in_spawned_processes(paceline: Commands) -> None:
    pytest.importorskip("torch")
    program = PROGRAM.with_name("rpc_spawned.py")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, str(program), str(port)]
    finished = subprocess.run(
        command, env=paceline.environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "True\n"


def test_a_language_model_over_two_processes_learns(paceline: Commands, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    paceline.environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)
    paceline.environment[RANKS] = "torch"
    example = EXAMPLES / "rpc_rnn.py"
    finished = paceline.run(
        "run", "--strategy", "all-reduce", "--nproc-per-node", "2", example, "--json", "--steps", "30"
    )
    assert finished.status == 0, finished.err
    result = json.loads(finished.out.removeprefix("[rank 0] "))
    assert result["last_loss"] < result["first_loss"] * 0.8
