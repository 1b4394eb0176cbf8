"""``torch.compile`` of DistributedDataParallel on the backend, and of a function that calls collectives."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import sys, warnings
warnings.simplefilter("error")
import torch
import torch.distributed as dist
if "late" not in sys.argv:
    import torch._dynamo
import paceline.torch
from torch import nn
assert ("torch._dynamo" in sys.modules) == ("late" not in sys.argv)
from torch.nn.parallel import DistributedDataParallel
warnings.resetwarnings()

def train(wrap):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    model = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(torch.arange(12.0).reshape(3, 4)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

def scaled_sum(tensor):
    tensor = tensor * 3
    dist.all_reduce(tensor)
    return tensor + 1

dist.init_process_group("paceline", rank=0, world_size=1, store=dist.HashStore())
expected = train(DistributedDataParallel)
for backend in ("eager", "aot_eager"):
    assert train(lambda model: torch.compile(DistributedDataParallel(model), backend=backend)) == expected
    assert train(lambda model: DistributedDataParallel(torch.compile(model, backend=backend))) == expected
    assert torch.compile(scaled_sum, backend=backend)(torch.ones(2)).tolist() == [4.0, 4.0]
dist.destroy_process_group()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("imported", ["early", "late"])
def test_ddp_on_the_backend_compiles(imported: str) -> None:
    """Dynamo may be imported before or after Paceline."""
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", _PROGRAM, imported], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
