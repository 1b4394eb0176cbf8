"""The scheduler's protocol as one pure state machine, :class:`SchedulerCore`; names are imported when first used."""

from typing import TYPE_CHECKING

from paceline.on_demand import import_on_demand

if TYPE_CHECKING:
    from paceline.protocol.scheduler import events, messages
    from paceline.protocol.scheduler.cluster import HEARTBEATS_PER_TIMEOUT, PHASE, ClusterCore, Phase
    from paceline.protocol.scheduler.core import SchedulerCore
    from paceline.protocol.scheduler.members import MEMBER
    from paceline.protocol.scheduler.recovery import Evidence, Recovery
    from paceline.protocol.scheduler.views import (
        KnownViews,
        Proposal,
        View,
        ViewChange,
        gaining,
        may_commit,
        may_take_over,
    )

__all__ = [
    "ClusterCore",
    "Evidence",
    "HEARTBEATS_PER_TIMEOUT",
    "KnownViews",
    "MEMBER",
    "PHASE",
    "Phase",
    "Proposal",
    "Recovery",
    "SchedulerCore",
    "View",
    "ViewChange",
    "events",
    "gaining",
    "may_commit",
    "may_take_over",
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
        ".recovery": ("Evidence", "Recovery"),
        ".views": ("KnownViews", "Proposal", "View", "ViewChange", "gaining", "may_commit", "may_take_over"),
    },
)
