"""The other commands: help, version, doctor, bench; and the cost of imports."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from paceline.bench.ps import bench_ps
from paceline.cli.app import app

from .running import Commands, parse_json

COMMANDS = ["train", "predict", "run", "scheduler", "server", "worker", "doctor", "bench ps", "bench collectives"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str) -> None:
    finished = CliRunner().invoke(app, [*command.split(), "--help"])
    assert finished.exit_code == 0
    assert f"Example: paceline {command}" in " ".join(finished.output.split())


def test_version(paceline_spawned: Commands) -> None:
    assert paceline_spawned.succeed("--version").out.startswith("paceline 0.")


def test_doctor(paceline: Commands) -> None:
    findings = [json.loads(line) for line in paceline.succeed("doctor", "--json").out.splitlines()]
    assert {finding["status"] for finding in findings} <= {"ok", "note"}
    assert findings[-1]["what"] == "local cluster"


def test_pushes_and_pulls_of_one_key_are_measured(warm_clusters: None) -> None:
    results = bench_ps(rows=20_000)
    found = list(itertools.islice(results, 3))
    del results  # this command ends the cluster
    assert {(result.work, result.keys, result.dim) for result in found} == {
        (work, 1, 1) for work in ("push", "pull", "push_pull")
    }
    assert all(0 < result.median_us <= result.p99_us and result.floor_us > 0 for result in found)


@pytest.mark.thorough
def test_bench(paceline: Commands) -> None:
    lines = paceline.succeed("bench", "ps", "--rows", "200000", "--json").out.splitlines(keepends=True)
    results = [parse_json(line) for line in lines]
    assert {(result["work"], result["keys"], result["dim"]) for result in results} >= {
        (work, keys, dim) for work in ("push", "pull", "push_pull") for keys in (1, 1000, 100_000) for dim in (1, 16)
    }
    for result in results:
        assert {"median_us", "p99_us", "floor_us", "keys_per_s"} <= set(result)
        assert result["floor_us"] > 0
        assert 0 < result["median_us"] <= result["p99_us"]


def test_importing_is_quick() -> None:
    code = (
        "import paceline, sys; paceline.PacelineError, paceline.UsageError; "
        "print([name for name in ('torch', 'numba', 'rich', 'numpy') if name in sys.modules])"
    )
    times = []
    for _ in range(3):
        start = time.perf_counter()
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        times.append(time.perf_counter() - start)
        assert out.strip() == "[]"
    assert min(times) < 0.5


def test_every_public_name() -> None:
    code = (
        "import paceline; names = paceline.__all__; assert names == sorted(names); "
        "[getattr(paceline, name) for name in names]; assert set(names) <= set(dir(paceline)); "
        "import sys; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
