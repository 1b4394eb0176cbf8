"""What travels between the processes of a simulated cluster.

A value is what one push adds to one bucket: (bucket, index, number). The index counts the pushes of one worker to the
bucket from 1 on; it belongs to the simulation, which checks by it that each is applied once, in order and with no gap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from paceline.protocol.jobs import JobMemory, JobRecord
from paceline.protocol.membership import Member, Role
from paceline.protocol.replication import FilterState
from paceline.protocol.scheduler import View
from paceline.protocol.server import Clocks, TimingClass

Value: TypeAlias = tuple[int, int, int]
Part: TypeAlias = tuple[int, tuple[Value, ...]]
"""A worker's incarnation, and what it pushed."""


@dataclass(slots=True)
class SimulatedFrame:
    """What is sent; `size` is in bytes; `kind` is what it is for a server's core, if that says when it is handled."""

    size: ClassVar[int] = 200
    kind: ClassVar[TimingClass | None] = None


# Between a node and the scheduler.


@dataclass(slots=True)
class RegisterNode(SimulatedFrame):
    """A new process wants to be a member."""

    role: Role
    is_extra: bool


@dataclass(slots=True)
class Map(SimulatedFrame):
    """A view that the scheduler has committed."""

    size: ClassVar[int] = 2000
    view: View


@dataclass(slots=True)
class PrepareView(SimulatedFrame):
    """A view that a server is to keep, and not to act on yet."""

    size: ClassVar[int] = 2000
    view: View


@dataclass(slots=True)
class PromiseTerm(SimulatedFrame):
    """A server is to prepare nothing of a lower term, and says that it will not by the same frame."""

    term: int


@dataclass(slots=True)
class PreparedView(SimulatedFrame):
    """A server has the view of this order."""

    term: int
    epoch: int


@dataclass(slots=True)
class RejoinFrame(SimulatedFrame):
    """A member is connected (again); the rest is for a scheduler that knows nothing."""

    member: Member
    cluster: str
    view: View
    promised: int
    has_committed: bool
    former: tuple[Member, ...]
    is_leaving: bool
    job: JobMemory | None


@dataclass(slots=True)
class Beat(SimulatedFrame):
    """A heartbeat; a server names those that it cannot reach."""

    incarnation: int
    unreachable: tuple[int, ...]


@dataclass(slots=True)
class Going(SimulatedFrame):
    """A server wants to be drained; a worker goes."""

    incarnation: int


@dataclass(slots=True)
class Welcomed(SimulatedFrame):
    """The node is this member of this cluster."""

    member: Member
    cluster: str
    view: View
    received: int
    """As in Reply; -1: another scheduler has this member's cluster now."""


@dataclass(slots=True)
class Thrown(SimulatedFrame):
    """The node is no member (any more)."""


@dataclass(slots=True)
class FilledFrame(SimulatedFrame):
    """A server is filled, see :class:`paceline.protocol.replication.Report`."""

    version: int
    target: int
    buckets: int


@dataclass(slots=True)
class Say(SimulatedFrame):
    """A member asks or tells something of jobs; see :mod:`paceline.protocol.scheduler.line` for the numbers."""

    request: int
    sequence: int
    lowest: int
    content: Any


@dataclass(slots=True)
class Reply(SimulatedFrame):
    """The scheduler's answer, and the number of the last message that it has."""

    request: int
    received: int
    content: Any


@dataclass(slots=True)
class NewsFrame(SimulatedFrame):
    """What is new of the job, for members to keep."""

    received: int
    record: JobRecord


@dataclass(slots=True)
class EndWork:
    """Ask that workers go: there is no more work."""


# Between a worker and a server.


@dataclass(slots=True)
class JoinGate(SimulatedFrame):
    """A worker wants to count from `clock` on, or from where the server stands."""

    kind: ClassVar[TimingClass | None] = TimingClass.CALL
    worker: int
    clock: int
    version: int
    number: int


@dataclass(slots=True)
class JoinedGate(SimulatedFrame):
    """A worker counts at this server from `clock` on."""

    clock: int
    number: int


@dataclass(slots=True)
class FinishGate(SimulatedFrame):
    """A worker has no work now."""

    kind: ClassVar[TimingClass | None] = TimingClass.CALL
    number: int
    worker: int
    version: int


@dataclass(slots=True)
class PushPart(SimulatedFrame):
    """A part of a push of one iteration."""

    kind: ClassVar[TimingClass | None] = TimingClass.DATA
    number: int
    worker: int
    sequence: int
    iteration: int
    version: int
    buckets: int
    values: tuple[Value, ...]


@dataclass(slots=True)
class TickClock(SimulatedFrame):
    """A worker has finished `clock` iterations."""

    kind: ClassVar[TimingClass | None] = TimingClass.TICK
    number: int
    worker: int
    clock: int
    version: int


@dataclass(slots=True)
class PullPart(SimulatedFrame):
    """A part of a read of iteration `clock`."""

    kind: ClassVar[TimingClass | None] = TimingClass.DATA
    number: int
    worker: int
    clock: int
    version: int
    buckets: int


@dataclass(slots=True)
class AnswerFrame(SimulatedFrame):
    """The answer to a push, a pull, a tick or a finish, and the iterations that are safe at the server."""

    number: int
    durable: int


@dataclass(slots=True)
class StaleFrame(SimulatedFrame):
    """A part is refused: the map was old. Here is the newer one."""

    number: int
    view: View


@dataclass(slots=True)
class SyncedFrame(SimulatedFrame):
    """By the map of `version`, all was sent again that had to be; where the worker stands."""

    kind: ClassVar[TimingClass | None] = TimingClass.SYNCED
    worker: int
    version: int
    clock: int
    has_joined: bool
    counted: bool


# Between servers.


@dataclass(slots=True)
class ForwardPush(SimulatedFrame):
    """A push on its way down a chain."""

    kind: ClassVar[TimingClass | None] = TimingClass.CHAIN
    number: int
    incarnation: int
    sequence: int
    version: int
    buckets: int
    parts: tuple[Part, ...]


@dataclass(slots=True)
class Ping(SimulatedFrame):
    """Are you there?"""


@dataclass(slots=True)
class Pong(SimulatedFrame):
    """The answer."""


@dataclass(slots=True)
class ForwardOk(SimulatedFrame):
    """The sender and all behind it have the push."""

    number: int


@dataclass(slots=True)
class Check(SimulatedFrame):
    """What a bucket is on a server, for the one behind it to compare."""

    kind: ClassVar[TimingClass | None] = TimingClass.CHAIN
    version: int
    bucket: int
    applied: tuple[tuple[int, int], ...]
    value: int
    marks: dict[int, int]


@dataclass(slots=True)
class State(SimulatedFrame):
    """A bucket, whole."""

    kind: ClassVar[TimingClass | None] = TimingClass.CHAIN
    size: ClassVar[int] = 20_000
    number: int
    version: int
    bucket: int
    filter: FilterState
    value: int
    marks: dict[int, int]


@dataclass(slots=True)
class StateOk(SimulatedFrame):
    """The bucket is here."""

    number: int


@dataclass(slots=True)
class ReadyFrame(SimulatedFrame):
    """The sender has nothing that the primary may lack, see :class:`paceline.protocol.replication.Ready`."""

    kind: ClassVar[TimingClass | None] = TimingClass.CHAIN
    version: int


@dataclass(slots=True)
class ClocksFrame(SimulatedFrame):
    """Where the workers are, by the view of `version`."""

    kind: ClassVar[TimingClass | None] = TimingClass.CHAIN
    version: int
    clocks: Clocks
