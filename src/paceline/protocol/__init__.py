"""The rules of Paceline as pure state machines: typed events in, typed instructions out.

Nothing here does I/O, reads a clock or draws a random number; the runtimes (``paceline.ps``,
``paceline.data``) and the simulator feed the machines and carry out what they say. The machines and values
are exported here. Events and instructions are spoken of within their module: ``clocks.Leave`` is a worker's,
``membership.Leave`` a node's.

The rules, with diagrams and what they do not promise, are in ``docs/protocol.md``.
"""

from paceline.protocol import clocks, consistency, delivery, membership, placement, shards, strategies
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
    parse_consistency,
    parse_stale_policy,
)
from paceline.protocol.delivery import Delivery
from paceline.protocol.membership import Address, Member, Membership, Role
from paceline.protocol.placement import NUM_BUCKETS, Move, Placement, place
from paceline.protocol.shards import ShardAccount, Shards
from paceline.protocol.strategies import STRATEGIES, StrategyChoice, choose_strategy, is_one_process, needs_servers

__all__ = [
    "Accept",
    "Address",
    "BoundedDelay",
    "Consistency",
    "DelayCompensate",
    "Delivery",
    "DropStale",
    "Eventual",
    "Gate",
    "Member",
    "Membership",
    "Move",
    "NUM_BUCKETS",
    "Placement",
    "Role",
    "STRATEGIES",
    "Sequential",
    "ShardAccount",
    "Shards",
    "StalePolicy",
    "StrategyChoice",
    "VectorClock",
    "choose_strategy",
    "clocks",
    "consistency",
    "delivery",
    "is_one_process",
    "membership",
    "needs_servers",
    "parse_consistency",
    "parse_stale_policy",
    "place",
    "placement",
    "shards",
    "strategies",
]
