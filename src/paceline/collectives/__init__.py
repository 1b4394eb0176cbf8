"""Run collective operations between processes.

>>> group = init(rank=0, world_size=1)
>>> group.all_reduce([1.0, 2.0], "sum").tolist()
[1.0, 2.0]
>>> group.close()
"""

from paceline.collectives.grid import Grid, dims_create, split_evenly
from paceline.collectives.group import Group
from paceline.collectives.start import DEFAULT_TIMEOUT, init, join
from paceline.collectives.ticket import CollectiveTicket
from paceline.collectives.tuner import Candidate
from paceline.meeting.store import MemoryStore, PrefixStore, Store

__all__ = [
    "DEFAULT_TIMEOUT",
    "Candidate",
    "Grid",
    "Group",
    "MemoryStore",
    "PrefixStore",
    "Store",
    "CollectiveTicket",
    "dims_create",
    "init",
    "join",
    "split_evenly",
]
