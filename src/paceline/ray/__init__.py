"""Run a function as the ranks of one run, on the nodes of a Ray cluster (the extra ``paceline[ray]``)."""

from typing import TYPE_CHECKING

from paceline.on_demand import import_on_demand

if TYPE_CHECKING:
    from .running import run

__all__ = ["run"]

__getattr__ = import_on_demand(__name__, {".running": ("run",)})
