"""Predict and compare the strategies for a script: ``paceline explain`` and ``paceline compare``."""

from __future__ import annotations

import json as json_module
from functools import partial

import typer

from paceline.launch.run.options import RunOptions
from paceline.planning.options import CompareOptions, ExplainOptions, SimulateOptions

from .parameters import expand_flags


@expand_flags
def explain(options: ExplainOptions) -> None:
    """Predict the speed of a PyTorch script under each strategy, and explain the prediction.

    Runs the script for a few dozen steps without communication, and predicts its steps on the nodes that you describe.
    The first use measures this machine, which takes a few minutes.

    Example: paceline explain train.py --epochs 3

    Example: paceline explain --nodes 8 --link 1Gbit --latency 50us train.py
    """
    from rich.console import Console

    from paceline.observe.work import start_work
    from paceline.planning import explaining, predictions

    with start_work("starting", 2, in_background=False) as progress:
        command, scenario = explaining.measure_scenario(options, progress.show)
    found = predictions.predict_all(scenario)
    measured = explaining.measured_steps(command, scenario, found)
    if options.json:
        typer.echo(json_module.dumps(explaining.as_json(scenario, found, measured)))
    else:
        explaining.show_explanation(Console(highlight=False), scenario, found, measured)


@expand_flags
def compare(options: CompareOptions) -> None:
    """Run a PyTorch script under several strategies on this machine, and compare predictions with measurements.

    Each strategy runs for --steps steps. 'paceline explain' shows the results too.

    Example: paceline compare --strategies all-reduce,parameter-server:bounded:4 train.py
    """
    from rich.console import Console

    from paceline.observe.work import start_work
    from paceline.planning import comparing

    comparisons = []
    with start_work("starting", 2 + len(options.strategies.split(",")), in_background=False) as progress:
        for comparison in comparing.compare(options, progress.show):
            comparisons.append(comparison)
            if options.json:
                line = json_module.dumps(comparing.comparison_as_json(comparison))
                progress.aside(partial(typer.echo, line))
    if not options.json:
        comparing.show_comparisons(Console(highlight=False), comparisons)


@expand_flags
def simulate(options: SimulateOptions) -> None:
    """Predict how a known model scales over many nodes under each strategy.

    The efficiency is the speed of all ranks together, divided by the speed of equally many independent ranks.

    Example: paceline simulate --model vgg16 --nodes 2..512 --nproc-per-node 4 --link 25Gbit
    """
    from rich.console import Console

    from paceline.planning import simulating

    found = simulating.simulate(options)
    if options.json:
        for line in simulating.simulation_as_json(found):
            typer.echo(json_module.dumps(line))
    else:
        simulating.show_simulation(Console(highlight=False), found, options)


def choose(options: RunOptions) -> RunOptions:
    """Return the options of ``paceline run --strategy auto`` with a strategy, and print the reason of the choice."""
    from paceline.observe.work import start_work
    from paceline.planning.explaining import choose_options

    with start_work("starting", 2, in_background=False) as progress:
        chosen, reason = choose_options(options, progress.show)
    typer.echo(f"paceline run: {reason}", err=True)
    return chosen
