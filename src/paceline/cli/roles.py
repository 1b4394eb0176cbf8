"""``paceline scheduler | server | worker | coordinator``: run one process of a cluster, or of an elastic training."""

from __future__ import annotations

import atexit
import contextlib
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.command_options import option
from paceline.launch.flags import (
    COORDINATOR_PORT,
    SCHEDULER_PORT,
    FilterModuleFlags,
    MemoryFlags,
    ObserveFlags,
    PushFlags,
    TLSFlags,
)
from paceline.strategies import ElasticFlags

from . import options
from .parameters import expand_flags

if TYPE_CHECKING:
    from paceline.launch import Joining
    from paceline.observe.collector import Collector
    from paceline.ps.messages import ClusterSettings
    from paceline.transport import TLS, Endpoint

Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all addresses of this machine.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for a free port.")]
Wait = Annotated[float, typer.Option(min=0, help="Seconds to wait until the scheduler answers.")]
_WAIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class ClusterFlags:
    """The settings of a scheduler's cluster."""

    servers: int = option("Number of servers.", default=1, min=1)
    workers: int = option("Number of workers that the first iteration waits for.", default=1, min=1)
    consistency: str = option("sequential, bounded:N or eventual.", default="bounded:4")
    stale: str = option("Stale gradients: accept, drop:N or compensate:STRENGTH.", default="accept")
    replicas: int = option(
        "Additional copies of every row: the number of servers that may die without loss.", default=0, min=0
    )
    pushes: PushFlags
    heartbeat_timeout: float = option(
        "Seconds without a heartbeat before a process is declared dead.", default=10.0, min=0.5
    )

    def parse(self) -> ClusterSettings:
        return self.pushes.make_settings(
            num_servers=self.servers,
            num_workers=self.workers,
            consistency=self.consistency,
            stale=self.stale,
            replicas=self.replicas,
            heartbeat_timeout_s=self.heartbeat_timeout,
        )


@expand_flags
def scheduler(
    *,
    cluster: ClusterFlags,
    host: Host = "127.0.0.1",
    port: Port = SCHEDULER_PORT,
    replaces: Annotated[
        bool,
        typer.Option("--replaces", help="Wait for the previous cluster's members before starting a new cluster."),
    ] = False,
    accept_minority: Annotated[
        bool,
        typer.Option(
            "--accept-minority",
            help="Take over a cluster although most of its servers are missing; declare them dead.",
        ),
    ] = False,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the cluster's token; created (mode 0600) if it is missing.")
    ] = None,
    observe: ObserveFlags,
    tls: TLSFlags,
) -> None:
    """Run a cluster's scheduler. Start it before the other processes; Ctrl-C ends the cluster.

    Example: paceline scheduler --servers 2 --workers 2 --token-file token
    """
    from paceline.launch import Joining, run_scheduler

    settings, token, security = cluster.parse(), options.find_token(token_file, create=True), tls.load()
    with observe.open("paceline scheduler") as collector, contextlib.ExitStack() as stack:
        note = _note
        if collector is not None:
            from paceline.launch import prepare_kernels

            prepare_kernels()  # for the client that reads the statistics; before members connect
            note = functools.partial(_note_event, collector)

        def report_ready(endpoint: Endpoint) -> None:
            _watch("scheduler", Joining(scheduler=str(endpoint.tcp), token=token, tls=security), collector)
            typer.echo(f"paceline scheduler: listening on {endpoint}")
            if collector is not None:
                from paceline.launch.cluster_metrics import ClusterMetrics
                from paceline.transport import SocketTransport

                transport = SocketTransport(token, tls=security)
                stack.enter_context(ClusterMetrics.start(transport, endpoint.tcp, collector))

        run_scheduler(
            settings,
            token=token,
            address=_address(host, port),
            tls=security,
            on_ready=report_ready,
            on_note=note,
            on_loss=note,
            replaces=replaces or accept_minority,
            accepts_minority=accept_minority,
        )


@expand_flags
def server(
    *,
    scheduler: options.Scheduler = None,
    token_file: options.TokenFile = None,
    host: Host = "127.0.0.1",
    port: Port = 0,
    rank: Annotated[int | None, typer.Option(min=0, help="This server's rank; default: the next free rank.")] = None,
    join: Annotated[bool, typer.Option("--join", help="Join a running cluster that has all its servers.")] = False,
    memory: MemoryFlags,
    wait: Wait = _WAIT_S,
    filter_modules: FilterModuleFlags,
    tls: TLSFlags,
) -> None:
    """Run a parameter server until the cluster ends.

    Ctrl-C or SIGTERM moves the server's rows to other servers and then ends the server; a second signal ends it at
    once.

    Example: paceline server --scheduler 127.0.0.1:7337 --token-file token
    """
    from paceline.launch import run_server

    filter_modules.load()
    limit = memory.parse()
    if limit is not None and limit.warning is not None:
        typer.echo(f"paceline server: {limit.warning}", err=True)
    joining = _prepare_to_join("server", scheduler, token_file, tls.load(), wait)

    def on_ready(own: int, endpoint: Endpoint) -> None:
        _watch(f"server {own}", joining)
        typer.echo(f"paceline server {own}: listening on {endpoint}")

    run_server(
        joining,
        address=_address(host, port),
        rank=rank,
        extra=join,
        memory_limit=limit,
        on_ready=on_ready,
        on_leaving=lambda: typer.echo(
            "paceline server: moving rows to other servers before the end; Ctrl-C or SIGTERM again ends it immediately"
        ),
    )


