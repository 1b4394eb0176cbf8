"""``paceline run --hosts`` over a real ``sshd``. The tests are skipped unless it is installed.

``test_engines.py`` also uses a real ``sshd``, and ``tests/unit/launch/test_ssh.py`` runs the command with a fake one.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from .running import MARK, Commands
from .ssh_hosts import PROGRAMS, SshHosts, is_possible

pytestmark = pytest.mark.skipif(not is_possible(), reason=f"needs the programs {', '.join(PROGRAMS)}")

StartHosts = Callable[..., Commands]
_CONNECT = """
from paceline.collectives import init

group = init()
assert group.all_reduce([group.rank + 1.0]).tolist() == [6.0]
print(f"rank {group.rank} of {group.size} has ended", flush=True)
"""
_TRAIN = """
import torch
import paceline.torch as pt

strategy = pt.strategy()
torch.manual_seed(strategy.rank)
model = torch.nn.Linear(4, 1)
model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
print(f"rank {strategy.rank} of {strategy.world_size} has ended", flush=True)
"""


@pytest.fixture
def start_hosts(paceline: Commands, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartHosts]:
    """Start the hosts; return commands that find them."""
    with contextlib.ExitStack() as at_end:

        def start(**options: bool) -> Commands:
            variables = {name: paceline.environment[name] for name in (MARK, "TMPDIR", "TORCHINDUCTOR_CACHE_DIR")}
            hosts = SshHosts(tmp_path_factory.mktemp("hosts"), variables, **options)
            at_end.callback(hosts.close)
            return replace(paceline, environment={**paceline.environment, "PATH": f"{hosts.bin}:{os.environ['PATH']}"})

        yield start


def check_ranks(commands: Commands, *words: str) -> None:
    """Run a script on both hosts."""
    finished = commands.start("run", "--hosts", "a:2,b:1", *words).wait(300)
    assert finished.status == 0, finished
    ended = re.findall(r"^\[(\w)\] \[rank (\d)\] rank \d of 3 has ended", finished.out, re.MULTILINE)
    assert sorted(ended) == [("a", "0"), ("a", "1"), ("b", "2")], finished


def test_ranks_on_two_hosts(start_hosts: StartHosts, tmp_path: Path) -> None:
    """The hosts fork Python from a process with loaded modules."""
    (tmp_path / "connect.py").write_text(_CONNECT)
    check_ranks(start_hosts(forks=True), "connect.py")


@pytest.mark.thorough
@pytest.mark.parametrize("options", [[], ["--strategy", "parameter-server", "--servers", "2"]])
def test_training_on_two_hosts(start_hosts: StartHosts, tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "train.py").write_text(_TRAIN)
    check_ranks(replace(start_hosts(), afresh=True), *options, "train.py")


@pytest.mark.thorough
def test_an_unknown_host(start_hosts: StartHosts, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    finished = start_hosts().run("run", "--hosts", "a,nowhere.invalid", "train.py")
    assert finished.status == 2, finished
    assert finished.err.startswith("paceline: --hosts: host nowhere.invalid: ssh cannot log in"), finished
