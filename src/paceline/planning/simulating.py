"""Predict the scaling of a known model over many nodes, without measuring this machine."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from rich.console import Console
from rich.table import Table

from paceline.environment import parse_duration
from paceline.errors import UsageError
from paceline.observe.plots import PageTable, Plot, Series
from paceline.observe.table import draw_bars
from paceline.planning.faults import MachineFaults
from paceline.planning.known_models import find_model, varied, with_stragglers
from paceline.planning.links import Curve, Machine, parse_link
from paceline.planning.options import SimulateOptions
from paceline.planning.predictions import (
    Scenario,
    StepPrediction,
    StrategyCandidate,
    candidates,
    describe_server_bound,
    predict_step,
)
from paceline.planning.steps import ClusterShape
from paceline.strategies import STRATEGIES

_MOST_NODES: Final = 100_000
_LOCAL_BYTES_PER_S: Final = 1e10
"""The speed of an all-reduce inside of a node, in bytes of the array."""


@dataclass(frozen=True, slots=True)
class SimulatedNodes:
    """The predictions for one number of nodes."""

    scenario: Scenario
    predictions: list[StepPrediction]

    def efficiency(self, prediction: StepPrediction) -> float:
        """Return the examples per second, as a share of the speed of the same number of ranks without communication."""
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
    profile, faults = with_stragglers(profile, options.stragglers, options.slowdown), faults_of(options)
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
            _with_faults(predict_step(scenario, candidate), nodes, faults)
            for candidate in candidates(scenario)
            if candidate.strategy not in ("one-device", "pipeline")
        ]
        found[nodes] = SimulatedNodes(scenario, predictions)
    return found


def faults_of(options: SimulateOptions) -> MachineFaults | None:
    """Return the failures of each machine; None without any. Raises UsageError for an invalid time."""
    times = {"mtbf": options.mtbf, "recovery": options.recovery, "snapshot_every": options.snapshot_every}
    seconds: dict[str, float] = {}
    for name, text in times.items():
        found = None if text is None else parse_duration(text)
        if text is not None and found is None:
            raise UsageError(f"--{name.replace('_', '-')} {text}: expected a time above 0, such as 30s, 10m or 720h")
        seconds[f"{name}_s"] = found or 0.0
    return None if options.mtbf is None else MachineFaults(**seconds)


def is_elastic(candidate: StrategyCandidate) -> bool:
    """Return whether the other ranks continue after a failure, with ``paceline run --min-ranks``."""
    return STRATEGIES[candidate.strategy].elastic_implementation is not None


def _with_faults(prediction: StepPrediction, nodes: int, faults: MachineFaults | None) -> StepPrediction:
    if faults is None:
        return prediction
    candidate = prediction.candidate
    machines = nodes + (candidate.servers if candidate.is_separate else 0)
    is_restarted = not is_elastic(candidate)
    share = faults.share_with_restarts(machines) if is_restarted else faults.share_without_restarts()
    return replace(prediction, examples_per_s=prediction.examples_per_s * share)


def simulation_as_json(found: dict[int, SimulatedNodes]) -> list[dict[str, Any]]:
    """Return the objects for ``--json``."""
    return [
        {
            "nodes": nodes,
            **prediction.candidate.as_json(),
            "step_s": prediction.step_s,
            "examples_per_s": prediction.examples_per_s,
            "efficiency": simulated.efficiency(prediction),
            "bottleneck": prediction.bottleneck,
        }
        for nodes, simulated in found.items()
        for prediction in simulated.predictions
    ]


def _curves(found: dict[int, SimulatedNodes]) -> Iterator[tuple[StrategyCandidate, list[float]]]:
    """Yield each strategy with its efficiency by number of nodes."""
    for column in zip(*(simulated.predictions for simulated in found.values()), strict=True):
        shares = [nodes.efficiency(prediction) for nodes, prediction in zip(found.values(), column, strict=True)]
        yield column[0].candidate, shares


def _describe_place(candidate: StrategyCandidate) -> str:
    return "" if not candidate.servers else "separate" if candidate.is_separate else "on nodes"


def describe_simulation(options: SimulateOptions) -> str:
    """Return the settings in one line."""
    text = f"{options.model}, {options.link}, ranks per node: {options.nproc_per_node}"
    if options.variation:
        text += f", variation {options.variation:g}"
    if options.stragglers:
        text += f", stragglers {options.stragglers:g}, slowdown {options.slowdown:g}"
    if options.mtbf is not None:
        text += f", mtbf {options.mtbf}, recovery {options.recovery}, snapshots every {options.snapshot_every}"
    return text


def show_simulation(console: Console, found: dict[int, SimulatedNodes], options: SimulateOptions) -> None:
    """Print the efficiency of each strategy by number of nodes: as bars, and as numbers for the columns that fit."""
    curves = list(_curves(found))
    nodes = list(found)
    used = max(len(candidate.label) for candidate, _ in curves) + len("on nodes") + len(nodes) + 3
    room = max((console.width - used) // (len(f"{max(nodes):,}") + 1), 1)
    stride = math.ceil(len(nodes) / room)
    chosen = [number for number in range(len(nodes)) if (len(nodes) - 1 - number) % stride == 0]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("nodes", no_wrap=True)
    table.add_column("servers", no_wrap=True)
    for number in chosen:
        table.add_column(f"{nodes[number]:,}", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for candidate, shares in curves:
        numbers = (f"{shares[number]:.0%}" for number in chosen)
        bars = draw_bars([min(share, 1.0) for share in shares], 0.0, 1.0) if len(shares) > 1 else ""
        table.add_row(candidate.label, _describe_place(candidate), *numbers, bars)
    console.print(f"efficiency of {describe_simulation(options)}\n")
    console.print(table)
    for sentence in _describe(found, options):
        console.print(sentence)


def page_of(found: dict[int, SimulatedNodes], options: SimulateOptions) -> list[Plot | PageTable]:
    """Return the sections of the report: the curves of efficiency and of speed, and their numbers."""
    nodes, curves = list(found), list(_curves(found))
    names = [f"{candidate.label} {_describe_place(candidate)}".strip() for candidate, _ in curves]
    labels = list(dict.fromkeys(candidate.label for candidate, _ in curves))
    speeds = [
        [line.examples_per_s for line in column]
        for column in zip(*(simulated.predictions for simulated in found.values()), strict=True)
    ]

    def plot(title: str, values: Sequence[Sequence[float]], format: Literal["percent", "count"], note: str) -> Plot:
        series = [
            Series(name=name, x=nodes, y=y, color=labels.index(candidate.label), is_dashed=candidate.is_separate)
            for name, (candidate, _), y in zip(names, curves, values, strict=True)
        ]
        return Plot(title=title, x_label="nodes", series=series, format=format, is_log=True, note=note)

    remarks = " ".join(f"{sentence.rstrip('.')}." for sentence in _describe(found, options))
    note = "examples per second, divided by the speed of the same number of ranks without communication and waiting"
    rows = [[name, *(f"{share:.0%}" for share in shares)] for name, (_, shares) in zip(names, curves, strict=True)]
    return [
        plot("Efficiency", [shares for _, shares in curves], "percent", note),
        plot("Examples per second of all ranks", speeds, "count", remarks),
        PageTable(title="Efficiency by nodes", columns=["strategy", *(f"{n:,}" for n in nodes)], rows=rows),
    ]


def _describe(found: dict[int, SimulatedNodes], options: SimulateOptions) -> Iterator[str]:
    nodes = max(found)
    yield _describe_best(nodes, found[nodes].predictions)
    bound = describe_server_bound(found[nodes].scenario)
    if bound is not None:
        yield bound
    if options.mtbf is not None:
        yield (
            "After a failure, sharded training restarts from the last snapshot. Under the other strategies, the other "
            "ranks continue (--min-ranks, --replicas 1)."
        )


def _describe_best(nodes: int, predictions: Sequence[StepPrediction]) -> str:
    suitable = [line for line in predictions if line.candidate.is_exact]
    best = max(suitable, key=lambda prediction: prediction.examples_per_s)
    return (
        f"fastest strategy with the result of one device, on {nodes:,} nodes: {best.candidate.description}, "
        f"{best.examples_per_s:,.0f} examples/s; bottleneck: {best.bottleneck}"
    )
