"""The events and instructions of a server's core.

A *token* is the runtime's object for a request: the core only compares and returns tokens. The core passes on the
instructions of :mod:`paceline.protocol.replication` unchanged.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, TypeAlias

from msgspec import Struct

from paceline.protocol import replication
from paceline.protocol.buckets import Buckets
from paceline.protocol.scheduler.views import View


class TimingClass(Enum):
    """The kind of a request: it determines whether the server handles, postpones or rejects the request in a view."""

    DATA = "data"
    """A push or a read; rejected if it was sent in an older view."""
    TICK = "tick"
    """A worker's clock; rejected if sent in an older view, and postponed until the server has the workers' clocks."""
    SYNCED = "synced"
    """A worker's clock, after its resent pushes. Dropped if sent in an older view: each view gets a new one."""
    CALL = "call"
    """A worker's message that it joins or retires; independent of the view."""
    CHAIN = "chain"
    """A message of another server; the replication core checks its view."""
    OTHER = "other"
    """A request of any process that is independent of the view."""


class Timing(Enum):
    """The time at which a request is handled."""

    IMMEDIATE = "immediate"
    EARLY = "early"
    """Later: when this server receives the view in which the request was sent."""
    UNNAMED = "unnamed"
    """Later: when this server receives a view that contains the worker."""
    BEFORE_CLOCKS = "before clocks"
    """Later: when another server has sent the workers' clocks."""
    STALE = "stale"
    """Never: the request was sent in an older view and is rejected."""
    REPEATED = "repeated"
    """Never: the worker will send the request again."""


class Route(Enum):
    """The treatment of a push."""

    BUFFER = "buffer"
    """The push is buffered until its iteration is complete, and answered immediately."""
    CHAIN = "chain"
    """The push is applied and forwarded, and answered when all successors have it."""
    ALONE = "alone"
    """The push is applied and answered; no replicas exist."""
    STALE = "stale"
    """The push is rejected: the client retries in the newest view."""
    EXPELLED = "expelled"
    """The push is rejected: its worker is not a member of the cluster."""


class Verdict(Struct):
    """The decision of :meth:`ServerCore.push`."""

    route: Route
    worker: int
    sequence: int
    iteration: int
    buckets: Buckets = 0
    fresh: Buckets = 0
    """The buckets for which the push is new; 0 for a duplicate."""
    takes_part: bool = False


class WaitReasons(NamedTuple):
    """The reasons why a read waits."""

    ranks: list[int]
    """The ranks of the workers that have not finished an earlier iteration, or must resend pushes."""
    num_missing: int
    by_chain: bool
    """Whether the read waits for successors."""


class Clocks(Struct, frozen=True):
    """The workers' clocks, which one server sends to a new server."""

    workers: tuple[tuple[int, int, int, bool], ...]
    """Each worker's incarnation, rank, clock, and whether it takes part."""
    num_missing: int
    minimum: int


# Events.


class WorkerJoining(Struct, frozen=True):
    """A worker wants to take part from iteration `clock` or later. The answer is ConfirmJoin or RejectExpelled."""

    token: object
    worker: int
    rank: int
    clock: int


class Synced(Struct, frozen=True):
    """A worker has resent its retained pushes in the view of `version`, and sends its clock."""

    token: object
    worker: int
    rank: int
    version: int
    clock: int
    has_joined: bool
    """Whether the worker has ever taken part."""
    counts: bool
    """Whether the worker currently takes part."""


class WorkerRetired(Struct, frozen=True):
    """A worker takes no part until it joins again."""

    worker: int


class WorkerTicked(Struct, frozen=True):
    """A worker has finished `clock` iterations."""

    worker: int
    clock: int


class Read(Struct, frozen=True):
    """A request for the values of iteration `clock`; `buckets` are the buckets of its keys, if known.

    The answer is Serve, Stale or RejectExpelled, or DeadlinePassed after `deadline_s`.
    """

    token: object
    worker: int
    clock: int
    deadline_s: float = float("inf")
    buckets: int = 0


class ReadyReceived(Struct, frozen=True):
    """The server `source` has sent a Ready."""

    source: int
    version: int


class ClocksReceived(Struct, frozen=True):
    """A predecessor has sent the workers' clocks."""

    clocks: Clocks


class Time(Struct, frozen=True):
    """The current time, by the same clock as the deadlines."""

    time_s: float


Event: TypeAlias = (
    View | WorkerJoining | Synced | WorkerRetired | WorkerTicked | Read | ReadyReceived | ClocksReceived
    | Time | replication.Forwarded | replication.Acknowledged | replication.LinkUp | replication.LinkDown
    | replication.Confirmed | replication.StateReceived
)  # fmt: skip


# Instructions.


class ResumeRequest(Struct, frozen=True):
    """Handle the postponed request of this token now."""

    token: object


class ConfirmJoin(Struct, frozen=True):
    """Notify the worker that it takes part from iteration `clock`."""

    token: object
    clock: int


class RejectExpelled(Struct, frozen=True):
    """Reject the request because the worker has left the cluster or was declared dead."""

    token: object


class Stale(Struct, frozen=True):
    """Reject the request because the view has changed: the worker retries in the new view."""

    token: object


class Serve(Struct, frozen=True):
    """Answer the read."""

    token: object


class DeadlinePassed(Struct, frozen=True):
    """Notify the worker that the deadline of its read or push has passed."""

    token: object


class DropBuffered(Struct, frozen=True):
    """Drop a worker's buffered pushes from `iteration` on, because the worker will not finish these iterations."""

    worker: int
    iteration: int


class SumUp(Struct, eq=False):
    """Sum the pushes of `workers` in an iteration, in this order. This object is the token of the sum."""

    iteration: int
    workers: tuple[int, ...]
    buckets: int
    payload: object = None
    """The sum, which the runtime sets."""


class ApplySum(Struct, frozen=True):
    """Sum the pushes of `workers` in an iteration, in this order, and apply the sum; no replicas exist."""

    iteration: int
    workers: tuple[int, ...]
    buckets: int


class Completed(Struct, frozen=True):
    """This iteration is complete, and its sum is applied."""

    iteration: int


class ForgetWorker(Struct, frozen=True):
    """Drop all state of a worker that has taken part, because the worker left or this server is in no chain."""

    worker: int


class DropAllBuffered(Struct, frozen=True):
    """Drop all buffered pushes."""


class SendClocks(Struct, frozen=True):
    """Send the workers' clocks to the server `target`: see :meth:`Workers.known_clocks`."""

    target: int


Instruction: TypeAlias = (
    ResumeRequest | ConfirmJoin | RejectExpelled | Stale | Serve | DeadlinePassed | DropBuffered | SumUp | ApplySum
    | Completed | ForgetWorker | DropAllBuffered | SendClocks | replication.Instruction
)  # fmt: skip
