"""Stragglers and failing machines in ``paceline simulate``."""

from __future__ import annotations

import io
import itertools
import json
import random
import statistics
from dataclasses import replace

import pytest
from rich.console import Console

from paceline.errors import UsageError
from paceline.observe.plots import page_bytes
from paceline.planning.faults import MachineFaults
from paceline.planning.known_models import KNOWN_MODELS, varied, with_stragglers
from paceline.planning.options import SimulateOptions
from paceline.planning.simulating import page_of, show_simulation, simulate, simulation_as_json
from paceline.planning.waiting import expected_maximum

FAULTS = MachineFaults(mtbf_s=1000.0, recovery_s=5.0, snapshot_every_s=20.0)


@pytest.mark.parametrize("machines", [1, 10, 50])
def test_restarts_cost_the_time_of_a_simulation(machines: int) -> None:
    """Play failures: work since the last snapshot is lost, and a failure during the recovery begins it again."""
    generator = random.Random(0)
    time_s, work_s, num_intervals = 0.0, 0.0, 4000
    for _ in range(num_intervals):
        remaining_s = FAULTS.snapshot_every_s
        while remaining_s > 0:
            failure_s = generator.expovariate(machines / FAULTS.mtbf_s)
            if failure_s >= remaining_s:
                time_s, work_s, remaining_s = time_s + remaining_s, work_s + FAULTS.snapshot_every_s, 0.0
            else:
                time_s, remaining_s = time_s + failure_s + FAULTS.recovery_s, FAULTS.snapshot_every_s
    assert FAULTS.share_with_restarts(machines) == pytest.approx(work_s / time_s, rel=0.05)


def test_shares_of_progress() -> None:
    assert FAULTS.share_without_restarts() == pytest.approx(1000 / 1005)
    rare = replace(FAULTS, mtbf_s=1e12)
    assert rare.share_with_restarts(1) == pytest.approx(1.0)
    assert FAULTS.share_with_restarts(10**9) == 0.0
    shares = [FAULTS.share_with_restarts(machines) for machines in (1, 10, 100, 1000)]
    assert all(more > less for more, less in itertools.pairwise(shares))


def test_stragglers_change_the_mean_and_the_slowest_step() -> None:
    profile = replace(KNOWN_MODELS["resnet50"], steps_s=varied(KNOWN_MODELS["resnet50"].compute_s, 0.1))
    slow = with_stragglers(profile, 0.02, 5.0)
    assert slow.compute_s == pytest.approx(profile.compute_s * 1.08)
    assert statistics.fmean(slow.steps_s) == pytest.approx(slow.compute_s, rel=0.01)
    one = with_stragglers(KNOWN_MODELS["resnet50"], 0.02, 5.0)
    step_s = KNOWN_MODELS["resnet50"].compute_s
    probability = 1 - 0.98**64  # that at least one of 64 ranks is a straggler
    assert expected_maximum(one.steps_s, 64) == pytest.approx(step_s * (1 + 4 * probability))
    assert with_stragglers(profile, 0.0, 5.0) == profile


def test_elastic_strategies_lose_less() -> None:
    options = SimulateOptions(nodes="512", mtbf="2000h")
    shares: dict[tuple[str, bool], list[float]] = {}
    for changed in (options, replace(options, mtbf=None)):
        for line in simulation_as_json(simulate(changed)):
            shares.setdefault((line["strategy"], line["separate_servers"]), []).append(line["efficiency"])
    ratios = {key: with_faults / without for key, (with_faults, without) in shares.items()}
    assert ratios["all-reduce", False] == pytest.approx(2000 / (2000 + 2 / 60))
    # 512 failures in 2,000 hours; each costs two minutes and, on average, half of ten minutes.
    assert ratios["sharded", False] == pytest.approx(1 / (1 + 0.256 * 7 / 60), rel=1e-3)
    assert ratios["parameter-server:eventual", True] == pytest.approx(ratios["all-reduce", False])


def test_the_table_fits_into_80_columns() -> None:
    options = SimulateOptions(nodes="2..4096", stragglers=0.01)
    found, output = simulate(options), io.StringIO()
    show_simulation(Console(file=output, width=80), found, options)
    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in output.getvalue()
    line = next(line for line in lines if line.startswith("parameter-server:eventual   on nodes"))
    assert line.split()[-1] == "█" * 12
    page = page_bytes("", "", page_of(found, options)).decode()
    state = json.loads(page.split("const GIVEN = ")[1].split(";\n")[0])
    for part in state["sections"][:2]:
        assert {tuple(series["x"]) for series in part["series"]} == {tuple(found)}
        assert [series["is_dashed"] for series in part["series"]].count(True) == 3


@pytest.mark.parametrize(
    "changes", [{"mtbf": "30"}, {"mtbf": "0s"}, {"mtbf": "9h", "recovery": "-1s"}, {"snapshot_every": "ten"}]
)
def test_wrong_times(changes: dict[str, str]) -> None:
    name, text = list(changes.items())[-1]
    with pytest.raises(UsageError) as raised:
        simulate(replace(SimulateOptions(nodes="2"), **changes))  # type: ignore[arg-type]
    expected = f"--{name.replace('_', '-')} {text}: expected a time above 0, such as 30s, 10m or 720h"
    assert str(raised.value) == expected
