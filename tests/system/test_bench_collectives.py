"""``paceline bench collectives``, run as a person runs it."""

from __future__ import annotations

import importlib.util
import shutil
import signal

import psutil
import pytest

from .running import Commands, parse_json

KEYS = ["op", "bytes", "ranks", "peer", "algorithm", "median_us"]


def test_help_has_an_example(paceline: Commands) -> None:
    text = " ".join(paceline.succeed("bench", "collectives", "--help").out.split())
    assert "Example: paceline bench collectives" in text


def test_one_json_object_for_each_size(paceline: Commands) -> None:
    finished = paceline.succeed("bench", "collectives", "--sizes", "4,1K", "--peer", "paceline", "--json")
    found = [parse_json(line) for line in finished.out.splitlines(keepends=True)]
    assert [list(each) for each in found] == [KEYS, KEYS]
    assert [each["bytes"] for each in found] == [4, 1024]
    for each in found:
        assert (each["op"], each["ranks"], each["peer"]) == ("all_reduce", 2, "paceline")
        assert each["algorithm"]
        assert each["median_us"] > 0
    assert finished.err == ""


def test_a_table_with_the_algorithm_that_was_demanded(paceline: Commands) -> None:
    out = paceline.succeed(
        *("bench", "collectives", "--op", "all_gather", "--ranks", "3", "--sizes", "16"),
        *("--algorithm", "ring", "--peer", "paceline"),
    ).out.splitlines()
    assert out[0].split() == ["size", "paceline", "µs", "±", "GB/s", "algorithm"]
    assert out[1].split()[0] == "24"
    assert out[1].split()[-1] == "ring"
    assert any("3 ranks" in line for line in out[2:])


@pytest.mark.slow
@pytest.mark.parametrize("op", ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier"])
def test_the_peers_that_are_here_take_part(paceline: Commands, op: str) -> None:
    sizes = [] if op == "barrier" else ["--sizes", "1K"]
    finished = paceline.succeed("bench", "collectives", "--op", op, *sizes, "--json")
    expected = ["paceline"]
    expected += ["gloo"] if importlib.util.find_spec("torch") else []
    expected += ["mpi"] if importlib.util.find_spec("mpi4py") and shutil.which("mpirun") else []
    found = [parse_json(line) for line in finished.out.splitlines(keepends=True)]
    assert [each["peer"] for each in found] == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--op", "reduce_all"], "paceline: --op reduce_all: expected one of all_reduce, "),
        (["--sizes", "4,1KB"], "paceline: --sizes 4,1KB: got '1KB', expected bytes such as 4, 16K or 100M"),
        (["--peer", "nccl"], "paceline: --peer nccl: expected one of paceline, gloo, mpi"),
        (["--algorithm", "magic", "--peer", "paceline"], "paceline: got algorithm 'magic', expected one of "),
    ],
)
def test_wrong_usage_is_said_in_one_sentence(paceline: Commands, arguments: list[str], expected: str) -> None:
    finished = paceline.run("bench", "collectives", *arguments)
    assert finished.status == 2
    assert finished.out == ""
    assert finished.err.startswith(expected)
    assert finished.err.count("\n") == 1


def _ranks(pid: int) -> list[psutil.Process]:
    return sorted(psutil.Process(pid).children(), key=lambda child: child.pid)


def test_a_rank_that_is_killed_is_named(paceline: Commands) -> None:
    running = paceline.start("bench", "collectives", "--sizes", "4,16M,16M,1M,2M,3M", "--peer", "paceline", "--json")
    running.wait_line('"bytes": 4')
    _ranks(running.process.pid)[1].kill()
    finished = running.wait()
    assert finished.status == 1
    assert finished.err.startswith("paceline: rank 1 ")
    assert finished.err.count("\n") == 1


def test_ctrl_c_leaves_nothing_behind(paceline: Commands) -> None:
    running = paceline.start("bench", "collectives", "--sizes", "4,16M,1M,2M,3M", "--peer", "paceline", "--json")
    running.wait_line('"bytes": 4')
    ranks = _ranks(running.process.pid)
    assert len(ranks) == 2
    running.signal(signal.SIGINT)
    assert running.wait().status == 130
    assert not any(rank.is_running() for rank in ranks)


def test_ranks_whose_command_is_killed_end_by_themselves(paceline: Commands) -> None:
    running = paceline.start("bench", "collectives", "--sizes", "4,16M,1M,2M,3M", "--peer", "paceline", "--json")
    running.wait_line('"bytes": 4')
    running.kill()  # what is left of it would fail the fixture
