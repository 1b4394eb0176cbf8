"""The scheduler's protocol as one pure state machine, :class:`SchedulerCore`; names are imported when first used."""

from typing import TYPE_CHECKING

from paceline.on_demand import import_on_demand

if TYPE_CHECKING:
    from paceline.protocol.scheduler import events, messages
    from paceline.protocol.scheduler.cluster import HEARTBEATS_PER_TIMEOUT, PHASE, ClusterCore, Phase
    from paceline.protocol.scheduler.core import SchedulerCore
    from paceline.protocol.scheduler.members import MEMBER
    from paceline.protocol.scheduler.views import View, ViewChange

__all__ = [
    "ClusterCore",
    "HEARTBEATS_PER_TIMEOUT",
    "MEMBER",
    "PHASE",
    "Phase",
    "SchedulerCore",
    "View",
    "ViewChange",
    "events",
    "messages",
]

__getattr__ = import_on_demand(
    __name__,
    {
        ".events": (),
        ".messages": (),
        ".cluster": ("HEARTBEATS_PER_TIMEOUT", "PHASE", "ClusterCore", "Phase"),
        ".core": ("SchedulerCore",),
        ".members": ("MEMBER",),
        ".views": ("View", "ViewChange"),
    },
)
