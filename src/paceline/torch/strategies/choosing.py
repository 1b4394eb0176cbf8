"""Make the strategy that the launcher chose."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from paceline.environment import environment
from paceline.errors import UsageError
from paceline.strategies import NEUTRAL_SETTINGS, StrategySpec, check_strategy, default_strategy
from paceline.torch.strategies.base import Strategy


def class_of(spec: StrategySpec) -> type[Strategy]:
    """Return the class of a strategy."""
    module, _, name = spec.implementation.partition(":")
    kind: type[Strategy] = getattr(importlib.import_module(module), name)
    return kind


def _options_of(kind: type[Strategy], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a strategy, without options of others that do not change the result."""
    known = {
        name
        for base in kind.__mro__
        if "__init__" in vars(base) and base is not object
        for name in inspect.signature(vars(base)["__init__"]).parameters
    }
    if "find_unused_parameters" in options and "unused" in known:
        options.setdefault("unused", "skip" if options["find_unused_parameters"] else "error")
    elif "unused" in options and "find_unused_parameters" in known:
        options.setdefault("find_unused_parameters", options["unused"] == "skip")
    return {key: each for key, each in options.items() if key in known or key not in NEUTRAL_SETTINGS}


def strategy(name: str | None = None, **options: Any) -> Strategy:
    """Return the strategy that the launcher chose: ``paceline run --strategy X``, or ``PACELINE_STRATEGY=X``.

    A `name` given here comes before what the launcher said. Where neither says anything, it is ``hybrid`` if the
    environment names parameter servers, ``all-reduce`` if it names several ranks (torchrun, mpirun, Slurm), else
    ``one-device``. `options` go to the class: ``device`` and ``seed`` every one takes, others are its own.
    So that one script runs under all, every strategy accepts options of others that do not change the result
    (``find_unused_parameters=True``, which is ``unused="skip"`` under parameter-server, ``bucket_mb``, ``timeout``).

    Raises UsageError for an unknown name, or an option that the strategy does not take.
    """
    told = environment()
    chosen = name or told.strategy
    if chosen is None:
        chosen = default_strategy(has_servers=told.scheduler is not None, num_ranks=told.world_size or 1)
    try:
        kind = class_of(check_strategy(chosen))
        return kind(**_options_of(kind, options))
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise UsageError(f"strategy {chosen} does not take an option of that name: {error}") from None
