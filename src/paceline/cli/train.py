"""``paceline train``."""

from __future__ import annotations

import json as json_module
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.errors import UsageError

from . import options
from .parameters import expand_flags, given_options
from .solver import choose_blocks, describe_end, write_plot
from .train_flags import TrainFlags

if TYPE_CHECKING:
    from paceline.training.options import TrainOptions
    from paceline.training.results import TrainResult


@expand_flags
def train(context: typer.Context, flags: TrainFlags) -> None:
    """Train a click model on parameter servers.

    The command starts a cluster on this machine, or uses a running cluster (--scheduler).

    Example: paceline train day1.tsv day2.tsv.gz --eval day3.tsv --servers 2 --workers 4 --save model
    """
    # Set this before NumPy is loaded, because OpenBLAS threads would busy-wait on the cores that servers and workers
    # need.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from paceline.observe.work import show_progress
    from paceline.training.driver import TrainOutput, run_training

    show_progress(not flags.output.quiet)
    cluster, connection, save = flags.cluster, flags.connection, flags.saving.save
    flags.filters.modules.load(flags.filters.filters, flags.filters.pull_filters)
    training = _choose_options(context, flags)
    settings = cluster.parse(
        heartbeat_timeout_s=connection.heartbeat_timeout or 10.0,
        default_consistency="bounded:4" if training.passes.blocks is None else "sequential",
    )
    with (
        flags.observe.open("paceline train") as collector,
        flags.timeline.open("paceline train", settings.num_workers),
    ):
        result = run_training(
            training,
            settings,
            memory_limit=cluster.memory.parse(),
            auto_resume=flags.saving.auto_resume,
            scheduler=connection.scheduler,
            token=None if connection.scheduler is None else options.find_token(connection.token_file),
            tls=connection.tls.given() if connection.scheduler is None else connection.tls.load(),
            output=TrainOutput(quiet=flags.output.quiet, progressive=flags.output.progressive, collector=collector),
            fork_server=context.obj,  # the fork server that main() has started, or None
        )
    if flags.solver.plot is not None:
        write_plot(flags.solver.plot, result.block_passes)
    if flags.output.json:
        typer.echo(json_module.dumps(result.as_json(), allow_nan=False))
    else:
        _print(result, save)


def _choose_options(context: typer.Context, flags: TrainFlags) -> TrainOptions:
    from paceline.training.options import TrainOptions

    blocks = choose_blocks(context, flags)
    weights = flags.weights.parse()
    if flags.reading.count_cells is not None and flags.reading.min_count is None:
        raise UsageError("--count-cells is for counted features. Pass --min-count too, or leave --count-cells out")
    if flags.saving.feature_names and flags.saving.save is None:
        raise UsageError("--feature-names saves names with the model. Pass --save MODEL too")
    plan = flags.saving.parse_snapshots()
    _check_cluster(flags, has_snapshots=plan is not None)
    return TrainOptions(
        data=flags.data,
        model=flags.parse_model(),
        evaluation=flags.evaluation or (),
        format=flags.reading.format,
        reading=replace(flags.reading.columns.parse(flags.reading.label), max_malformed=flags.output.max_malformed),
        numeric_scale=flags.reading.numeric_scale,
        epochs=flags.passes.epochs if blocks is None else 1,  # the block solver reads the data once
        batch_size=flags.passes.batch_size,
        update=flags.update.parse_rule(),
        adapt="widely" if flags.passes.tune else "yes",
        weights=weights,
        filters=flags.filters.parse(),
        passes=flags.passes.parse(flags.update.parse_rates(), blocks),
        save=flags.saving.save,
        feature_names=flags.saving.feature_names,
        cache=flags.saving.cache,
        strict=flags.output.strict,
        snapshots=plan,
        resume=flags.saving.resume,
        init_from=flags.saving.init_from,
    )


def _check_cluster(flags: TrainFlags, *, has_snapshots: bool) -> None:
    scheduler = flags.connection.scheduler
    if flags.saving.auto_resume and (not has_snapshots or scheduler is not None):
        raise UsageError("--auto-resume needs --snapshot-every and its own cluster. Leave --scheduler out")
    if scheduler is not None and flags.timeline.timeline is not None:
        raise UsageError("--timeline shows the processes that the training itself starts. Leave --scheduler out")
    given = given_options(flags.cluster)
    if flags.connection.heartbeat_timeout is not None:
        given.append("--heartbeat-timeout")
    if scheduler is not None and given:
        raise UsageError(
            f"{', '.join(given)}: the running cluster of --scheduler has its own settings. Pass them to 'paceline "
            "scheduler' or 'paceline server'"
        )
    if flags.connection.token_file is not None and scheduler is None:
        raise UsageError("--token-file is for a running cluster. Pass --scheduler too, or leave --token-file out")
    if flags.passes.tune and (flags.saving.resume or flags.saving.init_from or flags.update.update != "ftrl"):
        raise UsageError("--tune tries FTRL's rates for a new model. Leave --tune out")


def _print(result: TrainResult, save: Path | None) -> None:
    if result.block_passes:
        typer.echo(
            f"trained on {result.examples:,} examples in {result.seconds:.2f} s, {result.model.loss_name} "
            f"{result.train_loss:.4f}"
        )
        typer.echo(describe_end(list(result.block_passes)))
    else:
        typer.echo(
            f"trained on {result.examples:,} examples in {result.seconds:.2f} s ({result.examples_per_s:,.0f}/s), "
            f"{result.num_features:,} features, {result.model.loss_name} {result.train_loss:.4f}, "
            f"staleness {result.staleness['mean']:.2f} (at most {result.staleness['max']})"
            + (f", {result.staleness['dropped']} pushes dropped as too stale" if result.staleness["dropped"] else "")
        )
    found = result.evaluation
    if found is not None:
        typer.echo(f"evaluated on {found.examples:,} examples: {found.sentence()}")
    if save is not None:
        typer.echo(f"saved in {save}")
