"""``paceline stacks``: print where the processes of a running job are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_MOST_COMMAND = 60


def stacks(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[PID|HOST:PORT]",
            help="A process of the job, or the address of its scheduler. Default: all your jobs on this machine.",
            show_default=False,
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Print all threads of each process, with the calls inside libraries.")
    ] = False,
    flight_recorder: Annotated[
        Path | None,
        typer.Option(
            help="Also write the last collectives of each rank to this folder, for torch.distributed.flight_recorder."
        ),
    ] = None,
) -> None:
    """Print the Python stack of each rank and server of a running job, grouped by equal stacks.

    Each group also has the operation in which its processes wait. The processes of other machines are not shown:
    run the command there too.

    Example: paceline stacks
    """
    from paceline.observe.stuck.jobs import find_jobs
    from paceline.observe.stuck.report import format_stacks
    from paceline.observe.stuck.stacks import collect
    from paceline.observe.stuck.torch_files import check_directory, write_torch_files

    jobs = find_jobs(target)
    if flight_recorder is not None:
        check_directory(flight_recorder)
        if len(jobs) > 1:
            raise typer.BadParameter("several jobs run. Pass the id of a process too", param_hint="--flight-recorder")
    for number, job in enumerate(jobs):
        states = collect(job.folders)
        command = job.info.command
        shown = command if len(command) <= _MOST_COMMAND else f"{command[:_MOST_COMMAND]}..."
        typer.echo(
            f"{chr(10) if number else ''}job of process {job.info.launcher.pid}, {len(states)} processes: {shown}"
        )
        typer.echo("\n" + format_stacks(states, is_full=full))
        if flight_recorder is not None:
            written = write_torch_files(job.folders, flight_recorder)
            typer.echo(f"\nwrote the last collectives of {len(written)} ranks to {flight_recorder}")
