"""Explain the speed of a script under each strategy: measure the script and the machine, and predict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.environment import num_cores
from paceline.errors import UsageError
from paceline.launch import RunOptions
from paceline.observe.table import format_bytes
from paceline.planning.calibration import key_of, load_machine, load_results, measure_machine, time_filter
from paceline.planning.links import Curve, Machine, parse_link
from paceline.planning.options import ExplainOptions, ScriptOptions
from paceline.planning.predictions import (
    NOISY,
    Scenario,
    StepPrediction,
    choose,
    describe_server_bound,
    find_changes,
    predict_all,
)
from paceline.planning.scripts import ONLY, MeasuredCommand, check_options
from paceline.planning.steps import ClusterShape
from paceline.strategies.profile import ModelProfile

_LATENCY = "50us"
_REMEDIES = {
    "compute": "faster or more devices",
    "communication CPU": "fewer bytes (filters, larger batches) or more cores",
    "wire": "a faster link, fewer bytes (filters) or larger batches",
    "server CPU": "more servers",
    "slow ranks": "a bounded delay, or ranks of equal speed",
    "bubble": "more microbatches per step",
}


def shape_of(options: ExplainOptions, ranks_per_node: int) -> ClusterShape:
    """Return the cluster. Raises UsageError for missing or invalid options."""
    if options.nodes == 1:
        for name, value in (("--link", options.link), ("--latency", options.latency)):
            if value is not None:
                raise UsageError(f"{name} {value}: one node has no network link. Pass --nodes N too")
        return ClusterShape(ranks_per_node=ranks_per_node)
    if options.link is None:
        raise UsageError(f"--nodes {options.nodes}: the speed of the network is missing. Pass --link, such as 10Gbit")
    link = parse_link(options.link, options.latency or _LATENCY)
    return ClusterShape(nodes=options.nodes, ranks_per_node=ranks_per_node, link=link)


def find_machine(shape: ClusterShape, *, again: bool = False) -> Machine:
    """Return the stored costs of this machine, or measure them, which takes minutes. A single rank has no costs."""
    if shape.num_ranks == 1:
        return Machine(num_cores=num_cores(), ranks_per_node=1, all_reduce=Curve(((1, 0.0),)), socket_s_per_byte=0.0)
    ranks = max(shape.ranks_per_node, 2)  # messages of one rank per node are measured between two ranks here
    machine = None if again else load_machine(ranks)
    return replace(machine or measure_machine(ranks), filter_s_per_byte=time_filter())


def measure_scenario(
    command: MeasuredCommand,
    shape: ClusterShape,
    servers: int | None,
    show: Callable[[str], None],
    *,
    again: bool = False,
) -> Scenario:
    """Measure the machine, at the first use or `again`, and the script. `show` receives the current step.

    The script runs in as many processes as a node has ranks, which share the cores, and in one process. A noisy
    measurement is repeated once, and the less noisy one counts.
    """
    machine, ranks = find_machine(shape, again=again), shape.ranks_per_node
    found: dict[int, ModelProfile] = {}
    for copies in dict.fromkeys((ranks, 1)):
        threads = max(num_cores() // copies, 1)
        text = f"measuring {command.script} in {'one process' if copies == 1 else f'{copies} independent processes'}"
        show(f"{text} ...")
        found[copies] = command.profiles(copies, threads)[ONLY]
        if found[copies].noise >= NOISY:
            show(f"{text} again, because other programs may have disturbed it ...")
            found[copies] = min(found[copies], command.profiles(copies, threads)[ONLY], key=lambda each: each.noise)
    return Scenario(profile=found[ranks], alone=found[1], machine=machine, shape=shape, servers=servers)


def as_json(scenario: Scenario, predictions: Sequence[StepPrediction], measured: dict[str, float]) -> dict[str, Any]:
    """Return the object for ``--json``."""
    shape = scenario.shape
    lines = [
        {
            **prediction.candidate.as_json(),
            "same_result": prediction.candidate.is_exact,
            "step_s": prediction.step_s,
            "examples_per_s": prediction.examples_per_s,
            "memory_bytes": round(prediction.memory_bytes),
            "bottleneck": prediction.bottleneck,
            "parts_s": prediction.parts,
            "measured_s": measured.get(prediction.candidate.label),
        }
        for prediction in predictions
    ]
    return {
        "nodes": shape.nodes,
        "ranks_per_node": shape.ranks_per_node,
        "link": None if shape.link is None else asdict(shape.link),
        "strategies": lines,
        "choice": choose(predictions, scenario.noise).candidate.as_json(),
        "uncertain": scenario.noise > 1,
        "changes": find_changes(scenario),
    }


def measured_steps(
    command: MeasuredCommand, scenario: Scenario, predictions: Sequence[StepPrediction]
) -> dict[str, float]:
    """Return the steps that ``paceline compare`` has measured for this script, by label. Only for one node."""
    if scenario.shape.nodes > 1:
        return {}
    stored, ranks = load_results(), scenario.shape.ranks_per_node
    candidates = [prediction.candidate for prediction in predictions]
    keys = {candidate.label: key_of(command, ranks, candidate) for candidate in candidates}
    return {label: stored[key] for label, key in keys.items() if key in stored}


def show_explanation(
    console: Console, scenario: Scenario, predictions: Sequence[StepPrediction], measured: dict[str, float]
) -> None:
    """Print the table of predictions, the choice, the bottleneck and the changes that alter the order."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("strategy", overflow="fold")
    for name in ("servers", "step ms", *(["measured"] if measured else []), "examples/s", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bottleneck", no_wrap=True)
    for prediction in predictions:
        candidate = prediction.candidate
        step_s = measured.get(candidate.label)
        cells = ["" if step_s is None else f"{step_s * 1e3:,.2f}"] if measured else []
        table.add_row(
            f"{candidate.label.replace('+', ' +')}{'' if candidate.is_exact else '*'}",
            f"{candidate.servers} more" if candidate.is_separate else str(candidate.servers or ""),
            f"{prediction.step_s * 1e3:,.2f}",
            *cells,
            f"{prediction.examples_per_s:,.0f}",
            format_bytes(prediction.memory_bytes),
            prediction.bottleneck,
        )
    console.print(table)
    if not all(prediction.candidate.is_exact for prediction in predictions):
        console.print("* applies stale or rounded gradients: more examples per second may still learn more slowly")
    best = choose(predictions, scenario.noise)
    console.print(f"\n{explain_choice(predictions, scenario.noise)}")
    console.print(f"bottleneck: {best.bottleneck}; remedy: {_REMEDIES[best.bottleneck]}")
    for sentence in find_changes(scenario):
        console.print(sentence)
    for remark in (describe_server_bound(scenario), _describe_embedding(scenario)):
        if remark is not None:
            console.print(remark)


def explain_choice(predictions: Sequence[StepPrediction], noise: float) -> str:
    """Return the reason for the choice of :func:`choose`."""

    def describe(found: StepPrediction) -> str:
        return f"{found.candidate.description}, {found.examples_per_s:,.0f} examples/s"

    fastest = choose(predictions)
    if noise > 1:
        return (
            f"uncertain: the measurements are noisy (factor {noise:.1f}), perhaps because other programs use this "
            "machine. Only a strategy that is faster by this factor replaces the default. Chosen: "
            f"{describe(choose(predictions, noise))}; fastest by prediction: {describe(fastest)}"
        )
    others = [found for found in predictions if found.candidate.is_choosable and found is not fastest]
    texts = map(describe, [fastest, *others[:1]])
    return f"fastest strategy with the result of one device: {'; next: '.join(texts)}"


def _describe_embedding(scenario: Scenario) -> str | None:
    """Return advice for the largest embedding with a dense gradient, of which a step touches few rows."""
    layers = [layer for layer in scenario.profile.layers if layer.num_rows and not layer.row_bytes]
    layer = max(layers, key=lambda layer: layer.parameter_bytes, default=None)
    if layer is None or layer.touched_rows * 4 > layer.num_rows:
        return None
    share = layer.touched_rows / layer.num_rows
    return (
        f"Embedding {layer.name!r}: a step uses {share:.2%} of the rows but sends the gradients of all. Use "
        "paceline.torch.Embedding."
    )


def choose_options(options: RunOptions, show: Callable[[str], None]) -> tuple[RunOptions, str]:
    """Return the options of ``paceline run --strategy auto`` with the chosen strategy, and the reason.

    Raises UsageError for options that do not apply.
    """
    engine, names = options.engine, ("servers", "consistency", "stale", "replicas", "filters")
    rules = {
        "chooses a strategy for the ranks of this machine": {
            "nnodes": options.nnodes,
            "cluster": options.cluster,
            "hosts": engine.hosts,
            "on": engine.on,
        },
        "options of one strategy do not apply": {name: getattr(options, name) for name in names}
        | options.flags.given(),
    }
    for rule, given in rules.items():
        for name, value in given.items():
            if value is not None:
                words = f"--{name.replace('_', '-')}" if value is True else f"--{name.replace('_', '-')} {value}"
                raise UsageError(
                    f"--strategy auto: {rule}. Leave {words} out, or choose the strategy with paceline explain"
                )
    if options.module or options.no_python:
        raise UsageError("--strategy auto: needs a Python script. Choose the strategy yourself for a module or program")
    chosen = ScriptOptions(script=options.script, arguments=options.arguments, nproc_per_node=options.nproc_per_node)
    command, most_ranks = check_options(chosen)
    scenario = measure_scenario(command, ClusterShape(ranks_per_node=most_ranks), None, show)
    predictions = predict_all(scenario)
    candidate = choose(predictions, scenario.noise).candidate
    ranks = 1 if candidate.strategy == "one-device" else most_ranks
    changed = replace(options, strategy=candidate.strategy, nproc_per_node=ranks)
    if candidate.consistency is not None:
        changed = replace(changed, consistency=candidate.consistency, servers=candidate.servers)
    reason = explain_choice(predictions, scenario.noise)
    if ranks < most_ranks:
        reason += f"; runs 1 process instead of {most_ranks}"
    return changed, reason
