"""A parameter server's protocol as one pure state machine, :class:`ServerCore`."""

from paceline.protocol.server import events
from paceline.protocol.server.core import ServerCore
from paceline.protocol.server.events import Clocks, Route, Timing, TimingClass, Verdict

__all__ = [
    "Clocks",
    "TimingClass",
    "Route",
    "ServerCore",
    "Timing",
    "Verdict",
    "events",
]
