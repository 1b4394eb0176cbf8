"""Parameter servers: tables, update rules, server, scheduler, client.

The server and the scheduler are imported on first use, because most processes need neither of the two.
"""

from typing import TYPE_CHECKING

from paceline.on_demand import import_on_demand
from paceline.ps.client.client import Client, make_node_name
from paceline.ps.client.dense_table import DenseTable
from paceline.ps.client.records import load_tables, read_records, save_tables, write_records
from paceline.ps.client.servers import Ticket
from paceline.ps.client.sparse_table import SparseTable
from paceline.ps.scheduler.link import SchedulerLink
from paceline.storage.model_directory import SavedModel, read_model
from paceline.tables import initializers, rules
from paceline.tables.initializers import *  # noqa: F403
from paceline.tables.rules import *  # noqa: F403
from paceline.tables.settings import from_fields, to_fields
from paceline.tables.sparse_store import SparseStore

if TYPE_CHECKING:
    from paceline.ps.scheduler.runtime import Scheduler
    from paceline.ps.server.server import Server

__all__ = [
    "Client",
    "DenseTable",
    "SavedModel",
    "Scheduler",
    "SchedulerLink",
    "Server",
    "SparseStore",
    "SparseTable",
    "Ticket",
    "from_fields",
    "load_tables",
    "make_node_name",
    "read_model",
    "read_records",
    "save_tables",
    "to_fields",
    "write_records",
]
__all__ += initializers.__all__
__all__ += rules.__all__

__getattr__ = import_on_demand(
    __name__, {"paceline.ps.scheduler.runtime": ("Scheduler",), "paceline.ps.server.server": ("Server",)}
)