@expand_flags
def worker(
    *,
    scheduler: options.Scheduler = None,
    token_file: options.TokenFile = None,
    rank: Annotated[int | None, typer.Option(min=0, help="This worker's rank; default: the next free rank.")] = None,
    wait: Wait = _WAIT_S,
    filter_modules: FilterModuleFlags,
    tls: TLSFlags,
) -> None:
    """Run a worker for training jobs until the cluster ends.

    The jobs come from 'paceline train --scheduler …'.

    Example: paceline worker --scheduler 127.0.0.1:7337 --token-file token
    """
    from paceline.training.worker.worker import run_worker

    filter_modules.load()
    joining = _prepare_to_join("worker", scheduler, token_file, tls.load(), wait)

    def on_ready(own: int) -> None:
        _watch(f"worker {own}", joining, sends_metrics=True)
        typer.echo(f"paceline worker {own}: joined the cluster at {joining.scheduler}")

    run_worker(
        joining.transport(),
        joining.scheduler,
        rank=rank,
        on_ready=on_ready,
    )


@expand_flags
def coordinator(
    *,
    elastic: ElasticFlags,
    max_ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Start with this many ranks, and accept no more. Default: start with --min-ranks, without a limit.",
        ),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = COORDINATOR_PORT,
    wait: Annotated[
        float,
        typer.Option(
            min=0, help="Seconds to wait for --max-ranks ranks after the first rank. Then --min-ranks suffice."
        ),
    ] = 300.0,
    heartbeat_timeout: Annotated[
        float, typer.Option(min=0.5, help="Seconds without a message before a rank is declared lost.")
    ] = 30.0,
    tls: TLSFlags,
) -> None:
    """Coordinate an elastic training whose ranks start without paceline run, until it ends.

    The ranks find the coordinator by the variable PACELINE_COORDINATOR.

    Example: paceline coordinator --min-ranks 1 --max-ranks 4 --host 0.0.0.0
    """
    from paceline.launch import run_coordinator

    run_coordinator(
        elastic,
        max_ranks=max_ranks,
        address=_address(host, port),
        tls=tls.load(),
        start_timeout_s=wait,
        timeout_s=heartbeat_timeout,
        on_ready=lambda place: typer.echo(f"paceline coordinator: ready for PACELINE_COORDINATOR={place.netloc}"),
        on_note=lambda text: typer.echo(f"paceline coordinator: {text}", err=True),
    )


def _watch(name: str, joining: Joining, collector: Collector | None = None, *, sends_metrics: bool = False) -> None:
    """Let ``paceline stacks`` find this process, also from other machines.

    A scheduler adds the metrics of other processes to its `collector`. With `sends_metrics`, this process sends its own
    metrics to such a scheduler.
    """
    from paceline.launch.job_agent import JobAddress, JobAgent, wants_metrics
    from paceline.observe.stuck.jobs import start_job
    from paceline.observe.stuck.processes import watch
    from paceline.transport import Address

    address = JobAddress(Address.parse(joining.scheduler), joining.token, joining.tls)
    collects_all = collector is not None
    if sends_metrics and wants_metrics(address):
        from paceline.observe.collector import Collector

        collector = Collector()
        collector.start()
        atexit.register(collector.close)
    job = start_job(joining.scheduler)
    if job is not None:
        watch(name, job.folder)
        agent = JobAgent(address, job.folder, collector=collector, collects_all=collects_all)
        atexit.register(agent.close)


def _note(text: str) -> None:
    typer.echo(f"paceline scheduler: {text}", err=True)


def _note_event(collector: Collector, text: str) -> None:
    collector.add_event(text)
    _note(text)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _prepare_to_join(
    role: str, scheduler: str | None, token_file: Path | None, tls: TLS | None, wait_s: float
) -> Joining:
    """Find the cluster named by the options, load the kernels, and wait until a scheduler answers."""
    from paceline.launch import Joining, load_kernels, prepare_kernels

    joining = Joining(scheduler=options.find_scheduler(scheduler), token=options.find_token(token_file), tls=tls)
    prepare_kernels()
    load_kernels()
    waiting = f"paceline {role}: waiting for the scheduler at {joining.scheduler}, at most {wait_s:g} s"
    joining.wait_scheduler(wait_s, lambda: typer.echo(waiting, err=True))
    return joining
