"""Compare the predictions of ``paceline explain`` with measurements, for several models and strategies.

    python benchmarks/predictions.py [--models perceptron cnn ...] [--ranks 2] [--runs 1] [--measure] [--json]
    sudo python benchmarks/predictions.py --hosts 2 4 8 --link 1Gbit 100Mbit

The first command measures each model in independent processes, predicts its step under each strategy, and then runs it
under this strategy. With ``--hosts``, each rank is on an emulated host of its own, and servers are on all hosts. These
models sleep instead of computing, because all hosts share the cores of this machine, which the prediction takes into
account. `--measure` first measures this machine's costs again, as ``paceline explain --measure`` does.

The table has the relative errors of the predicted steps in percent: positive if the prediction is too long. A winner is
right if the strategy with the most predicted examples per second is the fastest one, or within 5% of it.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace

from prediction_runs import (  # type: ignore[import-not-found]
    COMPUTED,
    PAUSED,
    Host,
    emulated_hosts,
    link_processor_s,
    load_modules,
    profile,
    record,
    undisturbed,
)

from paceline.environment import num_cores
from paceline.planning.comparing import StepComparison
from paceline.planning.explaining import find_machine
from paceline.planning.links import Machine, NodeLink, parse_link
from paceline.planning.predictions import Scenario, parse_candidate, predict_step
from paceline.planning.steps import ClusterShape
from paceline.strategies.profile import ModelProfile

STRATEGIES = (
    "one-device",
    "all-reduce",
    "parameter-server:sequential",
    "parameter-server:bounded:4",
    "parameter-server:eventual",
    "hybrid:sequential",
    "hybrid:bounded:4",
    "sharded",
    "pipeline",
)
COLUMNS = ("one", "all-red", "ps:seq", "ps:b4", "ps:ev", "hyb:seq", "hyb:b4", "sharded", "pipe")
PIPELINES = ("perceptron", "cnn", "residual", "transformer")
"""The models that compute and that can be divided into stages."""
LATENCY = "50us"
STEPS = 50
LEAST_STEPS, MOST_S = 12, 2.0
"""Between hosts, fewer steps are measured if they take longer than these seconds."""
CLOSE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The median prediction and measurement of one strategy."""

    place: str
    model: str
    strategy: str
    predicted_s: float
    measured_s: float
    predicted_per_s: float
    measured_per_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The machine, or hosts with a link."""

    ranks: int
    link: str | None = None

    @property
    def name(self) -> str:
        return "this machine" if self.link is None else f"{self.ranks} hosts, {self.link}"

    def strategies(self, model: str) -> list[str]:
        """Return the strategies for a model. Between hosts, those are measured that need the network differently."""
        without = set() if model == "clicks" else {"hybrid:sequential", "hybrid:bounded:4"}
        if self.link is not None or model not in PIPELINES:
            without.add("pipeline")
        if self.link is not None:
            without |= {"one-device", "parameter-server:eventual"}
        return [name for name in STRATEGIES if name not in without]

    def scenario(self, model: str, machine: Machine) -> Scenario:
        """Measure a model in independent processes."""
        if self.link is None:
            threads = max(num_cores() // self.ranks, 1)
            together = undisturbed(lambda: profile(model, copies=self.ranks, threads=threads))
            alone = undisturbed(lambda: profile(model, copies=1, threads=num_cores()))
            return Scenario(
                profile=together, alone=alone, machine=machine, shape=ClusterShape(ranks_per_node=self.ranks)
            )
        alone = paused_profile(model)
        link, cores = emulated_link(self.link, machine.socket_s_per_byte), num_cores() / self.ranks
        shape = ClusterShape(nodes=self.ranks, link=link, node_cores=cores)
        return Scenario(profile=alone, alone=alone, machine=machine, shape=shape)


@functools.cache
def emulated_link(link: str, socket_s_per_byte: float) -> NodeLink:
    """Return a link with the processor time of its emulation. The machine's sockets have a part of it already."""
    more_s = undisturbed(lambda: link_processor_s(link)) - socket_s_per_byte
    return replace(parse_link(link, LATENCY), processor_s_per_byte=max(more_s, 0.0))


@functools.cache
def paused_profile(model: str) -> ModelProfile:
    found: ModelProfile = undisturbed(lambda: profile(model, copies=1, threads=1, is_paused=True))
    return replace(found, busy_cores=0.0)  # a layer sleeps


