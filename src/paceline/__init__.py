"""Paceline trains models on several processes, devices and machines.

Importing it is quick: numba, and everything that needs it, is imported at its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import errors
from .version import __version__ as __version__

if TYPE_CHECKING:
    from .errors import *  # noqa: F403
    from .filters import KKT as KKT
    from .filters import BFloat16 as BFloat16
    from .filters import Compress as Compress
    from .filters import DeltaKeys as DeltaKeys
    from .filters import Float16 as Float16
    from .filters import KeyCaching as KeyCaching
    from .filters import KeyNumbers as KeyNumbers
    from .filters import Quantize as Quantize
    from .filters import RandomK as RandomK
    from .filters import RandomSkip as RandomSkip
    from .filters import Significant as Significant
    from .filters import TopK as TopK
    from .filters import Zstd as Zstd
    from .inference import LoadedModel as LoadedModel
    from .inference import load as load
    from .launch import LocalCluster as LocalCluster
    from .launch import MemoryLimit as MemoryLimit
    from .launch import connect as connect
    from .launch import local_cluster as local_cluster
    from .protocol import Accept as Accept
    from .protocol import BoundedDelay as BoundedDelay
    from .protocol import DelayCompensate as DelayCompensate
    from .protocol import DropStale as DropStale
    from .protocol import Eventual as Eventual
    from .protocol import Sequential as Sequential
    from .ps import Client as Client
    from .ps import DenseTable as DenseTable
    from .ps import SparseTable as SparseTable
    from .ps import Ticket as Ticket
    from .tables.initializers import *  # noqa: F403
    from .tables.rules import *  # noqa: F403

_PACKAGES: dict[str, tuple[str, ...]] = {
    "errors": tuple(name for name in vars(errors) if name.endswith("Error")),
    "inference": ("LoadedModel", "load"),
    "launch": ("LocalCluster", "MemoryLimit", "connect", "local_cluster"),
    "protocol": ("Accept", "BoundedDelay", "DelayCompensate", "DropStale", "Eventual", "Sequential"),
    "ps": ("Client", "DenseTable", "SparseTable", "Ticket"),
}
_PACKAGE_OF = {name: package for package, names in _PACKAGES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name from its package at its first use."""
    if name in _PACKAGE_OF:
        value = getattr(importlib.import_module(f".{_PACKAGE_OF[name]}", __name__), name)
    elif name == "__all__":
        value = sorted([*_PACKAGE_OF, *_settings()])
    elif not name[:1].isupper() or (value := _settings().get(name)) is None:  # not a submodule
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    globals()[name] = value
    return value


def _settings() -> dict[str, Any]:
    """Return the update rules, initializers and filters, by name, from their registries."""
    from . import filters
    from .tables import initializers, rules

    kinds = {kind.__name__: kind for kind in filters.FILTERS.values()}
    return {**initializers.INITIALIZERS, **rules.RULES, **kinds}


def __dir__() -> list[str]:
    return sorted([*globals(), *__getattr__("__all__")])
