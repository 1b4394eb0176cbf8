"""Elastic all-reduce on several nodes: launchers are killed, cut off and started again while the others train."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from tests.free_ports import two_free_ports
from tests.warm.processes import RANKS

from paceline.launch.engines.engine import LOST_NODE_STATUS

from .elastic_training import TRAIN, check_items, ends
from .running import Commands, Finished, Running

HEARTBEAT_S = 2


class Nodes:
    """The launchers of three nodes with one rank each. All are on this machine."""

    def __init__(self, paceline: Commands, folder: Path) -> None:
        paceline.environment[RANKS] = "torch"
        paceline.environment["PACELINE_TOKEN"] = "a secret of the tests"
        (folder / "train.py").write_text(TRAIN)
        self._paceline = paceline
        self._place = ["--master-addr", "127.0.0.1", "--master-port", str(two_free_ports())]

    def start(self, node: int, *, victims: str = "", last: int = 3, min_ranks: int = 1) -> Running:
        options = ["--strategy", "all-reduce", "--min-ranks", str(min_ranks), "--heartbeat-timeout", str(HEARTBEAT_S)]
        node_options = ["--nnodes", "3", "--node-rank", str(node), *self._place]
        return self._paceline.start("run", *options, *node_options, "train.py", victims, str(last))


@pytest.fixture
def nodes(paceline: Commands, tmp_path: Path) -> Nodes:
    return Nodes(paceline, tmp_path)


def check_ranks(finished: list[Finished], *members: int) -> None:
    """Check that these members ended, with equal states."""
    last = {member: state for one in finished for member, state in ends(one).items()}
    assert last.keys() == set(members)
    assert len(set(last.values())) == 1, "the ranks differ"


@pytest.mark.thorough
def test_a_rank_of_another_node_is_killed(nodes: Nodes, tmp_path: Path) -> None:
    running = [nodes.start(node, victims="1") for node in range(3)]
    finished = [each.wait() for each in running]
    assert [each.status for each in finished] == [0, 0, 0], finished
    assert "rank 1 was killed by SIGKILL. The other ranks continue" in finished[1].err
    check_ranks(finished, 0, 2, 3)
    check_items(tmp_path)


def test_a_node_dies_and_another_takes_its_place(nodes: Nodes, tmp_path: Path) -> None:
    running = [nodes.start(node) for node in range(3)]
    running[2].wait_line("starts 2 ")
    running[2].kill()
    running[0].wait_line("node 2 is lost")
    running[2] = nodes.start(2)
    finished = [each.wait() for each in running]
    assert [each.status for each in finished] == [0, 0, 0], finished
    assert "another launcher has started as node 2" in finished[0].err
    check_ranks(finished, 0, 1, 3)
    check_items(tmp_path, num_killed=1)


@pytest.mark.parametrize("comes_back", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_a_node_is_silent(nodes: Nodes, tmp_path: Path, *, comes_back: bool) -> None:
    running = [nodes.start(node, last=3 if comes_back else 2) for node in range(3)]
    running[1].wait_line("starts 1 ")
    processes = [psutil.Process(running[1].process.pid)]
    processes += processes[0].children(recursive=True)
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    running[0].wait_line("node 1 is lost")
    finished = [] if comes_back else [running[node].wait() for node in (0, 2)]
    for process in processes:
        process.send_signal(signal.SIGCONT)
    if comes_back:
        finished = [each.wait() for each in running]
        assert "node 1 is back" in finished[0].err
    else:
        assert running[1].wait().status == LOST_NODE_STATUS
    assert {each.status for each in finished} == {0}, finished
    check_ranks(finished, 0, 2, *([3] if comes_back else []))
    check_items(tmp_path, num_killed=1)


def test_the_other_nodes_end_with_node_0(nodes: Nodes) -> None:
    running = [nodes.start(node) for node in range(3)]
    running[2].wait_line("starts 2 ")
    running[0].kill()
    for each in running[1:]:
        finished = each.wait(30)
        assert finished.status == LOST_NODE_STATUS, finished
        assert "node 0 does not answer" in finished.err, finished


def test_too_few_ranks_end_the_run_on_all_nodes(nodes: Nodes) -> None:
    running = [nodes.start(node, min_ranks=3) for node in range(3)]
    running[2].wait_line("starts 2 ")
    running[2].kill()
    for each, status in zip(running[:2], (1, LOST_NODE_STATUS), strict=True):
        finished = each.wait(30)
        assert finished.status == status, finished
        assert "2 ranks are left, and --min-ranks is 3" in finished.err, finished


def test_an_interrupted_node_leaves_the_others(nodes: Nodes, tmp_path: Path) -> None:
    running = [nodes.start(node, last=0) for node in range(3)]
    running[1].wait_line("starts 1 ")
    running[1].signal(signal.SIGINT)
    assert running[1].wait().status == 130
    finished = [running[node].wait() for node in (0, 2)]
    assert [each.status for each in finished] == [0, 0], finished
    check_ranks(finished, 0, 2)
    check_items(tmp_path, num_killed=1)
