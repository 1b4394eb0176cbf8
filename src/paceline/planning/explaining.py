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
from paceline.planning.calibration import key_of, load_machine, load_results, measure_machine
from paceline.planning.links import Curve, Machine, parse_link
from paceline.planning.options import ExplainOptions
from paceline.planning.plays import ClusterShape
from paceline.planning.predictions import (
    Contender,
    Situation,
    StepPrediction,
    choose,
    describe_server_bound,
    find_changes,
    predict_all,
)
from paceline.planning.scripts import MeasuredCommand, check_options
from paceline.planning.waiting import describe_noise
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


def measure_situation(options: ExplainOptions, show: Callable[[str], None]) -> tuple[MeasuredCommand, Situation]:
    """Measure the script and, at the first use, the machine. `show` receives the current step."""
    command, ranks = check_options(options)
    shape = shape_of(options, ranks)
    machine = find_machine(shape, show, again=options.measure)
    profile, alone = profile_both(command, ranks, show)
    return command, Situation(profile=profile, alone=alone, machine=machine, shape=shape, servers=options.servers)


def find_machine(shape: ClusterShape, show: Callable[[str], None], *, again: bool = False) -> Machine:
    """Return the stored costs of this machine, or measure them, which takes minutes. One rank has no messages."""
    if shape.num_ranks == 1:
        return Machine(num_cores=num_cores(), ranks_per_node=1, all_reduce=Curve(((1, 0.0),)), socket_s_per_byte=0.0)
    ranks = max(shape.ranks_per_node, 2)  # messages of one rank per node are measured between two ranks here
    machine = None if again else load_machine(ranks)
    return machine or measure_machine(ranks, show)


