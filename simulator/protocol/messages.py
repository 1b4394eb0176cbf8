"""Messages between the processes of a protocol run. Most contain an event or instruction of a core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from msgspec import Struct

from paceline.protocol import replication
from paceline.protocol.scheduler.numbered_messages import MessageNumbers
from paceline.protocol.server import TimingClass, events
from simulator.oracle import Value
from simulator.protocol.links import MessageEnd

Part: TypeAlias = tuple[int, tuple[Value, ...]]
"""A worker's incarnation, and the values that it pushes."""


class EventFrame:
    """A message to a server: an event for its core, made from a class and fields. The frame is the event's token."""

    __slots__ = ("connection", "event", "number", "payload", "version")

    def __init__(self, kind: type[Any], *fields: Any, number: int = 0, version: int, payload: Any = ()) -> None:
        self.connection: MessageEnd
        """The connection on which the frame arrived."""
        self.number = number
        self.version = version
        """The version of the sender's view."""
        self.payload = payload
        """The parts of a push, or the value and the marks of a bucket."""
        self.event = kind(self, *fields) if kind.__struct_fields__[0] == "token" else kind(*fields)

    def __repr__(self) -> str:
        return f"EventFrame({self.number}, {self.version}, {self.event}, {self.payload})"


class Push(Struct):
    """A worker's push in `iteration`. The payload of the frame has the pushed values."""

    worker: int
    sequence: int
    iteration: int
    buckets: int


class Check(Struct):
    """The sender's record of applied pushes to a bucket. The payload is the bucket. The receiver compares both."""

    bucket: int
    applied: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Reply:
    """The answer of a server to request `number`."""

    number: int
    content: Any = None
    durable: int = 0
    """The number of durable iterations."""


@dataclass(slots=True)
class SchedulerMessage:
    """A message to the scheduler, with its numbers."""

    content: Any
    numbers: MessageNumbers


@dataclass(slots=True)
class EndWork:
    """Request the end of all workers: all work is done."""


@dataclass(slots=True)
class Ping:
    """A message that the receiver answers with Pong, so that the sender knows that it is reachable."""


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
