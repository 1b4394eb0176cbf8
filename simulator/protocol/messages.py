"""Frames between the processes of a protocol run. Most are events and instructions of the cores, as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from paceline.protocol import replication
from paceline.protocol.membership import Member
from paceline.protocol.scheduler import View
from paceline.protocol.server import TimingClass, events
from simulator.oracle import Value
from simulator.protocol.connections import MessageEnd

Part: TypeAlias = tuple[int, tuple[Value, ...]]
"""A worker's incarnation, and its values."""


class EventFrame:
    """A message to a server: an event for its core. The frame itself is the event's token."""

    __slots__ = ("connection", "event", "number", "payload", "version")

    def __init__(
        self,
        connection: MessageEnd,
        make_event: Callable[[EventFrame], Any],
        *,
        number: int = 0,
        version: int,
        payload: Any = (),
    ) -> None:
        self.connection = connection
        self.number = number
        self.version = version
        """The sender's view."""
        self.payload = payload
        """The parts of a push; the value and the marks of a bucket."""
        self.event = make_event(self)

    def __repr__(self) -> str:
        return f"EventFrame({self.number}, {self.version}, {self.event}, {self.payload})"


@dataclass(slots=True)
class Push:
    """A worker's push of iteration `iteration`; the payload is its part."""

    worker: int
    sequence: int
    iteration: int
    buckets: int


@dataclass(slots=True)
class Check:
    """The sender's count of applied pushes to a bucket; the payload is the bucket. The receiver compares both."""

    bucket: int
    applied: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Reply:
    """The answer of a server or the scheduler to request `number`; 0: a notice of the scheduler."""

    number: int
    content: Any = None
    received: int = 0
    """The scheduler: the number of the last message that it has."""
    durable: int = 0
    """A server: the number of safe iterations."""


@dataclass(slots=True)
class Welcomed:
    """The node is this member of this cluster."""

    member: Member
    cluster: str
    view: View
    received: int
    """As in Reply; -1: another scheduler has this member's cluster now."""


@dataclass(slots=True)
class JobMessage:
    """A member's message about jobs; see :mod:`paceline.protocol.scheduler.line` for the numbers."""

    request: int
    sequence: int
    lowest: int
    content: Any


@dataclass(slots=True)
class EndWork:
    """Request the end of all workers: there is no more work."""


@dataclass(slots=True)
class Ping:
    """A request for a sign of life."""


@dataclass(slots=True)
class Pong:
    """The answer to Ping."""


TIMING: Final[dict[type, TimingClass]] = {
    events.WorkerJoining: TimingClass.CALL,
    events.WorkerRetired: TimingClass.CALL,
    Push: TimingClass.DATA,
    events.Read: TimingClass.DATA,
    events.WorkerTicked: TimingClass.TICK,
    events.Synced: TimingClass.SYNCED,
    replication.Forwarded: TimingClass.CHAIN,
    replication.StateReceived: TimingClass.CHAIN,
    events.ReadyReceived: TimingClass.CHAIN,
    events.ClocksReceived: TimingClass.CHAIN,
    Check: TimingClass.CHAIN,
}