def profile_both(
    command: MeasuredCommand, ranks: int, show: Callable[[str], None]
) -> tuple[ModelProfile, ModelProfile]:
    """Return the profile of `ranks` processes that share the cores, and of one process with all cores."""
    show(f"measuring {command.script} in {ranks} independent process{'es' if ranks > 1 else ''} ...")
    profile = command.profile(ranks, max(num_cores() // ranks, 1))
    if ranks == 1:
        return profile, profile
    show(f"measuring {command.script} in one process ...")
    return profile, command.profile(1, num_cores())


def contender_as_json(contender: Contender) -> dict[str, Any]:
    """Return the members that identify a line of the table."""
    return {
        "strategy": contender.label,
        "servers": contender.servers,
        "separate_servers": contender.is_separate,
    }


def as_json(situation: Situation, predictions: Sequence[StepPrediction], measured: dict[str, float]) -> dict[str, Any]:
    """Return the object for ``--json``."""
    shape = situation.shape
    lines = [
        {
            **contender_as_json(prediction.contender),
            "same_result": prediction.contender.is_exact,
            "step_s": prediction.step_s,
            "examples_per_s": prediction.examples_per_s,
            "memory_bytes": round(prediction.memory_bytes),
            "bottleneck": prediction.bottleneck,
            "parts_s": prediction.parts,
            "measured_s": measured.get(prediction.contender.label),
        }
        for prediction in predictions
    ]
    return {
        "nodes": shape.nodes,
        "ranks_per_node": shape.ranks_per_node,
        "link": None if shape.link is None else asdict(shape.link),
        "strategies": lines,
        "choice": contender_as_json(choose(predictions).contender),
        "changes": find_changes(situation),
    }


def measured_steps(
    command: MeasuredCommand, situation: Situation, predictions: Sequence[StepPrediction]
) -> dict[str, float]:
    """Return the steps that ``paceline compare`` has measured for this script, by label. Only for one node."""
    if situation.shape.nodes > 1:
        return {}
    stored, ranks = load_results().steps_s, situation.shape.ranks_per_node
    contenders = [prediction.contender for prediction in predictions]
    keys = {contender.label: key_of(command, ranks, contender) for contender in contenders}
    return {label: stored[key] for label, key in keys.items() if key in stored}


def show_explanation(
    console: Console, situation: Situation, predictions: Sequence[StepPrediction], measured: dict[str, float]
) -> None:
    """Print the table of predictions, the choice, the bottleneck and the changes that alter the order."""
    table = Table(box=None, pad_edge=False)
    table.add_column("strategy")
    for name in ("servers", "step ms", *(["measured"] if measured else []), "examples/s", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bottleneck", no_wrap=True)
    for prediction in predictions:
        contender = prediction.contender
        step_s = measured.get(contender.label)
        cells = ["" if step_s is None else f"{step_s * 1e3:,.2f}"] if measured else []
        table.add_row(
            f"{contender.label}{'' if contender.is_exact else '*'}",
            f"{contender.servers} more" if contender.is_separate else str(contender.servers or ""),
            f"{prediction.step_s * 1e3:,.2f}",
            *cells,
            f"{prediction.examples_per_s:,.0f}",
            format_bytes(prediction.memory_bytes),
            prediction.bottleneck,
        )
    console.print(table)
    if not all(prediction.contender.is_exact for prediction in predictions):
        console.print("* applies stale gradients: more examples per second may still learn more slowly")
    best = choose(predictions)
    console.print(f"\n{explain_choice(best, predictions)}")
    console.print(f"its bottleneck: {best.bottleneck}; it needs {_REMEDIES[best.bottleneck]}")
    for sentence in find_changes(situation):
        console.print(sentence)
    noise = describe_noise(situation.profile.steps_s) or describe_noise(situation.alone.steps_s)
    for remark in (describe_server_bound(situation), _describe_embedding(situation), noise):
        if remark is not None:
            console.print(remark)


def explain_choice(best: StepPrediction, predictions: Sequence[StepPrediction]) -> str:
    """Return the reason for a choice in one line."""
    next_best = [found for found in predictions if found.contender.is_choosable and found is not best]
    text = f"fastest with the result of one device: {best.contender.description}, {best.examples_per_s:,.0f} examples/s"
    if next_best:
        text += f"; next: {next_best[0].contender.description}, {next_best[0].examples_per_s:,.0f} examples/s"
    return text


def _describe_embedding(situation: Situation) -> str | None:
    """Return advice for the largest embedding with a dense gradient, of which a step touches few rows."""
    layers = [layer for layer in situation.profile.layers if layer.num_rows and not layer.row_bytes]
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
    machines = {
        "nnodes": options.nnodes,
        "cluster": options.cluster,
        "hosts": options.engine.hosts,
        "on": options.engine.on,
    }
    of_strategies = {
        "servers": options.servers,
        "consistency": options.consistency,
        "stale": options.stale,
        "replicas": options.replicas,
        "filters": options.filters,
        **options.flags.given(),
    }
    for rule, given in (
        ("chooses a strategy for the ranks of this machine", machines),
        ("options of one strategy do not apply", of_strategies),
    ):
        for name, value in given.items():
            if value is not None:
                words = f"--{name.replace('_', '-')}" if value is True else f"--{name.replace('_', '-')} {value}"
                raise UsageError(
                    f"--strategy auto: {rule}. Leave {words} out, or choose the strategy with paceline explain"
                )
    if options.module or options.no_python:
        raise UsageError("--strategy auto: needs a Python script. Choose the strategy yourself for a module or program")
    chosen = ExplainOptions(script=options.script, arguments=options.arguments, nproc_per_node=options.nproc_per_node)
    _, situation = measure_situation(chosen, show)
    predictions = predict_all(situation)
    best = choose(predictions)
    contender = best.contender
    ranks = 1 if contender.strategy == "one-device" else situation.shape.ranks_per_node
    changed = replace(options, strategy=contender.strategy, nproc_per_node=ranks)
    if contender.consistency is not None:
        changed = replace(changed, consistency=contender.consistency, servers=contender.servers)
    reason = explain_choice(best, predictions)
    if ranks < situation.shape.ranks_per_node:
        reason += f"; runs 1 process instead of {situation.shape.ranks_per_node}"
    return changed, reason
