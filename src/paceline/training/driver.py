"""One training: plan, wait for the workers, run; on a given cluster or on processes of this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.data.example_sampling import ExampleSample
from paceline.launch.local import LocalCluster
from paceline.protocol import Consistency, Eventual
from paceline.ps import Client, messages
from paceline.training.files.data_files import settle_files
from paceline.training.options import TrainOptions
from paceline.training.plan import TrainingPlan
from paceline.training.planning import plan_training
from paceline.training.results import TrainingState, TrainResult
from paceline.training.train import Training


def train_on(
    options: TrainOptions,
    client: Client,
    *,
    examples: ExampleSample | None = None,
    processes: LocalCluster | None = None,
    on_plan: Callable[[TrainingPlan], Callable[[TrainingState], None]] = lambda plan: lambda progress: None,
    on_news: Callable[[str], None] = lambda text: None,
    warn: Callable[[str], None] = lambda text: None,
) -> TrainResult:
    """Plan a training, wait for the workers of `processes`, and run it; `options` are those of `settle_files`.

    `examples` are those of the look at the files; None reads some. `on_plan` receives the plan and returns the function
    that receives the progress.
    """
    plan = plan_training(options, warn, examples)  # while workers start
    on_progress = on_plan(plan)
    num_workers = client.settings.num_workers
    if processes is not None:
        processes.wait_workers(client, num_workers)
    training = Training(
        options,
        plan,
        client,
        num_workers=num_workers,
        processes=processes,
        on_progress=on_progress,
        on_news=on_news,
        warn=warn,
    )
    return training.run()


def train_locally(
    options: TrainOptions,
    *,
    servers: int = 1,
    workers: int = 1,
    consistency: Consistency | None = None,
    warn: Callable[[str], None] = lambda text: None,
    **cluster_options: Any,
) -> TrainResult:
    """Train on processes of this machine that live as long as the training. Further arguments as LocalCluster."""
    options, look = settle_files(options)  # errors in the options or files are raised before anything starts
    settings = messages.ClusterSettings(
        num_servers=servers, num_workers=workers, consistency=str(Eventual() if consistency is None else consistency)
    )
    with (
        LocalCluster.start(
            settings, start_workers=True, filter_modules=options.filters.own_modules, **cluster_options
        ) as cluster,
        cluster.connect(observer=True) as client,
    ):
        return train_on(options, client, examples=look.examples, processes=cluster, warn=warn)
