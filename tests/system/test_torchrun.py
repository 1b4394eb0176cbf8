"""torchrun's nodes meet at the scheduler, which ends and starts again while the workers run."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Final

import psutil
import pytest

pytest.importorskip("torch")
from tests.installed import installed_variables
from tests.waiting import wait_until

from paceline.torch.rendezvous import Backend, ServerStore
from paceline.transport import Address

from .running import Commands, Running

TOKEN: Final = "a token of the tests of torchrun"
SCRIPT: Final = """
import os, time
from pathlib import Path
import torch.distributed as dist
dist.init_process_group("gloo")
Path("size" + os.environ["TORCHELASTIC_RESTART_COUNT"] + os.environ["WORLD_SIZE"]).touch()
while not Path("end").exists():
    dist.barrier()
    time.sleep(0.1)
"""


def start_scheduler(paceline: Commands, port: int = 0) -> tuple[Running, Address]:
    paceline.environment["PACELINE_TOKEN"] = TOKEN
    scheduler = paceline.start("scheduler", "--port", str(port))
    return scheduler, Address.parse(scheduler.wait_line("listening on").split()[-1])


def kill_node(agent: subprocess.Popen[bytes]) -> None:
    """Kill an agent of torchrun and its workers, if they run."""
    if agent.poll() is None:
        workers = psutil.Process(agent.pid).children(recursive=True)
        agent.kill()
        for worker in workers:
            worker.kill()
    agent.wait()


def test_agents_use_the_scheduler_as_a_store(paceline: Commands) -> None:
    scheduler, address = start_scheduler(paceline)
    with closing(ServerStore(address, TOKEN, None, patience_s=5.0)) as store:
        assert Backend(store, "run").set_state(b"state")[2]
        assert Backend(store, "run").get_state() == (b"state", b"state")
    scheduler.kill()


@pytest.mark.thorough
def test_workers_continue_while_the_scheduler_starts_again(paceline: Commands, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    scheduler, address = start_scheduler(paceline)
    variables = {**paceline.environment, "PYTHONPATH": installed_variables(tmp_path)["PYTHONPATH"]}
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--max-restarts", "3"]
    command += ["--rdzv-backend", "paceline", "--rdzv-endpoint", address.netloc, "--rdzv-id", "run"]
    command += ["--rdzv-conf", "last_call_timeout=20", "--log-dir", str(tmp_path), "train.py"]
    agents = [subprocess.Popen(command, env=variables, cwd=tmp_path) for _ in range(2)]
    try:
        wait_until(lambda: (tmp_path / "size02").exists(), "the workers do not start", 90.0)
        scheduler.kill()
        scheduler, _ = start_scheduler(paceline, address.port)
        kill_node(agents[1])
        wait_until(lambda: (tmp_path / "size11").exists(), "the remaining node does not continue", 90.0)
        (tmp_path / "end").touch()
        assert agents[0].wait(60) == 0
    finally:
        for agent in agents:
            kill_node(agent)
