"""A parameter server's protocol as one pure state machine, :class:`ServerCore`."""

from paceline.protocol.server import events
from paceline.protocol.server.core import ServerCore
from paceline.protocol.server.events import Clocks, Route, Timing, TimingClass, Verdict
from paceline.protocol.server.progress import BlockedReads, EarlyRequests
from paceline.protocol.server.workers import Workers

__all__ = [
    "BlockedReads",
    "Clocks",
    "EarlyRequests",
    "TimingClass",
    "Route",
    "ServerCore",
    "Timing",
    "Verdict",
    "Workers",
    "events",
]
