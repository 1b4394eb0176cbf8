"""What a :class:`~paceline.protocol.client.core.ClientCore` bids its runtime to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from paceline.protocol.buckets import Buckets
from paceline.protocol.client.requests import Request
from paceline.protocol.client.session import ServerSession


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect to a server that is new in the view."""

    server: int


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the connection to a server that is in no chain any more; its session has only calls, which fail."""

    session: ServerSession


@dataclass(frozen=True, slots=True)
class Transmit:
    """Send a request, by the current view.

    One that was made in the place of others has no payload yet: it is made of these `pieces`, each the buckets to take
    of another request's payload, and then started. One without pieces is sent again as it was.
    """

    request: Request
    pieces: tuple[tuple[Request, Buckets], ...] = ()


@dataclass(frozen=True, slots=True)
class Discard:
    """A retained push is needed no more: its memory may be used again."""

    request: Request


@dataclass(frozen=True, slots=True)
class Resync:
    """Tell a server, behind all that was sent: by the view of this version that was all; so far is the worker."""

    server: int
    version: int
    clock: int
    takes_part: bool


@dataclass(frozen=True, slots=True)
class AskToJoin:
    """Ask a server from which iteration this worker takes part, from `clock` on if it may; by a call.

    The answer goes to :meth:`ClientCore.joined`.
    """

    server: int
    round: int
    clock: int


Instruction: TypeAlias = Connect | Disconnect | Transmit | Discard | Resync | AskToJoin
