"""Who starts the processes: local clusters, and single roles by hand. Public names are imported when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connecting import connect
    from .kernels import load_kernels, prepare_kernels
    from .local import LocalCluster, MemoryLimit, local_cluster
    from .roles import Joining, run_scheduler, run_server
    from .run.run import RunOptions, run_script
    from .supervisor import watch_parent

_MODULES = {
    "connecting": ("connect",),
    "kernels": ("load_kernels", "prepare_kernels"),
    "local": ("LocalCluster", "MemoryLimit", "local_cluster"),
    "roles": ("Joining", "run_scheduler", "run_server"),
    "run.run": ("RunOptions", "run_script"),
    "supervisor": ("watch_parent",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Joining",
    "LocalCluster",
    "MemoryLimit",
    "RunOptions",
    "connect",
    "load_kernels",
    "local_cluster",
    "prepare_kernels",
    "run_scheduler",
    "run_script",
    "run_server",
    "watch_parent",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first asked for."""
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
