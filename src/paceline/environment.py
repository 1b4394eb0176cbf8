"""The one module that reads environment variables; everything else takes values.

Talks to nobody. The command line and the launchers call :func:`environment` and pass on what they need.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """What the process was told by its environment; a variable that is unset or empty is ``None``."""

    role: str | None = None
    """``PACELINE_ROLE``: what this process is: ``scheduler``, ``server`` or ``worker``."""
    scheduler: str | None = None
    """``PACELINE_SCHEDULER``: the scheduler's address, as ``tcp://host:port``."""
    token: str | None = None
    """``PACELINE_TOKEN``: the cluster's token."""
    cache_dir: Path | None = None
    """``PACELINE_CACHE_DIR``: where compiled kernels and prepared data are kept between runs."""

    def __repr__(self) -> str:
        token = None if self.token is None else "<hidden>"
        return (
            f"Environment(role={self.role!r}, scheduler={self.scheduler!r}, token={token}, "
            f"cache_dir={self.cache_dir!r})"
        )


def environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the environment; ``variables`` stands in for ``os.environ``."""
    found = os.environ if variables is None else variables
    cache_dir = found.get("PACELINE_CACHE_DIR")
    return Environment(
        role=found.get("PACELINE_ROLE") or None,
        scheduler=found.get("PACELINE_SCHEDULER") or None,
        token=found.get("PACELINE_TOKEN") or None,
        cache_dir=Path(cache_dir).expanduser() if cache_dir else None,
    )
