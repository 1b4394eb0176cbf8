"""The backend by its name: the programs of these tests do not import Paceline."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.installed import installed_variables

pytest.importorskip("torch")
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
assert "paceline.torch" in sys.modules and "torch.distributed.fsdp" not in sys.modules  # which takes a second
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
_ACCELERATOR = """
import torch
from accelerate import Accelerator
torch.manual_seed(0)
accelerator = Accelerator()
data = torch.utils.data.TensorDataset(torch.arange(32.0).view(8, 4) / 32)
model = torch.nn.Linear(4, 1)
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), 0.1), torch.utils.data.DataLoader(data, 2)
)
for (x,) in loader:
    optimizer.zero_grad()
    accelerator.backward(model(x).square().mean())
    optimizer.step()
weights = accelerator.gather(accelerator.unwrap_model(model).weight.detach())
assert weights.shape == (2, 4) and weights[0].equal(weights[1]), weights
"""
_TRAINER = """
import sys, torch
from transformers import Trainer, TrainingArguments
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}
options = dict(save_strategy="no", report_to=[], disable_tqdm=True, max_steps=2)
arguments = TrainingArguments(sys.argv[1], ddp_backend="paceline", **options)
data = [{"x": row} for row in torch.arange(32.0).view(8, 4)]
assert arguments.world_size == 2
Trainer(Model(), arguments, train_dataset=data).train()
"""


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    return installed_variables(tmp_path)


def run(program: str, environment: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr


def test_importing_torch_registers_the_backend(installed: dict[str, str]) -> None:
    run(_DISTRIBUTED, installed)


@pytest.mark.thorough
def test_accelerate_uses_the_existing_group(installed: dict[str, str]) -> None:
    pytest.importorskip("accelerate")
    run(_ACCELERATE, {**installed, "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"})


@pytest.mark.thorough
@pytest.mark.parametrize(("library", "program"), [("accelerate", _ACCELERATOR), ("transformers", _TRAINER)])
def test_libraries_find_the_group_under_paceline_run(
    library: str, program: str, installed: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip(library)
    script = tmp_path / "train.py"
    script.write_text(f"{program}\nprint(torch.distributed.get_backend(), torch.distributed.get_world_size())\n")
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "run", "--nproc-per-node", "2", script, tmp_path / "out"],
        env={**installed, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("paceline 2\n") == 2
