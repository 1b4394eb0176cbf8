"""The client's protocol as one pure state machine, :class:`ClientCore`."""

from paceline.protocol.client.core import ClientCore
from paceline.protocol.client.instructions import AskToJoin, Connect, Disconnect, Instruction, Release, Resync, Transmit
from paceline.protocol.client.requests import REQUEST, Kind, Payload, Request
from paceline.protocol.client.session import Session

__all__ = [
    "AskToJoin",
    "ClientCore",
    "Connect",
    "Disconnect",
    "Instruction",
    "Kind",
    "Payload",
    "REQUEST",
    "Release",
    "Request",
    "Resync",
    "Session",
    "Transmit",
]
