"""``paceline simulate``: known models on many nodes, and the claims of ``docs/explanation/claims.md``."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.planning.known_models import KNOWN_MODELS, find_model, varied
from paceline.planning.options import SimulateOptions
from paceline.planning.simulating import parse_nodes, simulate, simulation_as_json
from paceline.strategies.profile import LayerProfile, write_record


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("8", [8]), ("2,8,3", [2, 8, 3]), ("2..16", [2, 4, 8, 16]), ("3..20", [3, 6, 12, 20]), ("2..2", [2])],
)
def test_numbers_of_nodes(text: str, numbers: list[int]) -> None:
    assert parse_nodes(text) == numbers


@pytest.mark.parametrize("text", ["", "1", "0..8", "8..2", "2,,3", "-2", "2..", "100001", "two"])
def test_wrong_numbers_of_nodes(text: str) -> None:
    with pytest.raises(
        UsageError, match=r"--nodes .*: expected numbers from 2 to 100,000, such as 8, 2,8,32 or 2..512"
    ):
        parse_nodes(text)


@pytest.mark.parametrize(
    ("name", "millions"), [("resnet50", 25.6), ("resnet101", 44.5), ("vgg16", 138.4), ("bert-large", 335)]
)
def test_known_models_have_their_parameters(name: str, millions: float) -> None:
    assert KNOWN_MODELS[name].parameter_bytes / 4e6 == pytest.approx(millions, rel=0.01)


def test_profiles_from_files(tmp_path: Path) -> None:
    write_record(tmp_path / "profile.json", KNOWN_MODELS["dlrm"])
    assert find_model(str(tmp_path / "profile.json")) == KNOWN_MODELS["dlrm"]
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UsageError, match="was not written by this version of Paceline"):
        find_model(str(tmp_path / "other.json"))
    (tmp_path / "other.json").write_bytes(b'{"layers": [{"name": "\xff')
    with pytest.raises(UsageError, match="was not written by this version of Paceline"):
        find_model(str(tmp_path / "other.json"))
    with pytest.raises(UsageError, match="--model lenet: expected resnet50, resnet101, vgg16"):
        find_model("lenet")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"update_s": -1.0}, "update_s is -1, but must be from 0 to"),
        ({"update_s": 1e308}, "update_s is 1e\\+308"),
        ({"batch_size": 10**400}, r"batch_size is 1.79769e\+308"),
        ({"batch_size": 0}, "a batch without examples"),
        ({"steps_s": ()}, "the profile has no steps"),
        ({"steps_s": (1.0, -1.0)}, r"steps_s\[1\] is -1"),
        (
            {"layers": (LayerProfile(name="a", forward_s=0.1, backward_s=0.1, parameter_bytes=1 << 70),)},
            r"layers\[0\]\.",
        ),
    ],
)
def test_impossible_profiles_are_rejected(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_record(tmp_path / "profile.json", replace(KNOWN_MODELS["dlrm"], **changes))
    with pytest.raises(UsageError, match=message):
        find_model(str(tmp_path / "profile.json"))


def test_variation() -> None:
    """The moments and the median are those of the lognormal distribution."""
    for variation in (0.1, 1.0):
        draws = varied(2.0, variation)
        assert statistics.fmean(draws) == pytest.approx(2.0, rel=1e-3)
        assert statistics.stdev(draws) == pytest.approx(2.0 * variation, rel=0.02)
        assert statistics.median(draws) == pytest.approx(2.0 / math.sqrt(1 + variation**2), rel=1e-3)
    assert varied(2.0, 0.0) == (2.0,)
    assert varied(2.0, 1e-12) == pytest.approx([2.0] * len(varied(2.0, 1e-12)))
    assert varied(2.0, 1e-300) == (2.0,)  # its square is 0


def test_more_variation_means_more_waiting() -> None:
    steps_s = [
        step_of(SimulateOptions(model="resnet50", link="100Gbit", variation=variation), 8, "all-reduce")
        for variation in (0.0, 0.3, 1.0, 2.0)
    ]
    assert steps_s == sorted(set(steps_s))
    assert steps_s[3] > 2 * steps_s[1]


def step_of(options: SimulateOptions, nodes: int, label: str, *, is_separate: bool = False) -> float:
    found = simulate(replace(options, nodes=str(nodes)))[nodes].predictions
    return next(
        line.step_s for line in found if line.candidate.label == label and line.candidate.is_separate == is_separate
    )


def test_the_ring_is_flat_and_one_server_is_linear_in_the_nodes() -> None:
    options = SimulateOptions(model="vgg16", link="10Gbit", latency="1us", servers=1)
    assert step_of(options, 128, "all-reduce") < 1.2 * step_of(options, 8, "all-reduce")
    ratio = step_of(options, 128, "parameter-server:sequential", is_separate=True) / step_of(
        options, 8, "parameter-server:sequential", is_separate=True
    )
    assert ratio == pytest.approx(128 / 8, rel=0.1)


def test_bounded_delay_lies_between_synchronous_and_asynchronous() -> None:
    options = SimulateOptions(model="resnet50", link="100Gbit", variation=0.3)
    steps = [
        step_of(options, 64, f"parameter-server:{name}", is_separate=True)
        for name in ("sequential", "bounded:4", "eventual")
    ]
    assert steps[0] > 1.2 * steps[1]
    assert steps[1] > 1.02 * steps[2]


def test_sparse_models_scale_with_servers_only() -> None:
    options = SimulateOptions(model="dlrm", link="25Gbit")
    assert step_of(options, 64, "hybrid:bounded:4") < step_of(options, 64, "all-reduce") / 3


def test_scaling_of_horovods_benchmarks() -> None:
    """Horovod reports 90% for ResNet-101 and 68% for VGG-16 on 128 nodes with 4 GPUs each, with 25 Gbit/s."""
    found = {}
    for model in ("resnet101", "vgg16"):
        options = SimulateOptions(model=model, nodes="128", nproc_per_node=4, link="25Gbit")
        lines = simulation_as_json(simulate(options))
        found[model] = next(line["efficiency"] for line in lines if line["strategy"] == "all-reduce")
    assert 0.9 < found["resnet101"] <= 1.0
    assert 0.65 < found["vgg16"] < 0.85


def test_independent_ranks_have_an_efficiency_of_one() -> None:
    options = SimulateOptions(model="resnet50", nodes="2", link="10000Gbit", latency="0s")
    simulated = simulate(options)[2]
    for prediction in simulated.predictions:
        assert simulated.efficiency(prediction) == pytest.approx(1.0, rel=0.01)
