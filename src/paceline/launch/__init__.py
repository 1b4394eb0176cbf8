"""Start processes: local clusters, single roles, and the ranks of scripts. Public names are imported at first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.on_demand import import_on_demand

if TYPE_CHECKING:
    from .coordinator import run_coordinator
    from .kernels import load_kernels, prepare_kernels
    from .local import LocalCluster, MemoryLimit, connect, local_cluster
    from .roles import Joining, run_scheduler, run_server
    from .run.on_engine import run_on_engine
    from .run.options import RunOptions
    from .run.run import run_script
    from .supervisor import watch_parent

__all__ = [
    "Joining",
    "LocalCluster",
    "MemoryLimit",
    "RunOptions",
    "connect",
    "load_kernels",
    "local_cluster",
    "prepare_kernels",
    "run_coordinator",
    "run_on_engine",
    "run_scheduler",
    "run_script",
    "run_server",
    "watch_parent",
]

__getattr__ = import_on_demand(
    __name__,
    {
        ".coordinator": ("run_coordinator",),
        ".kernels": ("load_kernels", "prepare_kernels"),
        ".local": ("LocalCluster", "MemoryLimit", "connect", "local_cluster"),
        ".roles": ("Joining", "run_scheduler", "run_server"),
        ".run.options": ("RunOptions",),
        ".run.on_engine": ("run_on_engine",),
        ".run.run": ("run_script",),
        ".supervisor": ("watch_parent",),
    },
)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
