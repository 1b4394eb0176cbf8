"""What the scheduler and one process say to each other, exactly once each, however often their connection breaks.

A process numbers what it sends. The scheduler's :class:`Session` of it knows the last number that it has, and keeps its
answers until they are known to have come: when the process comes again on another connection, both go on where they
were. (Another scheduler has another session: what is asked again then is a matter of `account`.)

On the wire: `sequence` of a frame to the scheduler is its number (0: one that is no matter if it is lost), `clock` the
lowest number of a call that is not answered; `sequence` of a frame from the scheduler is the last number that it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import msgspec

from paceline.ps import messages
from paceline.ps.messages import NOTICE, RESULT
from paceline.transport import Header, Peer

_Answer: TypeAlias = tuple[bytes, tuple[Any, ...]] | Exception
_MAX_ANSWERS = 256  # of one process that are kept: more than it ever waits for


class Session:
    """One process's side of the conversation, as the scheduler knows it; `peer` is the connection, if there is one."""

    def __init__(self, peer: Peer, incarnation: int | None = None) -> None:
        self.peer: Peer | None = peer
        self.incarnation = incarnation
        """The member's; None for a process that is no member."""
        self.received = 0
        """The number of the last message."""
        self.is_fresh = True
        """Whether the process has not been told yet that there is this session."""
        self._answers: dict[int, _Answer] = {}  # those that may not have come

    def is_new(self, header: Header) -> bool:
        """Take note of a frame's number; return whether it did not come before. If it did, it is answered again."""
        for number in [number for number in self._answers if number < header.clock]:
            del self._answers[number]
        if not header.sequence:
            return True
        if header.sequence > self.received:
            self.received = header.sequence
            return True
        if header.request in self._answers:
            self._send_answer(header.request)
        return False

    def answer(self, request: int, meta: bytes, body: tuple[Any, ...] = ()) -> None:
        """Answer a call, now or when the process is back."""
        self._keep(request, (meta, body))

    def refuse(self, request: int, error: Exception) -> None:
        """Answer a call with what is wrong with it."""
        self._keep(request, error)

    def notify(self, meta: bytes) -> None:
        """Send a notice; it is lost if there is no connection."""
        if self.peer is not None:
            self.peer.send_frame(NOTICE, sequence=self.received, meta=meta)

    def answer_again(self) -> None:
        """Send all answers of which it is not known that they came."""
        for request in sorted(self._answers):
            self._send_answer(request)

    def _keep(self, request: int, answer: _Answer) -> None:
        self._answers[request] = answer
        if len(self._answers) > _MAX_ANSWERS:
            del self._answers[next(iter(self._answers))]
        self._send_answer(request)

    def _send_answer(self, request: int) -> None:
        if self.peer is None:
            return
        answer = self._answers[request]
        if isinstance(answer, Exception):
            self.peer.send_error(_header(request), answer)
        else:
            self.peer.send_frame(RESULT, request=request, sequence=self.received, meta=answer[0], body=answer[1])


class Call:
    """A message that may be answered later, however the process is reached then."""

    __slots__ = ("request", "session")

    def __init__(self, session: Session, request: int) -> None:
        self.session = session
        self.request = request

    def answer(self, data: Any, body: tuple[Any, ...] = ()) -> None:
        """Answer it; a message that wants no answer gets none."""
        if self.request:
            self.session.answer(self.request, messages.encode(data), body)

    def refuse(self, error: Exception) -> None:
        """Answer that it was refused."""
        if self.request:
            self.session.refuse(self.request, error)


def notify_all(sessions: Iterable[Session], message: msgspec.Struct) -> None:
    """Send one notice to several processes."""
    meta = messages.encode(message)
    for session in sessions:
        session.notify(meta)


def _header(request: int) -> Header:
    return Header(0, 0, 0, 0, 0, request, 0, 0, 0, 0, 0)
