"""A training as a person runs it: the cluster, the progress line on standard error, warnings as they come."""

from __future__ import annotations

import time
from collections import deque

from rich.console import Console

from paceline.observe import RateMeter, Snapshot, TrainingProgress
from paceline.protocol import Consistency, StalePolicy
from paceline.ps import Client, messages
from paceline.transport import TLS, SocketTransport

from .local import LocalCluster
from .train import Progress, Training, TrainOptions, TrainResult, check_files, summarize_staleness

_STALENESS_EVERY_S = 0.5
_LOSS_EXAMPLES = 50_000


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
    heartbeat_timeout_s: float = 10.0,
) -> TrainResult:
    """Train with a progress line; on the cluster of `scheduler`, or on processes that live as long as this call."""
    console = Console(stderr=True)
    check_files(options)
    if scheduler is not None:
        assert token is not None
        with Client(SocketTransport(token, tls=tls), scheduler, observer=True) as client:
            settings = client.link.call(messages.GetSettings(), messages.Settings)
            return _train(options, client, None, settings.num_workers, console, quiet)
    with (
        LocalCluster(
            servers=servers,
            workers=workers,
            consistency=consistency,
            stale=stale,
            tls=tls,
            heartbeat_timeout_s=heartbeat_timeout_s,
            on_compile=lambda text: console.print(text, highlight=False),
            start_workers=True,
        ) as cluster,
        cluster.connect(observer=True) as client,
    ):
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
    running = _RunningLoss()
    staleness: dict[str, float] = {}
    looked = 0.0

    with TrainingProgress(console, None, not quiet) as line:

        def show(progress: Progress) -> None:
            nonlocal staleness, looked
            now = time.monotonic()
            meters[0].add(now, progress.examples)
            meters[1].add(now, progress.num_bytes)
            training = progress.task == "train"
            if training and now - looked > _STALENESS_EVERY_S:
                looked = now
                tables = [table for server in client.statistics() for table in server.tables.values()]
                staleness = summarize_staleness([table.staleness for table in tables]) if tables else {}
            if not progress.examples:
                return
            line.update(
                Snapshot(
                    examples=progress.examples,
                    examples_per_s=meters[0].per_s,
                    done_fraction=progress.fraction,
                    log_loss=running.add(progress.examples, progress.loss) if training else None,
                    staleness_mean=staleness.get("mean") if training else None,
                    staleness_max=int(staleness["max"]) if staleness else None,
                    bytes_per_s=meters[1].per_s,
                    workers=progress.num_workers,
                    epoch=f"{progress.epoch}/{options.epochs}" if training and progress.epoch else None,
                    phase=None if training else "evaluating",
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


class _RunningLoss:
    """The mean loss of the last examples: of the newest report that covers enough of them."""

    def __init__(self) -> None:
        self._reports: deque[tuple[int, float]] = deque([(0, 0.0)])

    def add(self, examples: int, loss: float) -> float | None:
        """Take the sums so far; return the mean over the last so many thousand examples."""
        reports = self._reports
        if examples < reports[-1][0]:  # a worker died, and what it had not finished counts no more
            reports.clear()
        if not reports or examples > reports[-1][0]:
            reports.append((examples, loss))
        while len(reports) > 2 and examples - reports[1][0] >= _LOSS_EXAMPLES:
            reports.popleft()
        (first, first_loss), (last, last_loss) = reports[0], reports[-1]
        return (last_loss - first_loss) / (last - first) if last > first else None
