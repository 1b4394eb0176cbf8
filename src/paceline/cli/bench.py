"""``paceline bench``."""

from __future__ import annotations

import dataclasses
import json as json_module
from typing import Annotated

import typer

from . import options

app = typer.Typer(help="Measure this machine.", no_args_is_help=True)


@app.callback()
def _bench() -> None:
    pass


@app.command("ps")
def bench_ps(
    rows: Annotated[int, typer.Option(min=200_000, help="Keys in the store.")] = 10_000_000,
    update: Annotated[str, typer.Option(help="Update rule of the table of dim 1: sgd or ftrl.")] = "sgd",
    json: options.Json = False,
) -> None:
    """Measure push, pull and push_pull on a server of 10^7 rows: one server process, one client process.

    floor is a bare socket echo of the same bytes. Takes about half a minute.
    Example: paceline bench ps --json
    """
    from paceline.errors import UsageError
    from paceline.launch.bench_ps import bench_ps

    if update not in ("sgd", "ftrl"):
        raise UsageError(f"--update {update}: expected sgd or ftrl")
    if not json:
        typer.echo(
            f"{'work':9} {'keys':>7} {'dim':>4} {'update':8} "
            f"{'median µs':>10} {'p99 µs':>9} {'floor µs':>9} {'M keys/s':>9}"
        )
    for result in bench_ps(rows=rows, update=update, say=lambda text: typer.echo(text, err=True)):
        if json:
            typer.echo(json_module.dumps(dataclasses.asdict(result)))
        else:
            typer.echo(
                f"{result.work:9} {result.keys:7} {result.dim:4} {result.update:8} {result.median_us:10.1f} "
                f"{result.p99_us:9.1f} {result.floor_us:9.1f} {result.keys_per_s / 1e6:9.2f}"
            )
