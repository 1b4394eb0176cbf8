"""Create the strategy that the launcher chose."""

from __future__ import annotations

import atexit
import importlib
import inspect
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.environment import Environment, environment
from paceline.errors import UsageError
from paceline.meeting.rendezvous import find_rank
from paceline.strategies import (
    ELASTIC_ADVICE,
    NEUTRAL_SETTINGS,
    STRATEGIES,
    ElasticOptions,
    StrategySpec,
    check_strategy,
    default_strategy,
    is_elastic,
)
from paceline.torch.strategies.base import Strategy, warn
from paceline.torch.strategies.snapshots import Snapshots

if TYPE_CHECKING:
    from paceline.torch.strategies.measuring.profiling import StepProfiler


def class_of(spec: StrategySpec) -> type[Strategy]:
    module, _, name = spec.implementation.partition(":")
    kind: type[Strategy] = getattr(importlib.import_module(module), name)
    return kind


def _options_of(kind: type[Strategy], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options for a strategy. Drop options of other strategies that do not change the result."""
    known = {
        name
        for base in kind.__mro__
        if "__init__" in vars(base) and base is not object
        for name, parameter in inspect.signature(vars(base)["__init__"]).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    if "find_unused_parameters" in options and "unused" in known:
        options.setdefault("unused", "skip" if options["find_unused_parameters"] else "error")
    elif "unused" in options and "find_unused_parameters" in known:
        options.setdefault("find_unused_parameters", options["unused"] == "skip")
    options = {key: value for key, value in options.items() if key in known or key not in NEUTRAL_SETTINGS}
    if unknown := min(options.keys() - known, default=None):
        advice = f"Choose {', '.join(sorted(known))}"
        if unknown in ElasticOptions.__annotations__:
            advice = ELASTIC_ADVICE
        raise UsageError(f"strategy {kind.name} does not have an option {unknown}. {advice}")
    return options


def strategy(
    name: str | None = None,
    *,
    elastic: bool = False,
    snapshot_dir: str | os.PathLike[str] | None = None,
    snapshot_every: str | None = None,
    **options: Any,
) -> Strategy:
    """Create the strategy that the launcher chose: ``paceline run --strategy X``, or ``PACELINE_STRATEGY=X``.

    A `name` takes precedence. If the launcher chose none, the strategy is ``hybrid`` if the environment has the address
    of parameter servers, ``all-reduce`` if it has several ranks (torchrun, mpirun, Slurm), else ``one-device``.
    `options` are the arguments of the strategy's class. All classes have ``device`` and ``seed``. A strategy
    ignores other strategies' options that do not change the result, so that one script runs under all strategies:
    ``bucket_mb``, ``timeout`` and ``find_unused_parameters=True``, which parameter-server treats as ``unused="skip"``.

    If the environment has a coordinator (``paceline run --min-ranks``, or ``PACELINE_COORDINATOR``), the strategy is
    ``all-reduce``, ``parameter-server`` or ``hybrid`` with ranks that may die and join. With `elastic`, a missing
    coordinator is an error.

    With a `snapshot_dir`, or ``PACELINE_SNAPSHOT_DIR``, the training writes a checkpoint to this directory every
    `snapshot_every` (``PACELINE_SNAPSHOT_EVERY``, default ``"10m"``). If the directory has a checkpoint, the training
    loop continues from it, without a change of the script. Snapshots need ``one-device``, ``all-reduce`` or
    ``sharded``, and one loader.

    Raises UsageError for an unknown name, or an option that the strategy does not have.
    """
    settings = environment()
    if elastic and not is_elastic(settings):
        raise UsageError(f"elastic=True: there is no coordinator. {ELASTIC_ADVICE}")
    chosen = name or settings.strategy or (ElasticOptions.strategy if is_elastic(settings) else None)
    if chosen is None:
        chosen = default_strategy(has_servers=settings.scheduler is not None, num_ranks=find_rank(settings)[1])
    spec = check_strategy(chosen, "strategy" if name else "PACELINE_STRATEGY")
    if spec.elastic_implementation is not None and is_elastic(settings):
        spec = replace(spec, implementation=spec.elastic_implementation)
    elif elastic or (settings.coordinator is not None and name is None):
        source = "elastic=True" if elastic else f"PACELINE_COORDINATOR={settings.coordinator}"
        elastic_spec = STRATEGIES[ElasticOptions.strategy]
        raise UsageError(
            f"{source}: strategy {chosen} {elastic_spec.without_flags}. Choose {elastic_spec.name}, or leave it out"
        )
    directory, every = snapshot_dir or settings.snapshot_dir, snapshot_every or settings.snapshot_every
    given = {"snapshot_dir": snapshot_dir, "snapshot_every": snapshot_every}
    names = [name if value else f"PACELINE_{name.upper()}" for name, value in given.items()]
    snapshots = None if directory is None else Snapshots(directory, spec.check_snapshots(directory, every, *names))
    kind = class_of(spec)
    created = kind(**_options_of(kind, options))
    created.snapshots = snapshots
    if settings.profile is not None:
        created.profiler = make_profiler(created, settings)
    if settings.status_url is not None:
        from paceline.observe.kubeflow import KubeflowStatus  # here, because paceline.observe imports rich

        created.status = KubeflowStatus(settings, warn)
        atexit.register(created.status.close)
    return created


def make_profiler(measured: Strategy, settings: Environment) -> StepProfiler:
    """Return a profiler that measures the steps of a strategy for ``paceline explain``."""
    from paceline.torch.strategies.measuring.profiling import StepProfiler
    from paceline.torch.strategies.server.cluster import open_clients

    assert settings.profile is not None
    return StepProfiler(measured, settings.profile, settings.profile_steps, open_clients)
