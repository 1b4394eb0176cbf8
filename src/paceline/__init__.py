"""Paceline trains models on several processes, devices and machines.

Importing it is quick: numba, and all that needs it, is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

if TYPE_CHECKING:
    from .launch import LocalCluster, connect, local_cluster
    from .protocol import Accept, BoundedDelay, DelayCompensate, DropStale, Eventual, Sequential
    from .ps import (
        ASGD,
        FTRL,
        SGD,
        Adadelta,
        Adagrad,
        Adam,
        Adamax,
        AdamW,
        Client,
        Constant,
        DenseTable,
        Momentum,
        NAdam,
        Normal,
        RAdam,
        RMSprop,
        Rprop,
        SparseTable,
        Ticket,
        Uniform,
        Zeros,
    )

_ROOMS = {
    "launch": ("LocalCluster", "connect", "local_cluster"),
    "protocol": ("Accept", "BoundedDelay", "DelayCompensate", "DropStale", "Eventual", "Sequential"),
    "ps": (
        "ASGD",
        "FTRL",
        "SGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "Adamax",
        "AdamW",
        "Client",
        "Constant",
        "DenseTable",
        "Momentum",
        "NAdam",
        "Normal",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SparseTable",
        "Ticket",
        "Uniform",
        "Zeros",
    ),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [
    "ASGD",
    "Accept",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "BoundedDelay",
    "Client",
    "Constant",
    "DelayCompensate",
    "DenseTable",
    "DropStale",
    "Eventual",
    "FTRL",
    "LocalCluster",
    "Momentum",
    "NAdam",
    "Normal",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
    "Sequential",
    "SparseTable",
    "Ticket",
    "Uniform",
    "Zeros",
    "connect",
    "local_cluster",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its room when it is first asked for."""
    room = _ROOM_OF.get(name)
    if room is None:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{room}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
