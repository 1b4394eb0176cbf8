"""The backend by its name alone: no program imports Paceline here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
_ROOT = Path(__file__).parents[3]
_DISTRIBUTED = """
import sys, torch
import torch.distributed as dist
assert "paceline.torch" not in sys.modules and "numba" not in sys.modules
assert dist.is_backend_available("paceline")
dist.init_process_group("paceline", rank=0, world_size=1, store=dist.HashStore())
tensor = torch.ones(2)
dist.all_reduce(tensor)
assert dist.get_backend() == "paceline" and tensor.tolist() == [1.0, 1.0]
dist.destroy_process_group()
"""
_ACCELERATE = """
import torch.distributed as dist
from accelerate import Accelerator
dist.init_process_group("paceline", rank=0, world_size=1, store=dist.HashStore())
accelerator = Accelerator(cpu=True)
assert accelerator.distributed_type.value == "MULTI_CPU", accelerator.distributed_type
assert accelerator.gather(accelerator.prepare(__import__("torch").ones(2))).tolist() == [1.0, 1.0]
dist.destroy_process_group()
"""


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a program for which Paceline is installed with the entry points of its pyproject.toml."""
    tomllib = pytest.importorskip("tomllib")
    groups = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    about = tmp_path / "paceline-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: paceline\nVersion: 0\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in found.items()) for group, found in groups.items()]
    (about / "entry_points.txt").write_text("".join(lines))
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(_ROOT / "src")])}


def run(program: str, environment: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr


def test_torch_registers_the_backend_by_itself(installed: dict[str, str]) -> None:
    run(_DISTRIBUTED, installed)


def test_accelerate_takes_the_group_that_is_there(installed: dict[str, str]) -> None:
    pytest.importorskip("accelerate")
    run(_ACCELERATE, {**installed, "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"})
