"""``paceline train``."""

from __future__ import annotations

import json as json_module
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from . import options
from . import solver as solver_options
from .data_arguments import find_data

if TYPE_CHECKING:
    from paceline.launch.train.options import EarlyStopping, SnapshotPlan
    from paceline.launch.train.results import TrainResult
    from paceline.models.update import RuleChoice
    from paceline.ps import UpdateRule


def train(
    context: typer.Context,
    data: options.Data,
    evaluation: Annotated[
        list[str] | None,
        typer.Option(
            "--eval", callback=find_data, help="File to evaluate on after training; may be given several times."
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="lr: logistic regression; fm, ffm: (field-aware) factorization machine; deepfm, dcn: with a network "
            "over columns (PyTorch); regression: squared loss; poisson: counts; softmax: several classes."
        ),
    ] = "lr",
    dim: Annotated[
        int | None, typer.Option(help="fm, deepfm, dcn: factors of a feature (8); ffm: for each column (4).")
    ] = None,
    factor_lr: Annotated[
        float | None, typer.Option(help="Models with factors: learning rate of the factors; default: found by trial.")
    ] = None,
    factor_l1: Annotated[
        float | None, typer.Option(help="Models with factors: L1 penalty of the factors; default 0.")
    ] = None,
    factor_l2: Annotated[
        float | None, typer.Option(help="Models with factors: L2 penalty of the factors; default: found by trial.")
    ] = None,
    factor_min_count: Annotated[
        int | None,
        typer.Option(
            help="Models with factors: how often a feature must have occurred to have some; default: found by trial."
        ),
    ] = None,
    hidden: Annotated[
        str | None, typer.Option(help="deepfm, dcn: units of each hidden layer, as in 128,64; default 64,32.")
    ] = None,
    cross_layers: Annotated[int | None, typer.Option(help="dcn: layers that cross columns; default 2.")] = None,
    tower_lr: Annotated[
        float | None, typer.Option(help="deepfm, dcn: learning rate of the layers (Adam); default: found by trial.")
    ] = None,
    tower_l1: Annotated[float | None, typer.Option(help="deepfm, dcn: L1 penalty of the layers; default 0.")] = None,
    tower_l2: Annotated[
        float | None, typer.Option(help="deepfm, dcn: L2 penalty of the layers; default: found by trial.")
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option(help="softmax: how many classes (10: 0 to 9), or all as in 1,2,5; default: those in a sample."),
    ] = None,
    format: options.Format = None,
    label: options.Label = None,
    positive: options.Positive = None,
    categorical: options.Categorical = None,
    numeric: options.Numeric = None,
    text: options.Text = None,
    ignore: options.Ignore = None,
    header: options.Header = "auto",
    numeric_scale: options.NumericScale = "auto",
    interactions: Annotated[
        str | None,
        typer.Option(help="Columns whose values are features together: C1:C2,C3:*,C4:C5:C6; * is every column."),
    ] = None,
    min_count: Annotated[
        int | None, typer.Option(help="How often a feature must occur in the first pass to be learned; default 1.")
    ] = None,
    count_cells: Annotated[
        int | None, typer.Option(help="Cells of the sketch that counts features; default 2^24.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over the data; default: found by trial on a sample.")
    ] = None,
    order: Annotated[
        str | None,
        typer.Option(help="Order of the examples in all passes but the last: shuffle (default), or that of the file."),
    ] = None,
    validation: Annotated[
        list[str] | None,
        typer.Option(
            callback=find_data,
            help="File whose loss ends the training when it falls no more; the best pass's model is kept.",
        ),
    ] = None,
    patience: Annotated[
        int | None, typer.Option(help="Passes without progress on --validation before the end; default 2.")
    ] = None,
    min_delta: Annotated[
        float | None, typer.Option(help="By how much that loss must fall to be progress; default 0.")
    ] = None,
    expire_after: Annotated[
        int | None,
        typer.Option(help="After each pass, drop features that were not seen for so many passes (1 to 62)."),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Examples per minibatch of one worker; default: 8 to 256, by their number."),
    ] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Try a few learning rates and L1 penalties on a sample first.")
    ] = False,
    servers: Annotated[
        int | None, typer.Option(min=1, help="Server processes, which hold the parameters; default 1.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Worker processes, which read the data; default: cores less servers.")
    ] = None,
    consistency: Annotated[
        str | None,
        typer.Option(help="sequential (as one process, reproducible), bounded:N or eventual; default bounded:4."),
    ] = None,
    stale: Annotated[
        str | None, typer.Option(help="Stale gradients: accept (default), drop:N or compensate:STRENGTH.")
    ] = None,
    replicas: options.OptionalReplicas = None,
    min_replicas: options.OptionalMinReplicas = None,
    non_finite: options.NonFinite = None,
    memory_limit: options.MemoryLimitSize = None,
    spill_dir: options.SpillDir = None,
    update: Annotated[str, typer.Option(help="ftrl, sgd, momentum, adagrad, rmsprop, adam or adamw.")] = "ftrl",
    lr: Annotated[
        float | None, typer.Option(help="Learning rate (FTRL: alpha); default: by the data (FTRL), or by --update.")
    ] = None,
    beta: Annotated[float | None, typer.Option(help="FTRL's beta; default 1.")] = None,
    l1: Annotated[float | None, typer.Option(help="FTRL's L1 penalty; default 1.")] = None,
    l2: Annotated[float | None, typer.Option(help="L2 penalty (weight decay for rules other than ftrl).")] = None,
    schedule: Annotated[
        str,
        typer.Option(
            help="How the learning rate falls: constant, linear, cosine, inverse-sqrt, exponential[:FACTOR], "
            "step[:PASSES[:FACTOR]]; not for --update ftrl."
        ),
    ] = "constant",
    warmup: Annotated[
        float, typer.Option(help="Passes, or the part of the first, in which the learning rate rises from 0.")
    ] = 0.0,
    solver: solver_options.Solver = solver_options.MINIBATCHES,
    max_delay: solver_options.MaxDelay = None,
    block_ratio: solver_options.BlockRatio = None,
    tolerance: solver_options.Tolerance = None,
    plot: solver_options.Plot = None,
    weight: options.Weight = None,
    class_weight: Annotated[
        str | None,
        typer.Option(help="How often examples of a label count: 0:1,1:5; balanced: all labels as much together."),
    ] = None,
    keep_negatives: Annotated[
        float, typer.Option(help="Share of the negatives to train on; each then counts as often as makes up for it.")
    ] = 1.0,
    filters: Annotated[
        str | None,
        typer.Option(
            help="What pushes and pulls go behind: key-caching,quantize:8,compress for example; MODULE:CLASS is a "
            "filter of your own; none. Default: key-caching where servers are on other machines."
        ),
    ] = None,
    pull_filters: Annotated[
        str | None, typer.Option(help="What pulled values go behind; default: as --filters.")
    ] = None,
    filter_module: options.FilterModules = None,
    save: Annotated[Path | None, typer.Option(help="Directory to save the model in.")] = None,
    feature_names: Annotated[
        bool,
        typer.Option("--feature-names", help="Keep the names of features beside the model."),
    ] = False,
    cache: Annotated[
        Path | None, typer.Option(help="Directory to keep parsed data in, for later passes and later runs.")
    ] = None,
    snapshot_every: Annotated[
        str | None,
        typer.Option(help="Take snapshots of the cluster while it trains: every 30s, 5m, 1h, or so many examples."),
    ] = None,
    snapshot_dir: Annotated[
        Path | None,
        typer.Option(help="Directory for snapshots, which all servers share; default: --resume's, or SAVE-snapshots."),
    ] = None,
    snapshots: Annotated[int | None, typer.Option(min=1, help="Snapshots to keep; default 3.")] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Go on from the newest whole snapshot in this directory, with the same data."),
    ] = None,
    init_from: Annotated[
        Path | None,
        typer.Option(help="Train this model further: a directory that --save wrote, or one of snapshots."),
    ] = None,
    auto_resume: Annotated[
        bool, typer.Option("--auto-resume", help="If more servers die than replicas, go on from the newest snapshot.")
    ] = False,
    max_malformed: Annotated[
        float, typer.Option(help="Share of malformed lines beyond which the training fails, if there are more than 10.")
    ] = 0.05,
    strict: options.Strict = False,
    json: options.Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress line.")] = False,
    progressive: Annotated[
        bool,
        typer.Option("--progressive", help="Print the losses before learning (first pass), at doubling rows."),
    ] = False,
    heartbeat_timeout: options.OptionalHeartbeatTimeout = None,
    scheduler: options.Scheduler = None,
    token_file: options.TokenFile = None,
    tls_cert: options.TLSCert = None,
    tls_key: options.TLSKey = None,
    tls_ca: options.TLSCa = None,
) -> None:
    """Train a click model on parameter servers: processes of this machine, or (--scheduler) a cluster that runs.

    Example: paceline train day1.tsv day2.tsv.gz --eval day3.tsv --servers 2 --workers 4 --save model
    """
    from paceline.environment import num_cores
    from paceline.errors import UsageError
    from paceline.filters.modules import import_filter_modules, modules_named_in
    from paceline.launch.train.options import ExampleWeights, PassOptions, TrafficFilters, TrainOptions
    from paceline.launch.train.training_run import run_training
    from paceline.models.deep.layers import parse_hidden
    from paceline.models.features.interactions import Interactions
    from paceline.models.registry import make_model
    from paceline.models.schedules import RatePlan, parse_schedule
    from paceline.models.softmax import parse_classes
    from paceline.models.weighting import parse_class_weights
    from paceline.protocol import parse_consistency, parse_stale_policy
    from paceline.tables.memory.limit import MemoryLimit

    import_filter_modules([*(filter_module or ()), *modules_named_in(f"{filters or ''},{pull_filters or ''}")])
    own_cluster = {
        "--servers": servers,
        "--workers": workers,
        "--consistency": consistency,
        "--stale": stale,
        "--replicas": replicas,
        "--min-replicas": min_replicas,
        "--non-finite": non_finite,
        "--memory-limit": memory_limit,
        "--spill-dir": spill_dir,
        "--heartbeat-timeout": heartbeat_timeout,
    }
    blocks = solver_options.choose_blocks(
        context,
        solver,
        model=model,
        consistency=consistency,
        filters=filters or "",
        epochs=epochs,
        l1=l1,
        l2=l2,
        max_delay=max_delay,
        block_ratio=block_ratio,
        tolerance=tolerance,
        plot=plot,
    )
    class_weights = None if class_weight is None else parse_class_weights(class_weight)
    if count_cells is not None and min_count is None:
        raise UsageError("--count-cells is for features that are counted: give --min-count too, or leave it out")
    if feature_names and save is None:
        raise UsageError("--feature-names keeps names beside the model: say where with --save MODEL")
    for name, value in (("--snapshot-dir", snapshot_dir), ("--snapshots", snapshots)):
        if value is not None and snapshot_every is None:
            raise UsageError(f"{name} is for snapshots: say when with --snapshot-every, or leave {name} out")
    plan = _plan_snapshots(snapshot_every, snapshot_dir or resume, snapshots or 3, save)
    if auto_resume and (plan is None or scheduler is not None):
        raise UsageError("--auto-resume needs --snapshot-every, and processes of its own (no --scheduler)")
    given = [name for name, value in own_cluster.items() if value is not None]
    if scheduler is not None and given:
        raise UsageError(
            f"{', '.join(given)}: the cluster of --scheduler has its own; give it to 'paceline scheduler' or 'paceline "
            "server'"
        )
    if token_file is not None and scheduler is None:
        raise UsageError("--token-file is for a cluster that runs already: name it with --scheduler, or leave it out")
    if tune and (resume or init_from or update != "ftrl"):
        raise UsageError("--tune tries rates of FTRL for a model that begins anew: leave it out")
    servers = servers or 1
    result = run_training(
        TrainOptions(
            data=data,
            model=make_model(
                model,
                dim=dim,
                factor_lr=factor_lr,
                factor_l1=factor_l1,
                factor_l2=factor_l2,
                factor_min_count=factor_min_count,
                positive=options.find_positive(positive),
                hidden=None if hidden is None else parse_hidden(hidden),
                cross_layers=cross_layers,
                tower_lr=tower_lr,
                tower_l1=tower_l1,
                tower_l2=tower_l2,
                classes=None if classes is None else parse_classes(classes),
                min_count=min_count,
                count_cells=count_cells,
                interactions=None if interactions is None else Interactions(text=interactions),
            ),
            evaluation=evaluation or (),
            format=format,
            reading=replace(
                options.choose_reading(label, categorical, numeric, text, ignore, header), max_malformed=max_malformed
            ),
            numeric_scale=numeric_scale,
            epochs=epochs if blocks is None else 1,  # the data is read once
            batch_size=batch_size,
            update=_choose_update(update, lr=lr, l1=l1, l2=l2, beta=beta),
            adapt="widely" if tune else "yes",
            weights=ExampleWeights(column=weight, classes=class_weights, keep_negatives=keep_negatives),
            filters=TrafficFilters(pushed=filters, pulled=pull_filters),
            passes=PassOptions(
                order=cast("Literal['shuffle', 'file'] | None", order),
                stopping=_choose_stopping(validation, patience, min_delta),
                rates=RatePlan(schedule=parse_schedule(schedule), warmup=warmup),
                blocks=blocks,
                expire_after=expire_after,
            ),
            save=save,
            feature_names=feature_names,
            cache=cache,
            strict=strict,
            snapshots=plan,
            resume=resume,
            init_from=init_from,
        ),
        servers=servers,
        workers=workers or max(num_cores() - servers, 1),
        consistency=parse_consistency(consistency or ("bounded:4" if blocks is None else "sequential")),
        stale=parse_stale_policy(stale or "accept"),
        replicas=replicas or 0,
        min_replicas=min_replicas or 0,
        non_finite=non_finite or "refuse",
        memory_limit=MemoryLimit.parse(memory_limit, spill_dir),
        auto_resume=auto_resume,
        scheduler=scheduler,
        token=None if scheduler is None else options.find_token(token_file),
        tls=options.find_tls(tls_cert, tls_key, tls_ca),
        quiet=quiet,
        progressive=progressive,
        heartbeat_timeout_s=heartbeat_timeout or 10.0,
        fork_server=context.obj,  # which main() has started
    )
    if plot is not None:
        solver_options.write_plot(plot, list(result.block_passes))
    if json:
        typer.echo(json_module.dumps(result.as_json(), allow_nan=False))
    else:
        _print(result, save)


