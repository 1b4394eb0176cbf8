"""Scripts under mpirun of Open MPI and MPICH, without any other settings."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.warm.processes import RANKS, RELAY

_PROGRAMS = {}
_PROGRAMS["connect"] = """
import os
from paceline.collectives import init
from paceline.environment import environment

group, local_rank = init(), environment().local_rank
state = group.all_reduce([group.rank + 1.0]).tolist()
line = f"rank={group.rank} world={group.size} local={local_rank} state={state}\\n"
os.write(1, line.encode())  # in one piece, because mpirun mixes the output of its ranks
"""
_PROGRAMS["train"] = """
import os
import torch
import paceline.torch

with paceline.torch.strategy() as strategy:
    torch.manual_seed(strategy.rank)
    model = torch.nn.Linear(4, 1)
    model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    state = [parameter.detach().tolist() for parameter in model.parameters()]
    line = f"rank={strategy.rank} world={strategy.world_size} local={strategy.local_rank} state={state}\\n"
    os.write(1, line.encode())
"""


def find_mpirun(mpi: str) -> list[str]:
    """Return the command mpirun of an MPI that `make test` has installed."""
    command = Path(sys.prefix) / "mpi" / mpi / "bin" / "mpirun"
    if not command.exists():
        pytest.skip(f"{command} is missing: run `make test`")
    return [str(command), *(["--oversubscribe"] if mpi == "openmpi" else [])]


@pytest.fixture
def variables() -> dict[str, str]:
    """Return variables for mpirun, two of which permit it to run as root."""
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**os.environ, **allowed, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}  # ranks of Open MPI have a terminal


@pytest.mark.parametrize(
    ("mpi", "launcher", "name"),
    [
        ("openmpi", "script", "train"),
        pytest.param("openmpi", "shell", "connect", marks=pytest.mark.thorough),
        ("openmpi", "paceline run", "connect"),
        ("mpich", "script", "connect"),
        pytest.param("mpich", "paceline run", "connect", marks=pytest.mark.thorough),
        pytest.param("mpich", "shell", "train", marks=pytest.mark.thorough),
    ],
)
def test_ranks_of_mpirun_have_the_same_state(
    variables: dict[str, str], tmp_path: Path, mpi: str, launcher: str, name: str
) -> None:
    """mpirun starts the script, a shell that starts it, or one `paceline run` per rank, with two servers.

    MPICH starts new interpreters. Open MPI starts relays to forks, because importing takes seconds.
    """
    program = tmp_path / "train.py"
    program.write_text(_PROGRAMS[name])
    kind = "torch" if name == "train" else "plain"
    python = [sys.executable, *([str(RELAY), kind] if mpi == "openmpi" else [])]
    command = [*python, str(program)]
    if launcher == "shell":
        command = ["sh", "-c", f"{shlex.join(command)}; exit $?"]
    elif launcher == "paceline run":
        options = ["--strategy", "parameter-server", "--servers", "2"]
        command = [*python, "-m", "paceline", "run", *options, str(program)]
    ended = subprocess.run(
        [*find_mpirun(mpi), "-n", "2", *command],
        env={**variables, RANKS: kind},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    lines = [line.removeprefix(f"[rank {rank}] ") for rank, line in enumerate(sorted(ended.stdout.splitlines()))]
    states = [line.partition(" state=")[2] for line in lines]
    assert [line.partition(" state=")[0] for line in lines] == [f"rank={rank} world=2 local={rank}" for rank in (0, 1)]
    assert states[0] == states[1]
