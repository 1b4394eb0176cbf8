"""The values and failures of ranks that call a function."""

from __future__ import annotations

import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import PeerError
from paceline.launch.fork_server import module_command
from paceline.launch.functions.call import RankResults, pickle_call
from paceline.launch.functions.node import run_program
from paceline.launch.functions.rank import RANK_MODULE


def value(result: Any) -> bytes:
    """The report of a rank that returned a value."""
    return pickle.dumps((pickle.dumps(result), None, ""))


def raised(error: Exception, text: str) -> bytes:
    """The report of a rank that raised."""
    return pickle.dumps((None, pickle.dumps(error), f"Traceback (most recent call last):\n  in f\n{text}\n"))


def test_values_are_in_the_order_of_ranks() -> None:
    results = RankResults(["node a", "node b"], 2)
    results.add_end(1, 0, {3: value("d"), 2: value("c")})
    results.add_end(0, 0, {0: value("a"), 1: value(None)})
    assert not results.raise_cause()
    assert results.load_values() == ["a", None, "c", "d"]


def test_the_cause_is_raised_and_not_its_consequence() -> None:
    results = RankResults(["node a", "node b"], 1)
    results.add_end(0, 1, {0: raised(ConnectionResetError("lost"), "ConnectionResetError: lost")})
    assert results.raise_cause()  # the failure of another rank may follow
    results.add_end(1, 1, {1: raised(KeyError("five"), "KeyError: 'five'")})
    with pytest.raises(KeyError) as caught:
        results.raise_cause()
    assert caught.value.args == ("five",)
    assert "rank 1 failed on the node b" in str(caught.value.__cause__)


def test_a_consequence_without_a_cause_is_raised_at_the_end() -> None:
    results = RankResults(["node a"], 1)
    results.add_end(0, 1, {0: raised(ConnectionResetError("lost"), "ConnectionResetError: lost")})
    with pytest.raises(ConnectionResetError):
        results.raise_cause()


@pytest.mark.parametrize("status", [-signal.SIGKILL, 128 + signal.SIGKILL])
def test_a_rank_without_a_report(status: int) -> None:
    results = RankResults(["node a"], 2)
    results.add_end(0, status, {0: value(1)})
    with pytest.raises(PeerError, match=r"rank 1 on the node a .*SIGKILL"):
        results.raise_cause()


def test_a_rank_that_the_launcher_ended_is_not_the_cause() -> None:
    results = RankResults(["node a"], 3)
    results.add_end(0, -signal.SIGKILL, {0: value(1), 2: b""})
    with pytest.raises(PeerError, match=r"^rank 1 on the node a .*SIGKILL"):
        results.raise_cause()


def test_the_launcher_ended_all_ranks() -> None:
    results = RankResults(["node a"], 2)
    results.add_end(0, -signal.SIGTERM, {0: b"", 1: b""})
    with pytest.raises(PeerError, match=r"^ranks 0 and 1 on the node a .*SIGTERM"):
        results.raise_cause()


def test_an_exception_that_cannot_be_loaded() -> None:
    results = RankResults(["node a"], 1)
    results.add_end(0, 1, {0: pickle.dumps((None, b"no pickle", "text of the traceback"))})
    with pytest.raises(PeerError, match="text of the traceback"):
        results.raise_cause()


def test_a_lost_node() -> None:
    results = RankResults(["node a", "node b"], 1)
    results.add_loss(1, "it has ended")
    with pytest.raises(PeerError, match="node b has failed: it has ended"):
        results.raise_cause()


def die_on_rank_1(started: Path) -> None:
    """Rank 1 is killed after rank 0 has started."""
    if os.environ["RANK"] == "0":
        started.touch()
        time.sleep(60)
    while not started.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_and_a_rank_that_the_launcher_ends(tmp_path: Path) -> None:
    command = module_command("paceline", "run", "--nproc-per-node", "2", "--module", RANK_MODULE)
    status, reports = run_program(command, pickle_call(die_on_rank_1, (tmp_path / "started",)), {})
    assert (status, reports) == (128 + signal.SIGKILL, {0: b""})
