"""Scripts under mpirun of Open MPI and MPICH, without any other settings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
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
    print(f"rank={strategy.rank} world={strategy.world_size} local={strategy.local_rank} state={state}", flush=True)
"""


@pytest.fixture(params=["openmpi", "mpich"])
def mpirun(request: pytest.FixtureRequest) -> list[str]:
    """The command mpirun of an MPI that `make test` has installed."""
    command = Path(sys.prefix) / "mpi" / request.param / "bin" / "mpirun"
    if not command.exists():
        pytest.skip(f"{command} is missing: run `make test`")
    return [str(command), *(["--oversubscribe"] if request.param == "openmpi" else [])]


@pytest.fixture
def variables() -> dict[str, str]:
    """Return variables for mpirun, two of which permit it to run as root."""
    return {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("in_shell", [False, True], ids=["directly", "by a shell"])
def test_ranks_of_mpirun_train_one_model(
    mpirun: list[str], variables: dict[str, str], tmp_path: Path, in_shell: bool
) -> None:
    program = tmp_path / "train.py"
    program.write_text(_PROGRAM)
    command = ["sh", "-c", f"{sys.executable} {program}; exit $?"] if in_shell else [sys.executable, str(program)]
    ended = subprocess.run(
        [*mpirun, "-n", "2", *command], env=variables, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    lines = sorted(ended.stdout.splitlines())
    states = [line.partition(" state=")[2] for line in lines]
    assert [line.partition(" state=")[0] for line in lines] == [f"rank={rank} world=2 local={rank}" for rank in (0, 1)]
    assert states[0] == states[1]
