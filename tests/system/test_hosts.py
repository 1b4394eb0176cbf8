"""``paceline run --hosts`` over a real ``sshd``. The tests are skipped unless it is installed.

``test_engines.py`` also uses a real ``sshd``, and ``tests/unit/launch/test_ssh.py`` runs the command with a fake one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from .running import MARK, Commands
from .ssh_hosts import PROGRAMS, SshHosts, is_possible

pytestmark = pytest.mark.skipif(not is_possible(), reason=f"needs the programs {', '.join(PROGRAMS)}")

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
def commands(paceline: Commands, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """Run commands that find the hosts."""
    variables = {name: paceline.environment[name] for name in (MARK, "TMPDIR", "TORCHINDUCTOR_CACHE_DIR")}
    hosts = SshHosts(tmp_path_factory.mktemp("hosts"), variables)
    (paceline.folder / "connect.py").write_text(_CONNECT)
    (paceline.folder / "train.py").write_text(_TRAIN)
    environment = {**paceline.environment, "PATH": f"{hosts.bin}:{paceline.environment['PATH']}"}
    yield replace(paceline, environment=environment, afresh=True)
    hosts.close()


_SERVERS = ["--strategy", "parameter-server", "--servers", "2"]


@pytest.mark.thorough
@pytest.mark.parametrize(("words", "name"), [([], "train.py"), (_SERVERS, "train.py"), ([], "connect.py")])
def test_training_on_two_hosts(commands: Commands, words: list[str], name: str) -> None:
    finished = commands.start("run", "--hosts", "a:2,b:1", *words, name).wait(300)
    assert finished.status == 0, finished
    ended = re.findall(r"^\[(\w)\] \[rank (\d)\] rank \d of 3 has ended", finished.out, re.MULTILINE)
    assert sorted(ended) == [("a", "0"), ("a", "1"), ("b", "2")], finished


@pytest.mark.thorough
def test_an_unknown_host(commands: Commands) -> None:
    finished = commands.run("run", "--hosts", "a,nowhere.invalid", "train.py")
    assert finished.status == 2, finished
    assert finished.err.startswith("paceline: --hosts: host nowhere.invalid: ssh cannot log in"), finished
