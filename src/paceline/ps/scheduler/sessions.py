"""What the scheduler and one process say to each other, by the scheduler's end of their line.

On the wire: `sequence` of a frame to the scheduler is its number (0: one that is no matter if it is lost), `clock` the
lowest number of a call that is not answered; `sequence` of a frame from the scheduler is the last number that it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import msgspec

from paceline.protocol.scheduler.line import SchedulerEnd
from paceline.ps import messages
from paceline.ps.messages import NOTICE, RESULT
from paceline.transport import Header, Peer, frame_parts

_Answer: TypeAlias = tuple[bytes, tuple[Any, ...]] | Exception


class ProcessSession:
    """A process as the scheduler knows it; `peer` is the connection, if there is one."""

    def __init__(self, peer: Peer, incarnation: int | None = None) -> None:
        self.peer: Peer | None = peer
        self.incarnation = incarnation
        """The member's; None for a process that is no member."""
        self.end = SchedulerEnd()

    def is_new(self, header: Header) -> bool:
        """Take note of a frame's number; return whether it did not come before. If it did, it is answered again."""
        if self.end.is_new(header.sequence, header.clock):
            return True
        answer = self.end.answer_to(header.request)
        if answer is not None:
            self._send_answer(header.request, answer)
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
            self.peer.send(*frame_parts(NOTICE, sequence=self.end.received, meta=meta))

    def answer_again(self) -> None:
        """Send all answers of which it is not known that they came."""
        for request, answer in self.end.answers():
            self._send_answer(request, answer)

    def _keep(self, request: int, answer: _Answer) -> None:
        self.end.answered(request, answer)
        self._send_answer(request, answer)

    def _send_answer(self, request: int, answer: _Answer) -> None:
        if self.peer is None:
            return
        if isinstance(answer, Exception):
            self.peer.send_error(_header(request), answer)
        else:
            meta, body = answer
            self.peer.send(*frame_parts(RESULT, request=request, sequence=self.end.received, meta=meta, body=body))


class Sessions:
    """The processes that are connected, and the members, which may not be."""

    def __init__(self) -> None:
        self.connected: dict[Peer, ProcessSession] = {}
        self.members: dict[int, ProcessSession] = {}
        """By incarnation."""
        self._asked: dict[Peer, int] = {}  # who waits to be welcomed → the number of its call

    def disconnect(self, peer: Peer) -> ProcessSession:
        """Forget a connection; return whose it was."""
        session = self.connected.pop(peer)
        self._asked.pop(peer, None)
        if session.peer is peer:
            session.peer = None
        return session

    def ask(self, peer: Peer, request: int) -> None:
        """Note that a process waits to be welcomed."""
        self._asked[peer] = request

    def has_asked(self, peer: Peer) -> bool:
        """Whether a process waits to be welcomed, or was."""
        return peer in self._asked or self.connected[peer].incarnation is not None

    def answer_asked(self, peer: Any, answer: msgspec.Struct) -> None:
        """Answer one that waits to be welcomed."""
        request = self._asked.pop(peer, None)
        if request is not None:
            peer.send(*frame_parts(RESULT, request=request, meta=messages.encode(answer)))

    def refuse(self, peer: Any, error: Exception) -> None:
        """Refuse one that waits to be welcomed."""
        request = self._asked.pop(peer, None)
        if request is not None:
            ProcessSession(peer).refuse(request, error)

    def notify(self, peer: Any, message: msgspec.Struct) -> None:
        """Send a notice on a connection if there still is one."""
        if peer in self.connected:
            peer.send(*frame_parts(NOTICE, meta=messages.encode(message)))

    def welcome(self, peer: Any, incarnation: int) -> tuple[ProcessSession, bool] | None:
        """Return a member's session, and whether that goes on on another connection; None if this one is gone."""
        session = self.connected.get(peer)
        if session is None:
            return None  # it comes again
        member = self.members.setdefault(incarnation, session)
        member.incarnation = incarnation
        self.connected[peer] = member
        is_resumed, member.peer = member.peer is not peer, peer
        return member, is_resumed

    def take_over(self, peer: Any, incarnation: int) -> ProcessSession:
        """Return the session of a member of a former scheduler's cluster."""
        session = self.connected.get(peer)
        if session is None:  # its connection broke again, and it comes again
            session = ProcessSession(peer)
            session.end.is_foreign, session.peer = True, None
        session.incarnation = incarnation
        self.members[incarnation] = session
        return session


class PendingCall:
    """A message that may be answered later, however the process is reached then."""

    __slots__ = ("request", "session")

    def __init__(self, session: ProcessSession, request: int) -> None:
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


def notify_all(sessions: Iterable[ProcessSession], message: msgspec.Struct) -> None:
    """Send one notice to several processes."""
    meta = messages.encode(message)
    for session in sessions:
        session.notify(meta)


def _header(request: int) -> Header:
    return Header(0, 0, 0, 0, 0, request, 0, 0, 0, 0, 0)
