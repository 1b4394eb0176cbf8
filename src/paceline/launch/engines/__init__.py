"""Engines that start Paceline's processes on several machines, one module per engine."""

from __future__ import annotations

from .engine import Placement, RunEnd, RunEngine, RunRole
from .mpi import read_mpi_placement
from .options import EngineFlags
from .slurm import Slurm, read_placement

__all__ = [
    "EngineFlags",
    "Placement",
    "RunEnd",
    "RunEngine",
    "RunRole",
    "Slurm",
    "read_mpi_placement",
    "read_placement",
]
