"""The instructions of a :class:`~paceline.protocol.client.core.ClientCore`."""

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
    """Close the connection to a server that has left all chains; its session has only calls, which fail."""

    session: ServerSession


@dataclass(frozen=True, slots=True)
class Transmit:
    """Send a request in the current view.

    A request without `pieces` is sent again unchanged. A replacement has no payload yet: assemble it from `pieces`,
    each a request and the buckets to take from its payload, and then start it.
    """

    request: Request
    pieces: tuple[tuple[Request, Buckets], ...] = ()


@dataclass(frozen=True, slots=True)
class Discard:
    """Free the memory of a retained push."""

    request: Request


@dataclass(frozen=True, slots=True)
class Resync:
    """Send a server the worker's clock, after all resent requests of this view."""

    server: int
    version: int
    clock: int
    takes_part: bool


@dataclass(frozen=True, slots=True)
class RequestJoin:
    """Send a call to join the iterations at `clock` or later.

    Pass the answer to :meth:`ClientCore.joined`.
    """

    server: int
    round: int
    clock: int


Instruction: TypeAlias = Connect | Disconnect | Transmit | Discard | Resync | RequestJoin
