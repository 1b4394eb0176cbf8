"""Which strategy a program runs under: what its launcher said."""

from __future__ import annotations

from typing import Any

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


def strategy(name: str | None = None, **options: Any) -> Strategy:
    """Return the strategy that the launcher chose: ``paceline run --strategy X``, or ``PACELINE_STRATEGY=X``.

    A `name` given here comes before what the launcher said. Where neither says anything, it is ``hybrid`` if the
    environment names parameter servers, ``all-reduce`` if it names several ranks (torchrun, mpirun, Slurm), else
    ``one-device``. `options` go to the class: ``device`` and ``seed`` every one takes, others are its own.

    Raises UsageError for an unknown name, or an option that the strategy does not take.
    """
    told = environment()
    chosen = name or told.strategy
    if chosen is None:
        chosen = default_strategy(has_servers=told.scheduler is not None, num_ranks=told.world_size or 1)
    try:
        return _CLASSES[check_strategy(chosen)](**options)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise UsageError(f"strategy {chosen} does not take an option of that name: {error}") from None
