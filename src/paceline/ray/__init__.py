"""Run a function as the ranks of one run on a Ray cluster, or train with Ray Train (the extra ``paceline[ray]``)."""

from typing import TYPE_CHECKING

from paceline.on_demand import import_on_demand

if TYPE_CHECKING:
    from .running import run
    from .train import PacelineConfig

__all__ = ["PacelineConfig", "run"]

__getattr__ = import_on_demand(__name__, {".running": ("run",), ".train": ("PacelineConfig",)})
