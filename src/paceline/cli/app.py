"""The tree of commands."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.version import __version__

from . import bench, convert, describe, doctor, inspect, model, predict, roles, run, serve, train
from .parameters import PanelCommand

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
app.command("describe", no_args_is_help=True)(describe.describe)
app.command("convert", no_args_is_help=True)(convert.convert)
app.command("predict", no_args_is_help=True)(predict.predict)
app.command("inspect", no_args_is_help=True)(inspect.inspect)
app.command("run", cls=PanelCommand, no_args_is_help=True, context_settings=run.CONTEXT)(run.run)
app.command("serve", no_args_is_help=True)(serve.serve)
app.command("scheduler")(roles.scheduler)
app.command("server")(roles.server)
app.command("worker")(roles.worker)
app.command("doctor")(doctor.doctor)
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
