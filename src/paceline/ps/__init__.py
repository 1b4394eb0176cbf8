"""Parameter servers: tables, update rules, server, scheduler, client."""

from .client import Client, make_node_name
from .dense_table import DenseTable
from .records import read_records, write_records
from .rules import (
    ASGD,
    FTRL,
    INITIALIZERS,
    RULES,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Constant,
    Initializer,
    Momentum,
    NAdam,
    Normal,
    RAdam,
    RMSprop,
    Rprop,
    Uniform,
    UpdateRule,
    Zeros,
    from_fields,
    to_fields,
)
from .saving import SavedModel, load_tables, read_model, save_tables
from .scheduler import Scheduler, SchedulerLink
from .server import Server
from .sparse_store import SparseStore
from .sparse_table import SparseTable
from .ticket import Ticket

__all__ = [
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Client",
    "Constant",
    "DenseTable",
    "FTRL",
    "INITIALIZERS",
    "Initializer",
    "Momentum",
    "NAdam",
    "Normal",
    "RAdam",
    "RMSprop",
    "RULES",
    "Rprop",
    "SGD",
    "SavedModel",
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
    "load_tables",
    "make_node_name",
    "read_model",
    "read_records",
    "save_tables",
    "to_fields",
    "write_records",
]
