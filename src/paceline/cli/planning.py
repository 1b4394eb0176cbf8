"""Predict and compare the speed of strategies: ``paceline explain``, ``compare`` and ``simulate``."""

from __future__ import annotations

import contextlib
import json as json_module
import threading
from functools import partial

import typer

from paceline.launch.run.options import RunOptions
from paceline.output_files import check_output
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
    from paceline.planning.scripts import check_options

    command, ranks = check_options(options)
    shape = explaining.shape_of(options, ranks)
    with start_work("starting", 2, in_background=False) as progress:
        scenario = explaining.measure_scenario(command, shape, options.servers, progress.show, again=options.measure)
    found = predictions.predict_all(scenario)
    measured = explaining.measured_steps(command, scenario, found)
    if options.json:
        typer.echo(json_module.dumps(explaining.as_json(scenario, found, measured)))
    else:
        explaining.show_explanation(Console(highlight=False), scenario, found, measured)


@expand_flags
def compare(options: CompareOptions) -> None:
    """Run a PyTorch script under several strategies on this machine, and compare predictions with measurements.

    Each strategy runs for --steps steps, or until --target-loss. 'paceline explain' shows the results too.

    Example: paceline compare --strategies all-reduce,parameter-server:bounded:4 train.py

    Example: paceline compare --target-loss 0.2 --report comparison.html train.py
    """
    from rich.console import Console

    from paceline.observe.plots import page_bytes, write_page
    from paceline.observe.work import start_work
    from paceline.planning import comparing

    if options.report is not None:
        check_output("--report", options.report)
    comparisons: list[comparing.StepComparison] = []
    try:
        with start_work("starting", 2 + len(options.strategies.split(",")), in_background=False) as progress:
            for comparison in comparing.compare(options, progress.show):
                comparisons.append(comparison)
                if options.json:
                    line = json_module.dumps(comparing.comparison_as_json(comparison, options.target_loss))
                    progress.write_above(partial(typer.echo, line))
    finally:  # also the strategies before one that failed
        if comparisons and not options.json:
            comparing.show_comparisons(Console(highlight=False), comparisons, options.target_loss)
        if comparisons and options.report is not None:
            title = " ".join(["paceline compare", options.script or "", *(options.arguments or ())])
            status = f"{len(comparisons[0].records)} ranks on this machine"
            page = page_bytes(title, status, comparing.page_of(comparisons, options.target_loss))
            write_page("--report", options.report, page)


@expand_flags
def simulate(options: SimulateOptions) -> None:
    """Predict how a known model scales over many nodes under each strategy.

    The efficiency is the speed of all ranks together, divided by the speed of the same number of independent ranks.

    Example: paceline simulate --nodes 2..10000 --stragglers 0.01 --mtbf 2000h --report scaling.html

    Example: paceline simulate --model vgg16 --nodes 2..512 --nproc-per-node 4 --link 25Gbit
    """
    from rich.console import Console

    from paceline.observe.dashboard import add_pages
    from paceline.observe.plots import page_bytes, write_page
    from paceline.observe.web import Page, WebServer
    from paceline.planning import simulating

    if options.report is not None:
        check_output("--report", options.report)
    with contextlib.ExitStack() as stack:
        server = None
        if options.dashboard is not None:
            server = stack.enter_context(WebServer.start(options.dashboard, "--dashboard"))
        found = simulating.simulate(options)
        if options.json:
            for line in simulating.simulation_as_json(found):
                typer.echo(json_module.dumps(line))
        else:
            simulating.show_simulation(Console(highlight=False), found, options)
        page = page_bytes(
            "paceline simulate", simulating.describe_simulation(options), simulating.page_of(found, options)
        )
        if options.report is not None:
            write_page("--report", options.report, page)
        if server is not None:
            address = add_pages(server, {"/": lambda: Page(page, "text/html; charset=utf-8")})
            typer.echo(f"paceline simulate: dashboard at {address}. Press Ctrl-C to end", err=True)
            with contextlib.suppress(KeyboardInterrupt):
                threading.Event().wait()


def choose(options: RunOptions) -> RunOptions:
    """Return the options of ``paceline run --strategy auto`` with a strategy, and print the reason."""
    from paceline.observe.work import start_work
    from paceline.planning.explaining import choose_options

    with start_work("starting", 2, in_background=False) as progress:
        chosen, reason = choose_options(options, progress.show)
    typer.echo(f"paceline run: {reason}", err=True)
    return chosen
