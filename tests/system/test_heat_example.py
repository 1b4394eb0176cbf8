"""The heat example as a process."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.warm.processes import WarmProcess

from .running import Commands, Finished, parse_json

HEAT = Path(__file__).parents[2] / "examples" / "heat.py"


def run(paceline: Commands, *arguments: str, **variables: str) -> Finished:
    """Run the example. The fixture checks that no process is left."""
    process = WarmProcess(
        [HEAT, "--size", "41", "--steps", "30", *arguments],
        env={name: value for name, value in paceline.environment.items() if name != "RANK"} | variables,
        cwd=paceline.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = process.communicate(timeout=60)
    return Finished(process.wait(), out, err)


def test_several_ranks_compute_the_same(paceline: Commands) -> None:
    finished = run(paceline, "--ranks", "2", "--json")
    assert (finished.status, finished.err) == (0, "")
    result = parse_json(finished.out)
    assert (result["ranks"], result["grid"], result["size"], result["steps"]) == (2, [2, 1], 41, 30)
    assert result["difference"] == 0.0
    assert 0.05 < result["mean"] < 0.3


def test_the_picture_is_printed(paceline: Commands) -> None:
    finished = run(paceline, "--ranks", "1")
    assert (finished.status, finished.err) == (0, "")
    assert "1 ranks as 1 x 1" in finished.out
    assert "###" in finished.out
    assert finished.out.endswith("greatest difference: 0.0\n")


def test_a_launched_rank_starts_no_ranks(paceline: Commands) -> None:
    finished = run(paceline, "--ranks", "5", "--json", RANK="0", WORLD_SIZE="1")
    assert parse_json(finished.out)["ranks"] == 1


def test_more_ranks_than_cells(paceline: Commands) -> None:
    finished = run(paceline, "--ranks", "42")
    assert finished.status == 2
    assert "as many cells" in finished.err
