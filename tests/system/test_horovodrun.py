"""Horovod's launcher, its function ``run``, and the distribution with Horovod's module names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.pages import ROOT
from tests.warm.processes import RANKS, WarmProcess
from tests.warm.programs import spawn_or_fork

from paceline.errors import PeerError, UsageError
from paceline.launch.functions import node

from .running import Commands

pytest.importorskip("torch")

SCRIPT = """
import os
import torch
import horovod.torch as hvd
from horovod.torch.mpi_ops import Sum
from horovod.torch.compression import Compression
from horovod.torch.functions import broadcast_object
from horovod.torch.optimizer import DistributedOptimizer
from horovod.torch.elastic import ElasticSampler, TorchState
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import TorchState
from horovod.torch.sync_batch_norm import SyncBatchNorm
from horovod.common.elastic import State
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.process_sets import global_process_set
from horovod.common.util import env, gloo_built, mpi_built

hvd.init()
assert hvd.elastic.TorchState is TorchState and issubclass(TorchState, State)
assert gloo_built() and not mpi_built(verbose=True)
assert (hvd.rank(), hvd.size()) == (int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"]))
assert os.environ["HOROVOD_CONTROLLER"] == os.environ["HOROVOD_CPU_OPERATIONS"] == "gloo"
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
optimizer = DistributedOptimizer(optimizer, model.named_parameters(), compression=Compression.fp16)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
model(torch.ones(2, 3) * hvd.rank()).sum().backward()
optimizer.step()
total = hvd.allreduce(torch.tensor(float(hvd.rank() + 1)), op=Sum, name="total")
weights = hvd.allgather_object(model.weight.tolist())
assert all(weight == weights[0] for weight in weights)
print("total", total.item(), broadcast_object(hvd.local_rank(), root_rank=1), flush=True)
"""
ELASTIC = """
import os, time
import torch
import paceline.horovod as hvd

@hvd.elastic.run
def train(state):
    if state.size != hvd.size():
        state.size, state.num_changes = hvd.size(), state.num_changes + 1
        state.save()  # or the change is not counted if a rank is removed before the next commit
        print("change", state.num_changes, "to", state.size, "ranks", flush=True)
    while not hvd.allreduce(torch.tensor(os.path.exists("end")).int(), op=hvd.Max):
        time.sleep(0.02)
        state.commit()

hvd.init()
train(hvd.elastic.ObjectState(size=0, num_changes=0))
"""
PYTHON = sys.executable


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the installed distribution."""
    folder = tmp_path_factory.mktemp("shim")
    package = ROOT / "packages/horovod-shim"
    build = [PYTHON, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=package, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    assert not (package / "dist").exists()
    return folder / "site"


def test_a_horovod_script_runs_unchanged(shim: Path, paceline: Commands) -> None:
    (entry,) = shim.glob("*.dist-info/entry_points.txt")
    module, function = re.findall(r"horovodrun = ([\w.]+):(\w+)", entry.read_text())[0]
    (paceline.folder / "train.py").write_text(SCRIPT)
    (paceline.folder / "horovodrun.py").write_text(f"from {module} import {function}; {function}()")
    words = ["-np", "2", "--verbose", "--cycle-time-ms", "1", "--output-filename", "logs"]
    launcher = WarmProcess(
        ["horovodrun.py", *words, PYTHON, "train.py"],
        env={**paceline.environment, "PYTHONPATH": str(shim), RANKS: "torch"},
        cwd=paceline.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    output, errors = launcher.communicate(120)
    assert launcher.returncode == 0, errors
    assert sorted(output.splitlines()) == ["[rank 0] total 3.0 1", "[rank 1] total 3.0 1"]
    assert (paceline.folder / "logs/rank.1/stdout").read_text() == "total 3.0 1\n"
    command = f"the command is paceline run --nproc-per-node 2 --no-python --log-dir logs {PYTHON} train.py"
    assert command in errors
    assert "--cycle-time-ms is not needed: ranks exchange requests immediately" in errors


def test_the_number_of_ranks_follows_the_discovery_script(paceline: Commands) -> None:
    paceline.environment[RANKS] = "torch"
    (paceline.folder / "train.py").write_text(ELASTIC)
    (paceline.folder / "slots").write_text("localhost:1")
    running = paceline.start(
        "horovodrun", "-np", "1", "--max-np", "2", "--host-discovery-script", "cat slots", PYTHON, "train.py"
    )  # fmt: skip
    running.wait_line("change 1 to 1 ranks")
    (paceline.folder / "slots").write_text("localhost:4")
    running.wait_line("change 2 to 2 ranks")
    (paceline.folder / "slots").write_text("localhost:1")
    running.wait_line("change 3 to 1 ranks")
    running.wait_line("rank 1 was ended, because the number of ranks is now 1")
    (paceline.folder / "end").touch()
    assert running.wait().status == 0


def test_a_function_is_called_on_the_ranks(paceline: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    hvd = pytest.importorskip("paceline.horovod")
    for name, value in {**paceline.environment, RANKS: "torch"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(node, "spawn", spawn_or_fork)

    def work(first: int, *, second: int) -> tuple[int, str, list[int]]:
        import paceline.horovod as hvd

        hvd.init()
        return first + second, os.environ["HOROVOD_CACHE_CAPACITY"], hvd.allgather_object(hvd.rank())

    results = hvd.run(work, (1,), {"second": 2}, num_proc=2, cache_capacity=5)
    assert results == [(3, "5", [0, 1])] * 2

    def fail() -> None:
        raise KeyError(os.environ["RANK"])

    with pytest.raises(KeyError, match="0") as error:
        hvd.run(fail, verbose=2, np=1, use_gloo=False, hosts=None)
    assert isinstance(error.value.__cause__, PeerError)
    with pytest.raises(UsageError, match=r"hvd\.run has no argument 'nodes'"):
        hvd.run(fail, nodes=2)
