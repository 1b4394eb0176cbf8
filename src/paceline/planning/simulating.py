"""Predict the scaling of a known model over many nodes, without measuring this machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from paceline.errors import UsageError
from paceline.planning.known_models import find_model, varied
from paceline.planning.links import Curve, Machine, parse_link
from paceline.planning.options import SimulateOptions
from paceline.planning.plays import ClusterShape
from paceline.planning.predictions import Scenario, StepPrediction, candidates, describe_server_bound, predict_step

_MOST_NODES: Final = 100_000
_LOCAL_BYTES_PER_S: Final = 1e10
"""The speed of an all-reduce inside of a node, in bytes of the array."""


@dataclass(frozen=True, slots=True)
class SimulatedNodes:
    """The predictions for one number of nodes."""

    scenario: Scenario
    predictions: list[StepPrediction]

    def efficiency(self, prediction: StepPrediction) -> float:
        """Return the examples per second, as a share of the speed of equally many ranks without communication."""
        profile = self.scenario.profile
        alone = profile.batch_size / profile.compute_s * self.scenario.shape.num_ranks
        return prediction.examples_per_s / alone


def parse_nodes(text: str) -> list[int]:
    """Return numbers of nodes from ``8``, ``2,8,32`` or ``2..512`` (powers of two). Raises UsageError."""
    span = re.fullmatch(r"(\d{1,6})\.\.(\d{1,6})", text)
    if span is not None and 0 < int(span[1]) <= int(span[2]):
        numbers, end = [int(span[1])], int(span[2])
        while numbers[-1] * 2 <= end:
            numbers.append(numbers[-1] * 2)
        numbers = numbers if numbers[-1] == end else [*numbers, end]
    elif re.fullmatch(r"\d{1,6}(,\d{1,6})*", text):
        numbers = [int(part) for part in text.split(",")]
    else:
        numbers = []
    if not numbers or not all(2 <= number <= _MOST_NODES for number in numbers):
        raise UsageError(f"--nodes {text}: expected numbers from 2 to {_MOST_NODES:,}, such as 8, 2,8,32 or 2..512")
    return numbers


def simulate(options: SimulateOptions) -> dict[int, SimulatedNodes]:
    """Return the predictions of all strategies by number of nodes. Raises UsageError for invalid options."""
    profile, link = find_model(options.model), parse_link(options.link, options.latency)
    profile = replace(profile, steps_s=varied(profile.compute_s, options.variation))
    ranks = options.nproc_per_node
    machine = Machine(
        num_cores=max(ranks, 1),
        ranks_per_node=ranks,
        all_reduce=Curve(((1, 0.0), (1 << 30, (1 << 30) / _LOCAL_BYTES_PER_S))),
        socket_s_per_byte=0.0,
    )
    found: dict[int, SimulatedNodes] = {}
    for nodes in parse_nodes(options.nodes):
        shape = ClusterShape(nodes=nodes, ranks_per_node=ranks, link=link)
        scenario = Scenario(profile=profile, alone=profile, machine=machine, shape=shape, servers=options.servers)
        predictions = [
            predict_step(scenario, candidate)
            for candidate in candidates(scenario)
            if candidate.strategy not in ("one-device", "pipeline")
        ]
        found[nodes] = SimulatedNodes(scenario, predictions)
    return found


def simulation_as_json(found: dict[int, SimulatedNodes]) -> list[dict[str, Any]]:
    """Return the objects for ``--json``."""
    return [
        {
            "nodes": nodes,
            "strategy": prediction.candidate.label,
            "servers": prediction.candidate.servers,
            "separate_servers": prediction.candidate.is_separate,
            "step_s": prediction.step_s,
            "examples_per_s": prediction.examples_per_s,
            "efficiency": simulated.efficiency(prediction),
            "bottleneck": prediction.bottleneck,
        }
        for nodes, simulated in found.items()
        for prediction in simulated.predictions
    ]


def show_simulation(console: Console, found: dict[int, SimulatedNodes], options: SimulateOptions) -> None:
    """Print the efficiency of each strategy by number of nodes."""
    table = Table(box=None, pad_edge=False)
    table.add_column("nodes")
    table.add_column("servers")
    for nodes in found:
        table.add_column(f"{nodes:,}", justify="right")
    for column in zip(*(simulated.predictions for simulated in found.values()), strict=True):
        shares = [each.efficiency(prediction) for each, prediction in zip(found.values(), column, strict=True)]
        candidate = column[0].candidate
        place = "" if not candidate.servers else "separate" if candidate.is_separate else "on nodes"
        table.add_row(candidate.label, place, *(f"{share:.0%}" for share in shares))
    console.print(f"efficiency of {options.model}, {options.link}, ranks per node: {options.nproc_per_node}\n")
    console.print(table)
    nodes = max(found)
    console.print(_describe_best(nodes, found[nodes].predictions))
    bound = describe_server_bound(found[nodes].scenario)
    if bound is not None:
        console.print(bound)


def _describe_best(nodes: int, predictions: Sequence[StepPrediction]) -> str:
    suitable = [line for line in predictions if line.candidate.is_exact]
    best = max(suitable, key=lambda prediction: prediction.examples_per_s)
    return (
        f"fastest with the result of one device on {nodes:,} nodes: {best.candidate.description}, "
        f"{best.examples_per_s:,.0f} examples/s; its bottleneck: {best.bottleneck}"
    )
