"""A training as a person runs it: the cluster, the progress line on standard error, warnings as they come."""

from __future__ import annotations

import time

from rich.console import Console

from ..data import open_dataset
from ..observe import RateMeter, Snapshot, TrainingProgress
from ..protocol import Consistency, StalePolicy
from ..ps import Client, messages
from ..transport import TLS, SocketTransport
from .local import LocalCluster
from .train import Progress, Training, TrainOptions, TrainResult, summarize_staleness

_STALENESS_EVERY_S = 0.5


def run_training(
    options: TrainOptions,
    *,
    servers: int,
    workers: int,
    consistency: Consistency,
    stale: StalePolicy,
    scheduler: str | None = None,
    token: str | None = None,
    tls: TLS | None = None,
    quiet: bool = False,
) -> TrainResult:
    """Train with a progress line; on the cluster of `scheduler`, or on processes that live as long as this call."""
    console = Console(stderr=True)
    # What is wrong with the files is said before anything starts.
    open_dataset(options.data, options.format, options.columns).close()
    if options.evaluation:
        open_dataset(options.evaluation, options.format, options.columns).close()
    if scheduler is not None:
        assert token is not None
        with Client(SocketTransport(token, tls=tls), scheduler, observer=True) as client:
            settings = client.link.call(messages.GetSettings(), messages.Settings)
            return _train(options, client, None, settings.num_workers, console, quiet)
    with LocalCluster(
        servers=servers,
        workers=workers,
        consistency=consistency,
        stale=stale,
        tls=tls,
        on_compile=lambda text: console.print(text, highlight=False),
    ) as cluster:
        for rank in range(workers):
            cluster.start_worker(rank)
        with cluster.connect(observer=True) as client:
            cluster.wait_workers(client, workers)
            return _train(options, client, cluster, workers, console, quiet)


def _train(
    options: TrainOptions,
    client: Client,
    cluster: LocalCluster | None,
    workers: int,
    console: Console,
    quiet: bool,
) -> TrainResult:
    meters = RateMeter(), RateMeter()
    staleness: dict[str, float] = {}
    looked = 0.0

    with TrainingProgress(console, None, not quiet) as line:

        def show(progress: Progress) -> None:
            nonlocal staleness, looked
            now = time.monotonic()
            meters[0].add(now, progress.examples)
            meters[1].add(now, progress.num_bytes)
            if progress.task == "train" and now - looked > _STALENESS_EVERY_S:
                looked = now
                tables = [table for server in client.statistics() for table in server.tables.values()]
                staleness = summarize_staleness([table.staleness for table in tables]) if tables else {}
            line.update(
                Snapshot(
                    examples=progress.examples,
                    examples_per_s=meters[0].per_s,
                    done_fraction=progress.done / progress.total if progress.total else None,
                    log_loss=progress.loss / progress.examples if progress.examples and progress.loss else None,
                    staleness_mean=staleness.get("mean"),
                    staleness_max=int(staleness["max"]) if staleness else None,
                    bytes_per_s=meters[1].per_s,
                    workers=progress.num_workers,
                    epoch=None if progress.task == "train" else "evaluating",
                )
            )

        return Training(
            options,
            client,
            num_workers=workers,
            processes=cluster,
            on_progress=show,
            warn=lambda text: console.print(f"paceline: {text}", highlight=False, markup=False, soft_wrap=True),
        ).run()
