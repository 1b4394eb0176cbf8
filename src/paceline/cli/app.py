"""Define the tree of commands."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.launch.run.options import AUTO, RunOptions
from paceline.version import __version__

from . import bench, data, horovodrun, manifests, model, planning, roles, stacks, top, train
from .parameters import PanelCommand, expand_flags

_RUN_CONTEXT = {
    "allow_interspersed_args": False,  # arguments after the script belong to the script
    "token_normalize_func": lambda name: name.replace("_", "-") if name.startswith("-") or "_" in name else name,
}
"""Settings of Typer's context. As in torchrun, --nproc_per_node is an alias of --nproc-per-node."""


@expand_flags
def run(options: RunOptions) -> None:
    """Run a PyTorch script under a strategy.

    The processes run on this machine or on several machines.

    Example: paceline run --strategy all-reduce --nproc-per-node 4 train.py --epochs 3

    Example: paceline run --strategy pipeline --stages 2 train.py

    Example: paceline run --strategy auto --nproc-per-node 2 train.py

    Example: paceline run --strategy sharded --nproc-per-node 4 train.py

    Example: paceline run --hosts a:4,b:4 train.py

    Example: paceline run --on slurm --nodes 4 --partition gpu --nproc-per-node 8 train.py

    Example: paceline run --strategy parameter-server --servers 2 --consistency bounded:4 --nproc-per-node 4 train.py
    """
    from paceline.launch import run_on_engine, run_script

    if options.strategy == AUTO:
        options = planning.choose(options)
    has_engine = options.engine.on is not None or options.engine.hosts is not None
    raise typer.Exit(run_on_engine(options) if has_engine else run_script(options))


app = typer.Typer(
    name="paceline",
    help="Train models on several processes, devices and machines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train", cls=PanelCommand, no_args_is_help=True)(train.train)
app.command("describe", no_args_is_help=True)(data.describe)
app.command("convert", no_args_is_help=True)(data.convert)
app.command("predict", no_args_is_help=True)(model.predict)
app.command("inspect", no_args_is_help=True)(model.inspect)
app.command("run", cls=PanelCommand, no_args_is_help=True, context_settings=_RUN_CONTEXT)(run)
app.command("explain", cls=PanelCommand, no_args_is_help=True, context_settings=_RUN_CONTEXT)(planning.explain)
app.command("compare", cls=PanelCommand, no_args_is_help=True, context_settings=_RUN_CONTEXT)(planning.compare)
app.command("simulate", cls=PanelCommand)(planning.simulate)
app.command("horovodrun", cls=PanelCommand, no_args_is_help=True, context_settings=_RUN_CONTEXT)(horovodrun.horovodrun)
app.command("serve", no_args_is_help=True)(model.serve)
app.command("scheduler", cls=PanelCommand)(roles.scheduler)
app.command("server")(roles.server)
app.command("worker")(roles.worker)
app.command("coordinator", no_args_is_help=True)(roles.coordinator)
app.command("top", no_args_is_help=True)(top.top)
app.command("manifests", no_args_is_help=True, context_settings={"allow_interspersed_args": False})(manifests.manifests)
app.command("stacks")(stacks.stacks)
app.command("doctor")(bench.doctor)
app.add_typer(bench.app, name="bench")
app.add_typer(model.app, name="model")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass
