"""``paceline bench collectives`` as a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.free_ports import free_port
from tests.warm.processes import RANKS

from paceline.bench.collectives import OPS
from paceline.bench.peers import find_absent

from .running import MARK, Commands, our_processes, parse_json

_PROGRAM = "paceline.bench.collectives_rank"
KEYS = ["op", "bytes", "ranks", "peer", "algorithm", "median_us"]


def test_help_has_an_example(paceline: Commands) -> None:
    text = " ".join(paceline.succeed("bench", "collectives", "--help").out.split())
    assert "Example: paceline bench collectives" in text


@pytest.mark.thorough
def test_one_json_object_for_every_size(paceline: Commands) -> None:
    finished = paceline.succeed("bench", "collectives", "--sizes", "4,1K", "--peer", "paceline", "--json")
    found = [parse_json(line) for line in finished.out.splitlines(keepends=True)]
    assert [list(result) for result in found] == [KEYS, KEYS]
    assert [result["bytes"] for result in found] == [4, 1024]
    for result in found:
        assert (result["op"], result["ranks"], result["peer"]) == ("all_reduce", 2, "paceline")
        assert result["algorithm"]
        assert result["median_us"] > 0
    assert finished.err == ""


def test_a_table_with_the_requested_algorithm(paceline: Commands) -> None:
    out = paceline.succeed(
        *("bench", "collectives", "--op", "all_gather", "--ranks", "3", "--sizes", "16"),
        *("--algorithm", "ring", "--peer", "paceline"),
    ).out.splitlines()
    assert out[0].split() == ["size", "paceline", "µs", "±", "GB/s", "algorithm"]
    assert out[1].split()[0] == "24"
    assert out[1].split()[-1] == "ring"
    assert any("3 ranks" in line for line in out[2:])


def available_peers() -> list[str]:
    return ["paceline", *(peer for peer in ("gloo", "mpi") if peer not in find_absent())]


@pytest.mark.thorough
@pytest.mark.slow
def test_the_installed_peers_are_measured(paceline: Commands) -> None:
    finished = paceline.succeed("bench", "collectives", "--sizes", "1K", "--json")
    found = [parse_json(line) for line in finished.out.splitlines(keepends=True)]
    assert [result["peer"] for result in found] == available_peers()


@pytest.mark.slow
@pytest.mark.thorough
def test_every_operation_of_every_peer(paceline: Commands) -> None:
    """One run of the ranks serves all tests, because starting ranks takes seconds."""
    peers = available_peers()
    program = [sys.executable, str(Path(__file__).with_name("bench_rank.py")), f"127.0.0.1:{free_port()}", *peers]
    environment = {**paceline.environment, "PACELINE_TOKEN": "a token for tests"}
    if "mpi" in peers:
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        commands = [(["mpirun", "-n", "2", "--oversubscribe", "--bind-to", "none", *root, *program], environment)]
    else:
        commands = [(program, {**environment, "RANK": str(rank), "WORLD_SIZE": "2"}) for rank in range(2)]
    started = [
        subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) for command, variables in commands
    ]
    outputs = [process.communicate(timeout=60)[0].splitlines() for process in started]
    assert [process.returncode for process in started] == [0] * len(started)
    assert sorted(line for lines in outputs for line in lines) == sorted(
        f"{op} {peer} True" for op in OPS for peer in peers for _ in range(2)
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--op", "reduce_all"], "paceline: --op reduce_all: expected one of all_reduce, "),
        (["--sizes", "4,1KB"], "paceline: --sizes 4,1KB: got '1KB', expected bytes such as 4, 16K or 100M"),
        (["--peer", "nccl"], "paceline: --peer nccl: expected one of paceline, gloo, mpi"),
        (["--algorithm", "magic", "--peer", "paceline"], "paceline: got algorithm 'magic', expected one of "),
    ],
)
def test_wrong_usage_is_reported_in_one_sentence(paceline: Commands, arguments: list[str], expected: str) -> None:
    finished = paceline.run("bench", "collectives", *arguments)
    assert finished.status == 2
    assert finished.out == ""
    assert finished.err.startswith(expected)
    assert finished.err.count("\n") == 1


@pytest.fixture
def forking(paceline: Commands) -> Commands:
    """Run commands whose ranks are forked from a loaded process."""
    paceline.environment[RANKS] = "plain"
    return paceline


def _ranks(commands: Commands) -> list[psutil.Process]:
    found = our_processes(commands.environment[MARK])
    return sorted((rank for rank in found if _PROGRAM in rank.cmdline()), key=lambda rank: rank.pid)


def test_a_killed_rank_is_named(forking: Commands) -> None:
    running = forking.start("bench", "collectives", "--sizes", "4,16M,16M,1M,2M,3M", "--peer", "paceline", "--json")
    running.wait_line('"bytes": 4')
    _ranks(forking)[1].kill()
    finished = running.wait()
    assert finished.status == 1
    assert finished.err.startswith("paceline: rank 1 ")
    assert finished.err.count("\n") == 1


def test_ctrl_c_leaves_no_process_or_file(forking: Commands) -> None:
    running = forking.start("bench", "collectives", "--sizes", "4,16M,1M,2M,3M", "--peer", "paceline", "--json")
    running.wait_line('"bytes": 4')
    ranks = _ranks(forking)
    assert len(ranks) == 2
    running.signal(signal.SIGINT)
    assert running.wait().status == 130
    assert not any(rank.is_running() for rank in ranks)


def test_ranks_end_after_a_killed_command(forking: Commands) -> None:
    running = forking.start("bench", "collectives", "--sizes", "4,16M,1M,2M,3M", "--peer", "paceline", "--json")
    running.wait_line('"bytes": 4')
    running.kill()  # the fixture fails if a process remains
