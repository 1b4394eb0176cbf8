"""The rules of Paceline as pure state machines: typed events in, typed instructions out.

The machines do no I/O, read no clock and draw no random numbers. The runtimes (``paceline.ps``, ``paceline.data``) and
the simulator drive them. Modules for servers and schedulers only are imported on first use.

``docs/explanation/protocol.md`` describes the rules, with diagrams and limits.
"""

from typing import TYPE_CHECKING

from paceline.on_demand import import_on_demand
from paceline.protocol import (
    buckets,
    chains,
    client,
    clocks,
    consistency,
    delivery,
    jobs,
    membership,
    placement,
    reachability,
)
from paceline.protocol.buckets import ALL, Buckets, bucket_set, buckets_in
from paceline.protocol.chains import Chain, ChainGroup, Planner, chains_of, groups_of
from paceline.protocol.client import ClientCore
from paceline.protocol.clocks import Gate, VectorClock
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
from paceline.protocol.delivery import Delivery
from paceline.protocol.membership import Member, Membership, Role
from paceline.protocol.placement import NUM_BUCKETS, place
from paceline.protocol.reachability import Reachability, Silence

if TYPE_CHECKING:
    from paceline.protocol import iterations, replication, scheduler, server, transitions
    from paceline.protocol.iterations import Iterations
    from paceline.protocol.replication import Replication
    from paceline.protocol.scheduler import SchedulerCore
    from paceline.protocol.server import ServerCore
    from paceline.protocol.transitions import StateTable, Transition

__all__ = [
    "ALL",
    "Accept",
    "BoundedDelay",
    "Buckets",
    "Chain",
    "ChainGroup",
    "ClientCore",
    "Consistency",
    "DelayCompensate",
    "Delivery",
    "DropStale",
    "Eventual",
    "Gate",
    "Iterations",
    "Member",
    "Membership",
    "NUM_BUCKETS",
    "Planner",
    "Reachability",
    "Replication",
    "Role",
    "SchedulerCore",
    "Sequential",
    "ServerCore",
    "Silence",
    "StalePolicy",
    "StateTable",
    "Transition",
    "VectorClock",
    "bucket_set",
    "buckets",
    "buckets_in",
    "chains",
    "chains_of",
    "check_stale_policy",
    "client",
    "clocks",
    "consistency",
    "delivery",
    "groups_of",
    "iterations",
    "jobs",
    "membership",
    "parse_consistency",
    "parse_stale_policy",
    "place",
    "placement",
    "reachability",
    "replication",
    "scheduler",
    "server",
    "transitions",
]

__getattr__ = import_on_demand(
    __name__,
    {
        ".iterations": ("Iterations",),
        ".replication": ("Replication",),
        ".scheduler": ("SchedulerCore",),
        ".server": ("ServerCore",),
        ".transitions": ("StateTable", "Transition"),
    },
)
