"""Print the stacks of the processes of a running job: ``paceline stacks``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.environment import environment, naming
from paceline.errors import UsageError
from paceline.launch.flags import TLSFlags

from . import options
from .parameters import expand_flags

_MOST_COMMAND = 60


@expand_flags
def stacks(
    *,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[PID|HOST:PORT]",
            help="Id of a process of the job, or address of its scheduler or coordinator. A job without both has the "
            "address of node 0 with the port after --master-port. Default: all your jobs on this machine.",
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
    token_file: options.TokenFile = None,
    tls: TLSFlags,
) -> None:
    """Print the Python stack of each rank and server of a running job, grouped by equal stacks.

    Each group also has the operation in which its processes wait. With an address and the job's token, the command
    shows the processes of all machines, otherwise the processes of this machine.

    Example: paceline stacks

    Example: paceline stacks node0:7337 --token-file token
    """
    from paceline.observe.stuck.jobs import find_jobs
    from paceline.observe.stuck.report import format_stacks
    from paceline.observe.stuck.stacks import collect
    from paceline.observe.stuck.torch_files import check_directory, write_torch_files

    if target is not None and not target.isdecimal() and (token_file is not None or environment().token):
        if flight_recorder is not None:
            raise UsageError(
                f"--flight-recorder {flight_recorder}: the files are on the machines of the ranks. Run the command "
                "there with the id of a process"
            )
        _print_everywhere(target, token_file, tls, is_full=full)
        return
    jobs = find_jobs(target)
    if flight_recorder is not None:
        check_directory(flight_recorder)
        if len(jobs) > 1:
            raise UsageError(f"--flight-recorder {flight_recorder}: several jobs run. Pass the id of a process too")
    for number, job in enumerate(jobs):
        states = collect(job.folders)
        command = job.info.command
        shown = command if len(command) <= _MOST_COMMAND else f"{command[:_MOST_COMMAND]}..."
        typer.echo(
            f"{chr(10) if number else ''}job of process {job.info.launcher.pid}, {len(states)} processes: {shown}"
        )
        if states:
            typer.echo("\n" + format_stacks(states, is_full=full))
        if flight_recorder is not None:
            written = write_torch_files(job.folders, flight_recorder)
            typer.echo(f"\nwrote the last collectives of {len(written)} ranks to {flight_recorder}")


def _print_everywhere(target: str, token_file: Path | None, tls: TLSFlags, *, is_full: bool) -> None:
    from paceline.errors import printable
    from paceline.launch.job_agent import JobAddress, collect_everywhere
    from paceline.observe.stuck.report import format_stacks
    from paceline.transport import Address

    with naming("the address of the job"):
        address = Address.parse(target)
    states, missing = collect_everywhere(JobAddress(address, options.find_token(token_file), tls.load()))
    typer.echo(f"job at {address.netloc}, {len(states)} processes\n")
    for line in format_stacks(states, is_full=is_full).split("\n"):
        typer.echo(printable(line))
    for name in missing:
        shown = printable(name)
        typer.echo(f"paceline: no answer from the launcher on {shown}. It was killed, or is unreachable", err=True)
