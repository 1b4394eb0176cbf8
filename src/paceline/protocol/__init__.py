"""The rules of Paceline as pure state machines: typed events in, typed instructions out.

The machines do no I/O, read no clock and draw no random numbers. The runtimes (``paceline.ps``, ``paceline.data``) and
the simulator drive them. The modules that only servers or schedulers need are imported on first use.

``docs/explanation/protocol.md`` describes the rules, with diagrams and limits.
"""

from typing import TYPE_CHECKING

from paceline.on_demand import import_on_demand
from paceline.protocol.consistency import (
    Accept,
    BoundedDelay,
    Consistency,
    DelayCompensate,
    DropStale,
    Eventual,
    Sequential,
    StalePolicy,
    check_stale_policy,
    parse_consistency,
    parse_stale_policy,
)
from paceline.protocol.membership import Member, Role
from paceline.protocol.placement import NUM_BUCKETS
from paceline.protocol.reachability import Silence

if TYPE_CHECKING:
    from paceline.protocol.server import ServerCore

__all__ = [
    "Accept",
    "BoundedDelay",
    "Consistency",
    "DelayCompensate",
    "DropStale",
    "Eventual",
    "Member",
    "NUM_BUCKETS",
    "Role",
    "Sequential",
    "ServerCore",
    "Silence",
    "StalePolicy",
    "check_stale_policy",
    "parse_consistency",
    "parse_stale_policy",
]

__getattr__ = import_on_demand(__name__, {".server": ("ServerCore",)})
