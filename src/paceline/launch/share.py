"""One machine's part of a cluster.

This module imports neither NumPy nor Numba, so a launcher without servers starts in a third of the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """This machine's part of a cluster that several machines share."""

    scheduler: str
    """The scheduler's address, ``host:port``."""
    runs_scheduler: bool
    servers: Mapping[int, str]
    """The servers of this machine: the address to bind, by rank."""
    bind: str = ""
    """The address that the scheduler binds, if it differs from its public address."""
    patience_s: float = 300.0
