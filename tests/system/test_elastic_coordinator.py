"""Elastic training without ``paceline run``: ranks of ``paceline coordinator`` are killed, stopped and restarted."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import wait_until
from tests.warm.processes import WarmProcess

from .elastic_training import TRAIN, check_items, ends
from .running import PROMPT_S, Commands, Finished, Running, read_outputs


class Ranks:
    """Ranks that this process starts, and their outputs."""

    def __init__(self, paceline: Commands, folder: Path) -> None:
        (folder / "train.py").write_text(TRAIN)
        self._paceline, self._folder = paceline, folder
        self.processes: dict[int, WarmProcess] = {}

    def start_coordinator(self, *options: str) -> Running:
        """Start a coordinator on a free port, and let later ranks use it."""
        coordinator = self._paceline.start("coordinator", "--port", "0", *options)
        name, _, address = coordinator.wait_line("PACELINE_COORDINATOR=").split()[-1].partition("=")
        self._paceline.environment[name] = address
        return coordinator

    def start(self, incarnation: int, *, victims: str = "", last: int = 3) -> None:
        words = ["-u", "train.py", victims, str(last), str(incarnation)]
        with self._path(incarnation).open("w") as output:
            self.processes[incarnation] = WarmProcess(
                words, kind="torch", env=self._paceline.environment, cwd=self._folder,
                stdin=subprocess.DEVNULL, stdout=output.fileno(), stderr=subprocess.STDOUT,
            )  # fmt: skip

    def _path(self, incarnation: int) -> Path:
        return self._folder / f"output{incarnation}"

    def wait_trains(self, incarnation: int) -> None:
        path = self._folder / f"items{incarnation}"
        wait_until(lambda: path.exists() and path.stat().st_size > 0, f"rank {incarnation} does not train")

    def wait(self, incarnation: int) -> Finished:
        status = self.processes[incarnation].wait(PROMPT_S)
        return Finished(status, self._path(incarnation).read_text(), "")

    def check(self, *incarnations: int) -> None:
        """Check that these ranks end with equal states."""
        finished = [self.wait(incarnation) for incarnation in incarnations]
        assert [each.status for each in finished] == [0] * len(finished), finished
        states = [ends(each)[incarnation] for each, incarnation in zip(finished, incarnations, strict=True)]
        assert len(set(states)) == 1, "the ranks differ"


@pytest.fixture
def ranks(paceline: Commands, tmp_path: Path) -> Iterator[Ranks]:
    found = Ranks(paceline, tmp_path)
    yield found
    for process in found.processes.values():
        process.end()


def test_a_killed_rank_is_noticed_at_once_and_a_new_rank_joins(ranks: Ranks, tmp_path: Path) -> None:
    coordinator = ranks.start_coordinator("--min-ranks", "1", "--max-ranks", "3", "--heartbeat-timeout", "1000")
    for incarnation in range(3):
        ranks.start(incarnation, victims="1")
    coordinator.wait_line("is lost")
    ranks.start(3)
    ranks.check(0, 2, 3)
    assert ranks.wait(1).status == -signal.SIGKILL
    assert coordinator.wait(PROMPT_S).status == 0
    check_items(tmp_path)


def test_a_stopped_rank_is_lost_and_ends_when_it_continues(ranks: Ranks) -> None:
    coordinator = ranks.start_coordinator("--min-ranks", "1", "--max-ranks", "3", "--heartbeat-timeout", "2")
    for incarnation in range(3):
        ranks.start(incarnation)
    ranks.wait_trains(1)
    ranks.processes[1].send_signal(signal.SIGSTOP)
    coordinator.wait_line("is lost")
    ranks.processes[1].send_signal(signal.SIGCONT)
    finished = ranks.wait(1)
    assert finished.status == 1, finished
    ranks.start(3)
    ranks.check(0, 2, 3)
    assert coordinator.wait(PROMPT_S).status == 0


@pytest.mark.parametrize("is_killed", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_the_ranks_end_with_the_coordinator(ranks: Ranks, *, is_killed: bool) -> None:
    coordinator = ranks.start_coordinator("--min-ranks", "2")
    for incarnation in range(2):
        ranks.start(incarnation)
    ranks.wait_trains(1)
    if is_killed:
        coordinator.kill()
    else:
        coordinator.signal(signal.SIGTERM)
        assert coordinator.wait(PROMPT_S).status == 128 + signal.SIGTERM
    for incarnation in range(2):
        finished = ranks.wait(incarnation)
        assert finished.status == 1, finished
        assert ("cannot reach tcp:" if is_killed else "the coordinator has ended") in finished.out, finished


def test_too_few_ranks_end_the_training(ranks: Ranks) -> None:
    coordinator = ranks.start_coordinator("--min-ranks", "2", "--wait", "0.5")
    ranks.start(0)
    for finished in (ranks.wait(0), coordinator.wait(PROMPT_S)):
        assert finished.status == 1, finished
        assert "--min-ranks is 2" in finished.out + finished.err, finished


@pytest.mark.thorough
@pytest.mark.parametrize("processes", [1, 2])
def test_torchrun_restarts_a_killed_rank(paceline: Commands, ranks: Ranks, tmp_path: Path, processes: int) -> None:
    """torchrun also restarts the other ranks that it has started. The ranks of the other torchrun continue."""
    coordinator = ranks.start_coordinator("--min-ranks", "1", "--max-ranks", str(2 * processes))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += ["--max-restarts", "3", "--log-dir", str(tmp_path / "logs"), "train.py", "0", "10"]
    agents = [
        subprocess.Popen(
            [*command, str(first)], cwd=tmp_path, env=paceline.environment, stdout=subprocess.PIPE, text=True
        )
        for first in (0, processes)
    ]
    outputs = read_outputs(agents)
    assert [agent.returncode for agent in agents] == [0, 0]
    last = {member: state for output in outputs for member, state in ends(Finished(0, output, "")).items()}
    assert last.keys() >= {10, *range(processes, 2 * processes)}
    assert len(set(last.values())) == 1, "the ranks differ"
    assert coordinator.wait(PROMPT_S).status == 0
    if processes == 1:
        check_items(tmp_path)
