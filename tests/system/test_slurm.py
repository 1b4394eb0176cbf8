"""``paceline run`` on a real Slurm of four virtual nodes. The tests are skipped unless Slurm is installed.

``test_engines.py`` also uses a real Slurm, and ``tests/unit/launch/test_slurm.py`` runs the command with a fake one.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.waiting import wait_until
from tests.warm.processes import RANKS, RELAYED_COMMAND

from .elastic_training import TRAIN, ends
from .running import Commands
from .slurm_cluster import PROGRAMS, SlurmCluster, is_possible

pytestmark = pytest.mark.skipif(not is_possible(), reason=f"needs root and the programs {', '.join(PROGRAMS)}")

_SHOW_PLACE = """
import json, os
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "PACELINE_STRATEGY", "PACELINE_TOKEN")
print(json.dumps({name: os.environ[name] for name in names}), flush=True)
"""
_CONNECT = """
import os, sys, time
import paceline
rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
with paceline.connect(rank=int(rank), timeout_s=60):
    print(f"rank {rank} of {size} begins at 0", flush=True)
    time.sleep(600 if sys.argv[1:] else 0)
"""
_TRAIN = """
import signal, sys, time
from pathlib import Path

stopping = False


def stop(number, frame):
    global stopping
    stopping = True


signal.signal(signal.SIGTERM, stop)

import torch
import paceline.torch as pt

strategy = pt.strategy()
torch.manual_seed(strategy.rank)
model = torch.nn.Linear(4, 1)
model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
step = strategy.load("checkpoint")["step"] if Path("checkpoint").exists() else 0
print(f"rank {strategy.rank} of {strategy.world_size} begins at {step}", flush=True)
while step < 5 or (len(sys.argv) > 1 and step < 100000 and not Path("end").exists()):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    step += 1
    if step % 5 == 0 and strategy.reduce(float(stopping), "max"):
        strategy.save("checkpoint", step=step)
        print(f"saved at {step}", flush=True)
        sys.exit()
    if step % 5 == 0 and strategy.reduce(float(Path("end").exists()), "max"):
        break
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.close()


@pytest.fixture
def commands(paceline: Commands, slurm: SlurmCluster) -> Iterator[Commands]:
    """Run commands on the cluster. After the test, wait until no job is left."""
    environment = {**paceline.environment, "SLURM_CONF": slurm.variables["SLURM_CONF"], "OMP_NUM_THREADS": "1"}
    (paceline.folder / "place.py").write_text(_SHOW_PLACE)
    (paceline.folder / "connect.py").write_text(_CONNECT)
    (paceline.folder / "train.py").write_text(_TRAIN)
    yield replace(paceline, environment=environment, afresh=True)
    slurm.wait_empty()


@pytest.fixture
def warm_commands(commands: Commands, slurm: SlurmCluster) -> Commands:
    """Fork commands and the processes of jobs from processes with loaded modules."""
    path = f"{slurm.bin}:{commands.environment['PATH']}"
    return replace(commands, environment={**commands.environment, "PATH": path, RANKS: "plain"}, afresh=False)


