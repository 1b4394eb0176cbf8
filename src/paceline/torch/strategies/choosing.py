"""Which strategy a program runs under: what its launcher said."""

from __future__ import annotations

import inspect
from typing import Any, Final

from paceline.environment import environment
from paceline.errors import UsageError
from paceline.strategies import STRATEGIES, check_strategy, default_strategy
from paceline.torch.strategies.all_reduce import AllReduce
from paceline.torch.strategies.base import Strategy
from paceline.torch.strategies.hybrid import Hybrid
from paceline.torch.strategies.one_device import OneDevice
from paceline.torch.strategies.pipeline.strategy import Pipeline
from paceline.torch.strategies.replicas.central_storage import CentralStorage
from paceline.torch.strategies.replicas.mirrored import Mirrored
from paceline.torch.strategies.server.parameter_server import ParameterServer
from paceline.torch.strategies.sharded.strategy import Sharded

_CLASSES: dict[str, type[Strategy]] = {
    kind.name: kind
    for kind in (OneDevice, Mirrored, CentralStorage, AllReduce, ParameterServer, Hybrid, Pipeline, Sharded)
}
assert _CLASSES.keys() == STRATEGIES.keys()


_WITHOUT_EFFECT_ELSEWHERE: Final = {
    *("find_unused_parameters", "static_graph", "unused", "bucket_mb", "overlap", "backend", "timeout"),
    *("units", "data_parallel", "devices", "storage"),
}
"""Options that change how some strategies compute, and never what: the others accept them."""


def _options_of(kind: type[Strategy], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that a strategy is made with: those of others that do not change the result are left out."""
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
    return {key: each for key, each in options.items() if key in known or key not in _WITHOUT_EFFECT_ELSEWHERE}


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
        kind = _CLASSES[check_strategy(chosen)]
        return kind(**_options_of(kind, options))
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise UsageError(f"strategy {chosen} does not take an option of that name: {error}") from None