def _choose_update(
    name: str, *, lr: float | None, l1: float | None, l2: float | None, beta: float | None
) -> UpdateRule | RuleChoice:
    """Return the update rule; of FTRL, what makes it from the rate and the penalties that suit the data."""
    from paceline.models.update import UPDATE_NAMES, make_update

    rule = make_update(name, lr=lr, l1=l1, l2=l2, beta=beta)
    if name != UPDATE_NAMES[0]:
        return rule
    return lambda suited_lr, suited_l1, suited_l2: make_update(
        name,
        lr=suited_lr if lr is None else lr,
        l1=suited_l1 if l1 is None else l1,
        l2=suited_l2 if l2 is None else l2,
        beta=beta,
    )


def _choose_stopping(
    validation: list[str] | None, patience: int | None, min_delta: float | None
) -> EarlyStopping | None:
    from paceline.errors import UsageError
    from paceline.launch.train.options import EarlyStopping

    if validation is None:
        for name, value in (("--patience", patience), ("--min-delta", min_delta)):
            if value is not None:
                raise UsageError(f"{name} is for a validation file: give one with --validation, or leave {name} out")
        return None
    return EarlyStopping(
        validation=validation, patience=2 if patience is None else patience, min_delta=min_delta or 0.0
    )


def _plan_snapshots(every: str | None, directory: Path | None, keep: int, save: Path | None) -> SnapshotPlan | None:
    from paceline.errors import UsageError
    from paceline.launch.train.options import SnapshotPlan
    from paceline.launch.train.snapshots import parse_every

    if every is None:
        return None
    seconds, examples = parse_every(every)
    if directory is None:
        if save is None:
            raise UsageError("--snapshot-every: where? give --snapshot-dir DIR, or --save MODEL for MODEL-snapshots")
        directory = save.with_name(f"{save.name}-snapshots")
    return SnapshotPlan(directory=directory, seconds=seconds, examples=examples, keep=keep)


def _print(result: TrainResult, save: Path | None) -> None:
    if result.block_passes:
        typer.echo(
            f"trained on {result.examples:,} examples in {result.seconds:.2f} s, {result.model.loss_name} "
            f"{result.train_loss:.4f}"
        )
        typer.echo(solver_options.describe_end(list(result.block_passes)))
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
