"""What a server's core is told, and what it has its runtime do.

A *token* is a request, as the runtime knows it: the core compares tokens and gives them back, and does no more.
The instructions of :mod:`paceline.protocol.replication` that concern payloads, links and other servers are given on as
they are.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, TypeAlias

from msgspec import Struct

from paceline.protocol import replication
from paceline.protocol.buckets import Buckets
from paceline.protocol.chains import ChainGroup


class TimingClass(Enum):
    """What a request is, as far as its time matters."""

    DATA = "data"
    """A push or a read: of the current view, or refused."""
    TICK = "tick"
    """A worker's word for its clock: of the current view, or refused, and not before the workers' clocks are here."""
    SYNCED = "synced"
    """The same, sent again by itself when a newer view comes: one of an older view is dropped."""
    CALL = "call"
    """A worker's word for whether it takes part, which belongs to no view."""
    CHAIN = "chain"
    """From another server: of the current view, or of an older one, which replication knows what to do with."""
    OTHER = "other"
    """A request that belongs to no view, by anybody."""


class Timing(Enum):
    """When a request is to be handled."""

    NOW = "now"
    EARLY = "early"
    """When the view comes that it was sent by."""
    UNNAMED = "unnamed"
    """When a view comes that names the worker that has sent it."""
    BEFORE_CLOCKS = "before clocks"
    """When another server has told where the workers are."""
    STALE = "stale"
    """Never: it was sent by an older view, and is refused."""
    REPEATED = "repeated"
    """Never: it comes again."""


class Route(Enum):
    """The way of a push."""

    KEEP = "keep"
    """It is kept until its iteration is complete, and answered at once."""
    CHAIN = "chain"
    """It is applied and forwarded, and answered when all successors have it."""
    ALONE = "alone"
    """It is applied and answered: there is one copy."""
    STALE = "stale"
    """It is rejected: the client retries with the newest view."""
    EXPELLED = "expelled"
    """It is rejected: its worker is no member of the cluster."""


class Verdict(Struct):
    """The decision of :meth:`ServerCore.push`."""

    route: Route
    worker: int
    sequence: int
    iteration: int
    buckets: Buckets = 0
    """The buckets for which the push counts."""
    fresh: Buckets = 0
    """Those of them for which it is new. 0: a duplicate."""
    takes_part: bool = False
    """Whether the worker takes part in the iterations now."""


class Awaited(NamedTuple):
    """The reasons why a read waits."""

    ranks: list[int]
    """Of the workers that are behind, or have to send pushes again."""
    num_missing: int
    """How many of the expected workers have not joined."""
    by_chain: bool
    """Whether the read waits for successors."""


class Clocks(Struct, frozen=True):
    """Where the workers are, as one server tells another one that is to begin there."""

    workers: tuple[tuple[int, int, int, bool], ...]
    """Of each its incarnation, its rank, its clock, and whether it takes part."""
    num_missing: int
    """How many of the expected workers have not joined yet."""
    minimum: int
    """The iteration that all have reached."""


# Events.


class ViewChanged(Struct, frozen=True):
    """The scheduler has committed a view, see :class:`paceline.protocol.scheduler.View`."""

    epoch: int
    version: int
    groups: tuple[ChainGroup, ...]
    members: frozenset[int]
    """All members, by incarnation."""
    workers: frozenset[int]
    """Those of them that are workers."""
    last_incarnation: int


class WorkerJoining(Struct, frozen=True):
    """A worker wants to take part from iteration `clock` or later. Answered by TellJoined or TellExpelled."""

    token: object
    worker: int
    rank: int
    clock: int


class Synced(Struct, frozen=True):
    """A worker has sent again what it kept, by the view of `version`, and says where it stands."""

    token: object
    worker: int
    rank: int
    version: int
    clock: int
    has_joined: bool
    """Whether it has ever taken part."""
    counts: bool
    """Whether it takes part now."""


class WorkerRetired(Struct, frozen=True):
    """A worker takes no part until it joins again."""

    worker: int


class WorkerTicked(Struct, frozen=True):
    """A worker has finished `clock` iterations."""

    worker: int
    clock: int


class Read(Struct, frozen=True):
    """A read of iteration `clock` came; `buckets` are those it is of, as far as that is known.

    Answered by Serve, by Stale, by TellExpelled, or by Late when `deadline_s` has passed.
    """

    token: object
    worker: int
    clock: int
    deadline_s: float = float("inf")
    buckets: int = 0


class ReadyReceived(Struct, frozen=True):
    """The server `source` says Ready."""

    source: int
    version: int


class ClocksReceived(Struct, frozen=True):
    """A server before this one says where the workers are."""

    clocks: Clocks


class Time(Struct, frozen=True):
    """It is `now_s`, by the clock that deadlines are of."""

    now_s: float


Event: TypeAlias = (
    ViewChanged | WorkerJoining | Synced | WorkerRetired | WorkerTicked | Read | ReadyReceived | ClocksReceived
    | Time | replication.Forwarded | replication.Acknowledged | replication.LinkUp | replication.LinkDown
    | replication.Confirmed | replication.StateReceived
)  # fmt: skip


# Instructions.


class ResumeRequest(Struct, frozen=True):
    """Handle this request now, which was kept."""

    token: object


class TellJoined(Struct, frozen=True):
    """Tell the worker that it takes part from iteration `clock`."""

    token: object
    clock: int


class TellExpelled(Struct, frozen=True):
    """Tell the worker that it has left the cluster, or was declared dead: nothing is taken from it any more."""

    token: object


class Stale(Struct, frozen=True):
    """Tell the worker that the view has changed: it asks again by the new one."""

    token: object


class Serve(Struct, frozen=True):
    """Answer the read."""

    token: object


class Late(Struct, frozen=True):
    """Tell the worker that the deadline of its read, or push, has passed."""

    token: object


class DropKept(Struct, frozen=True):
    """Drop what is kept of a worker's pushes for the iterations from `iteration` on: it does not finish them."""

    worker: int
    iteration: int


class SumUp(Struct, eq=False):
    """Sum what `workers` pushed in an iteration, in this order, and keep the sum: it is the token of what follows."""

    iteration: int
    workers: tuple[int, ...]
    buckets: int
    payload: object = None
    """The sum, which the runtime puts here."""


class ApplySum(Struct, frozen=True):
    """Sum what `workers` pushed in an iteration, in this order, and apply it: there is one copy."""

    iteration: int
    workers: tuple[int, ...]
    buckets: int


class Completed(Struct, frozen=True):
    """This iteration is complete, and its sum is applied."""

    iteration: int


class ForgetWorker(Struct, frozen=True):
    """Forget what is known of a worker that has taken part: it is gone, or not seen here any more."""

    worker: int


class ForgetKept(Struct, frozen=True):
    """Drop all that is kept of any worker."""


class SendClocks(Struct, frozen=True):
    """Tell the server `target` where the workers are: see :meth:`Workers.known_clocks`."""

    target: int


Instruction: TypeAlias = (
    ResumeRequest | TellJoined | TellExpelled | Stale | Serve | Late | DropKept | SumUp | ApplySum | Completed
    | ForgetWorker | ForgetKept | SendClocks | replication.Instruction
)  # fmt: skip
