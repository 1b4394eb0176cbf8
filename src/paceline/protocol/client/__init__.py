"""The client's protocol as one pure state machine, :class:`ClientCore`."""

from paceline.protocol.client.core import (
    ClientCore,
    Connect,
    Discard,
    Disconnect,
    Instruction,
    RequestJoin,
    Resync,
    Transmit,
)
from paceline.protocol.client.session import REQUEST, Request, RequestKind, ServerSession

__all__ = [
    "RequestJoin",
    "ClientCore",
    "Connect",
    "Disconnect",
    "Instruction",
    "RequestKind",
    "REQUEST",
    "Discard",
    "Request",
    "Resync",
    "ServerSession",
    "Transmit",
]
