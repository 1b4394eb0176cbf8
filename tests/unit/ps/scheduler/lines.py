"""One end of a simulated connection, which stores the sent frames."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, cast

from paceline.transport import Channel, Header, Peer, unpack_header


@dataclass
class Sent:
    """A sent frame, or the error that answers a request."""

    kind: int = 0
    request: int = 0
    clock: int = 0
    sequence: int = 0
    meta: bytes = b""
    body: tuple[Any, ...] = ()
    error: Exception | None = None

    @property
    def header(self) -> Header:
        return Header(0, 0, self.kind, 0, 0, self.request, 0, self.clock, self.sequence, len(self.meta), 0)


@dataclass
class End:
    """Sends as the scheduler's peers and a process's channel do."""

    sent: deque[Sent] = field(default_factory=deque)

    def send(self, *parts: Any) -> None:
        header, meta, _, *body, _ = parts
        header = unpack_header(header)
        self.sent.append(Sent(header.kind, header.request, header.clock, header.sequence, meta, tuple(body)))

    def send_error(self, request: Header, error: Exception) -> None:
        self.sent.append(Sent(request=request.request, error=error))

    @property
    def peer(self) -> Peer:
        return cast(Peer, self)

    @property
    def channel(self) -> Channel:
        return cast(Channel, self)

    def take(self) -> list[Sent]:
        """Return all frames since the last call."""
        sent = list(self.sent)
        self.sent.clear()
        return sent
