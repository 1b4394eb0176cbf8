"""The scheduler's protocol as one pure state machine, :class:`SchedulerCore`."""

from paceline.protocol.scheduler import events
from paceline.protocol.scheduler.core import HEARTBEATS_PER_TIMEOUT, MEMBER, Phase, SchedulerCore
from paceline.protocol.scheduler.recovery import Recovery, Returned
from paceline.protocol.scheduler.views import KnownViews, Proposal, View, gaining, may_commit, may_take_over

__all__ = [
    "HEARTBEATS_PER_TIMEOUT",
    "KnownViews",
    "MEMBER",
    "Phase",
    "Proposal",
    "Recovery",
    "Returned",
    "SchedulerCore",
    "View",
    "events",
    "gaining",
    "may_commit",
    "may_take_over",
]