def test_srun_needs_no_options(warm_commands: Commands) -> None:
    ended = subprocess.run(
        ["srun", "-N2", "-n3", *RELAYED_COMMAND.split(), "paceline", "run", "--nproc-per-node", "2", "place.py"],
        cwd=warm_commands.folder, env=warm_commands.environment, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found = [json.loads(line.partition("] ")[2]) for line in ended.stdout.splitlines()]
    assert sorted(int(place["RANK"]) for place in found) == [*range(6)]
    assert {place["WORLD_SIZE"] for place in found} == {"6"}
    assert sorted(place["LOCAL_RANK"] for place in found) == [*"001123"]
    assert len({place["MASTER_PORT"] for place in found}) == 1
    assert len({place["PACELINE_TOKEN"] for place in found}) == 1


def check_job(commands: Commands, name: str) -> None:
    """Run a script as a job of two nodes with a step of servers."""
    words = ["--strategy", "parameter-server", "--servers", "2"]
    finished = commands.start("run", "--on", "slurm", "--nodes", "2", *words, name).wait(300)
    assert finished.status == 0, finished
    assert sorted(re.findall(r"rank \d of \d begins", finished.out)) == [f"rank {n} of 2 begins" for n in (0, 1)]
    assert "job" in finished.err


def test_a_job_with_a_step_of_servers(warm_commands: Commands) -> None:
    check_job(warm_commands, "connect.py")


@pytest.mark.thorough
def test_a_training_as_a_job(commands: Commands) -> None:
    check_job(commands, "train.py")


@pytest.mark.thorough
def test_a_requeued_job_continues_from_its_checkpoint(commands: Commands, slurm: SlurmCluster) -> None:
    words = ["--strategy", "parameter-server", "--nodes", "2", "--requeue", "--time", "60", "train.py", "long"]
    running = commands.start("run", "--on", "slurm", *words)
    job = re.findall(r"\d+", running.wait_line("is submitted"))[0]
    running.wait_line("begins at 0")
    slurm.call("scontrol", "requeue", job)
    running.wait_line("saved at")
    wait_until(lambda: slurm.call("squeue", "-h", "-j", job, "-o", "%T") == "PENDING", "the job is not queued", 60)
    slurm.call("scontrol", "update", f"JobId={job}", "StartTime=now")
    wait_until(lambda: bool(re.search(r"begins at [1-9]", _output(commands, job))), "it does not continue", 120)
    (commands.folder / "end").touch()
    assert running.wait(120).status == 0


def _output(commands: Commands, job: str) -> str:
    return Path(commands.folder, f"train-{job}.out").read_text()


@pytest.mark.thorough
def test_an_elastic_job_continues_without_a_lost_node(commands: Commands, slurm: SlurmCluster, tmp_path: Path) -> None:
    (commands.folder / "elastic.py").write_text(TRAIN)
    words = ["--strategy", "all-reduce", "--min-ranks", "2", "--heartbeat-timeout", "3", "--nodes", "3"]
    running = commands.start("run", "--on", "slurm", *words, "elastic.py", "", "0")
    running.wait_line("starts 2 ")
    running.wait_line("starts 0 ")
    slurm.call("scontrol", "update", "NodeName=n3", "State=DOWN", "Reason=test")
    finished = running.wait(240)
    slurm.call("scontrol", "update", "NodeName=n3", "State=RESUME")
    assert finished.status == 0, finished
    assert "node 2 is lost" in finished.out, finished
    last = ends(finished)
    assert last.keys() >= {0, 1}
    assert last[0] == last[1]


@pytest.mark.thorough
def test_ctrl_c_cancels_the_job_with_its_servers(commands: Commands, slurm: SlurmCluster) -> None:
    words = ["--strategy", "parameter-server", "--nodes", "2", "--requeue", "connect.py", "long"]
    running = commands.start("run", "--on", "slurm", *words)
    running.wait_line("begins at 0")
    running.signal(signal.SIGINT)
    assert running.wait(120).status == 130
    slurm.wait_empty()


@pytest.mark.thorough
def test_jobs_that_cannot_run_are_reported(commands: Commands) -> None:
    finished = commands.run("run", "--on", "slurm", "--partition", "nope", "place.py")
    assert (finished.status, "invalid partition" in finished.err) == (2, True), finished
    finished = commands.run("run", "--on", "slurm", "--partition", "small", "--nodes", "2", "place.py")
    assert (finished.status, "cannot start: Partition" in finished.err) == (1, True), finished
    finished = commands.run("run", "--on", "slurm", "--sbatch", "begin=now+1hour", "--queue-timeout", "0", "place.py")
    assert (finished.status, "BeginTime" in finished.err) == (1, True), finished