def measure(place: Place, model: str, machine: Machine) -> list[Line]:
    """Predict the step of a model under each strategy, and measure it."""
    scenario = place.scenario(model, machine)
    return [measure_strategy(place, model, scenario, name) for name in place.strategies(model)]


def measure_strategy(place: Place, model: str, scenario: Scenario, name: str) -> Line:
    candidate = parse_candidate(name, 1 if place.link is None else place.ranks)
    prediction = predict_step(scenario, candidate)
    ranks = 1 if name == "one-device" else place.ranks
    with ExitStack() as stack:
        hosts, threads, steps = [Host()] * ranks, max(num_cores() // ranks, 1), STEPS
        if place.link is not None:
            hosts, threads = stack.enter_context(emulated_hosts(ranks, place.link)), 1
            steps = min(max(int(MOST_S / prediction.step_s), LEAST_STEPS), STEPS)
        is_paused = place.link is not None
        records = undisturbed(lambda: record(model, candidate, hosts, steps, threads=threads, is_paused=is_paused))
    comparison = StepComparison(prediction=prediction, records=tuple(records))
    return Line(
        place=place.name,
        model=model,
        strategy=name,
        predicted_s=prediction.step_s,
        measured_s=comparison.step_s,
        predicted_per_s=prediction.examples_per_s,
        measured_per_s=comparison.examples_per_s,
    )


def medians(lines: Sequence[Line]) -> list[Line]:
    """Return one line for each strategy of a model, with the medians over the runs."""
    found: list[Line] = []
    for strategy in dict.fromkeys(line.strategy for line in lines):
        same = [line for line in lines if line.strategy == strategy]
        names = ("predicted_s", "measured_s", "predicted_per_s", "measured_per_s")
        found.append(
            replace(same[0], **{name: statistics.median(getattr(line, name) for line in same) for name in names})
        )
    return found


def has_right_winner(lines: Sequence[Line]) -> bool:
    """Return whether the strategy with the best prediction is the fastest one, or almost as fast."""
    chosen = max(lines, key=lambda line: line.predicted_per_s)
    return chosen.measured_per_s >= CLOSE * max(line.measured_per_s for line in lines)


def show(lines: Sequence[Line]) -> None:
    """Print the row of a model."""
    errors = {line.strategy: f"{line.error * 100:+.0f}" for line in lines}
    cells = "".join(f"{errors.get(name, ''):>8}" for name in STRATEGIES)
    print(f"{lines[0].place:<18}{lines[0].model:<12}{cells}{'yes' if has_right_winner(lines) else 'no':>7}", flush=True)


def summarize(name: str, cases: Sequence[Sequence[Line]]) -> None:
    errors = [abs(line.error) for lines in cases for line in lines]
    right = sum(has_right_winner(lines) for lines in cases)
    print(
        f"{name}: median error {statistics.median(errors):.0%}, worst {max(errors):.0%}, "
        f"{sum(error <= 0.25 for error in errors)} of {len(errors)} at most 25%; the winner is right in {right} of "
        f"{len(cases)} cases"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted({*COMPUTED, *PAUSED}))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hosts", type=int, nargs="+")
    parser.add_argument("--link", nargs="+", default=["1Gbit"])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    places = [Place(ranks=options.ranks)]
    if options.hosts is not None:
        places = [Place(ranks=count, link=link) for link in options.link for count in options.hosts]
    local = ClusterShape(ranks_per_node=options.ranks if options.hosts is None else 2)
    machine = find_machine(local, again=options.measure)
    load_modules()
    if not options.json:
        print(f"{'':<30}{''.join(f'{name:>8}' for name in COLUMNS)} winner")
    found: dict[Place, list[list[Line]]] = {}
    for place in places:
        known = COMPUTED if place.link is None else tuple(PAUSED)
        for model in options.models or known:
            lines = medians([line for _ in range(options.runs) for line in measure(place, model, machine)])
            found.setdefault(place, []).append(lines)
            if options.json:
                print("\n".join(json.dumps(asdict(line) | {"error": line.error}) for line in lines), flush=True)
            else:
                show(lines)
    if not options.json:
        for place, cases in found.items():
            summarize(place.name, cases)
        if len(found) > 1:
            summarize("together", [lines for cases in found.values() for lines in cases])


if __name__ == "__main__":
    main()
