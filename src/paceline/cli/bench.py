"""Examine this machine: ``paceline doctor`` and ``paceline bench``."""

from __future__ import annotations

import dataclasses
import json as json_module
from functools import partial
from typing import Annotated

import typer

from . import options


def doctor(json: options.Json = False) -> None:
    """Report problems of this machine and their remedies.

    The exit status is 1 after a failed check.

    Example: paceline doctor
    """
    from paceline.launch.doctor import examine

    failed = False
    for finding in examine():
        failed |= finding.status == "fail"
        if json:
            typer.echo(json_module.dumps(dataclasses.asdict(finding)))
        else:
            advice = f": {finding.advice}" if finding.advice else ""
            typer.echo(f"{finding.status:5} {finding.what:22} {finding.found}{advice}")
    raise typer.Exit(1 if failed else 0)


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
    """Measure push, pull and push_pull on a server of 10^7 rows.

    There is one server process and one client process. floor is the time of a socket echo of the same bytes, for
    comparison. Takes about half a minute.
    Example: paceline bench ps --json
    """
    from paceline.bench.ps import bench_ps
    from paceline.errors import UsageError

    if update not in ("sgd", "ftrl"):
        raise UsageError(f"--update {update}: expected sgd or ftrl")
    if not json:
        typer.echo(
            f"{'work':9} {'keys':>7} {'dim':>4} {'update':8} "
            f"{'median µs':>10} {'p99 µs':>9} {'floor µs':>9} {'M keys/s':>9}"
        )
    for result in bench_ps(rows=rows, update=update, show=lambda text: typer.echo(text, err=True)):
        if json:
            typer.echo(json_module.dumps(dataclasses.asdict(result)))
        else:
            typer.echo(
                f"{result.work:9} {result.keys:7} {result.dim:4} {result.update:8} {result.median_us:10.1f} "
                f"{result.p99_us:9.1f} {result.floor_us:9.1f} {result.keys_per_s / 1e6:9.2f}"
            )


@app.command("collectives")
def bench_collectives(
    op: Annotated[
        str, typer.Option(help="all_reduce, broadcast, all_gather, reduce_scatter, all_to_all or barrier.")
    ] = "all_reduce",
    ranks: Annotated[int, typer.Option(min=2, help="Number of processes.")] = 2,
    sizes: Annotated[
        str | None, typer.Option(help="Sizes in bytes (K = 1024); default 4,1K,16K,64K,256K,1M,4M,16M,100M.")
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="Compare only with this library: gloo, mpi, or paceline for no comparison.")
    ] = None,
    algorithm: Annotated[str | None, typer.Option(help="Algorithm to measure instead of the tuner's choice.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, float64, int32 or int64.")] = "float32",
    json: options.Json = False,
) -> None:
    """Measure a collective operation by size.

    Gloo and Open MPI are measured in the same run if they are installed.
    Takes less than a minute.
    Example: paceline bench collectives --op all_reduce --ranks 4 --sizes 4,16K,1M --peer gloo
    """
    from paceline.bench import collectives as bench
    from paceline.observe.work import start_work

    peers, absent = bench.choose_peers(peer)
    plan = bench.BenchPlan(
        op=op,
        ranks=ranks,
        sizes=bench.plan_sizes(sizes, op=op, ranks=ranks, dtype=dtype),
        peers=peers,
        algorithm=algorithm,
        dtype=dtype,
    )
    disturbance, header = bench.OtherLoad(), [bench.format_header(peers[1:])]
    with start_work("starting", len(plan.sizes) + 1, in_background=False) as progress:
        for measured in bench.bench_collectives(plan, show=progress.show, on_absent=absent.__setitem__):
            if json:
                lines = [json_module.dumps(result.as_json()) for result in measured]
            else:
                lines, header = [*header, bench.format_row(measured, peers[1:])], []
            progress.write_above(partial(typer.echo, "\n".join(lines)))
    if not json:
        typer.echo("\n" + bench.format_footer(plan, disturbance.share()))
    for name, why in absent.items():
        typer.echo(bench.format_absent(name, why), err=json)
