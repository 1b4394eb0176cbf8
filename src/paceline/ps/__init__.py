"""Parameter servers: tables, update rules, server, scheduler, client."""

from .client import Client, make_node_name
from .rules import (
    FTRL,
    INITIALIZERS,
    RULES,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Constant,
    Initializer,
    Momentum,
    Normal,
    RMSprop,
    Uniform,
    UpdateRule,
    Zeros,
    from_fields,
    to_fields,
)
from .scheduler import Scheduler
from .scheduler_link import SchedulerLink
from .server import Server
from .sparse_store import SparseStore
from .table_handles import DenseTable, SparseTable, Ticket

__all__ = [
    "FTRL",
    "INITIALIZERS",
    "RULES",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Client",
    "Constant",
    "DenseTable",
    "Initializer",
    "Momentum",
    "Normal",
    "RMSprop",
    "Scheduler",
    "SchedulerLink",
    "Server",
    "SparseStore",
    "SparseTable",
    "Ticket",
    "Uniform",
    "UpdateRule",
    "Zeros",
    "from_fields",
    "make_node_name",
    "to_fields",
]
