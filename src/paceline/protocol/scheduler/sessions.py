"""The scheduler's sessions with processes. A session continues when its process connects again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import Struct

from paceline.protocol.scheduler.events import SendMessage
from paceline.protocol.scheduler.numbered_messages import SchedulerEnd


class Session:
    """The session of one process; `peer` is its connection, None while disconnected."""

    __slots__ = ("end", "incarnation", "peer")

    def __init__(self, peer: Any) -> None:
        self.peer: Any = peer
        self.incarnation: int | None = None
        self.end = SchedulerEnd()

    def answer(self, request: int, content: Any, body: bytes = b"") -> list[SendMessage]:
        """Store the answer to a call (or its error), and send it now or after the process has reconnected."""
        if not request:
            return []
        self.end.answered(request, (content, body))
        return self._send(request, content, body)

    def repeat(self, request: int) -> list[SendMessage]:
        answer = self.end.answer_to(request)
        return [] if answer is None else self._send(request, *answer)

    def repeat_all(self) -> list[SendMessage]:
        return [send for request, answer in self.end.answers() for send in self._send(request, *answer)]

    def notify(self, message: Any) -> list[SendMessage]:
        """Send a notice; drop the notice if there is no connection."""
        return self._send(0, message)

    def _send(self, request: int, content: Any, body: bytes = b"") -> list[SendMessage]:
        return [] if self.peer is None else [SendMessage(self.peer, content, request, self.end.received, body)]


class PendingCall(Struct, frozen=True):
    """A call from a process; the answer may be sent later."""

    session: Session
    request: int


class Sessions:
    """The sessions of the connected processes, and of the members, which may be disconnected."""

    def __init__(self) -> None:
        self.connected: dict[object, Session] = {}
        self.members: dict[int, Session] = {}
        self._joining: dict[object, int] = {}  # connection → the request of an unanswered Register or Rejoin

    def connect(self, peer: object) -> None:
        self.connected[peer] = Session(peer)

    def disconnect(self, peer: object) -> Session:
        session = self.connected.pop(peer)
        self._joining.pop(peer, None)
        if session.peer is peer:
            session.peer = None
        return session

    def join(self, peer: object, request: int) -> None:
        self._joining[peer] = request

    def has_joined(self, peer: object) -> bool:
        return peer in self._joining or self.connected[peer].incarnation is not None

    def answer_joining(self, peer: object, answer: Any) -> list[SendMessage]:
        request = self._joining.pop(peer, None)
        return [] if request is None else [SendMessage(peer, answer, request)]

    def notify(self, peers: Iterable[object], message: Any) -> list[SendMessage]:
        """Send a notice to the connected peers among `peers`."""
        return [SendMessage(peer, message) for peer in peers if peer in self.connected]

    def welcome(self, peer: object, incarnation: int) -> tuple[Session, bool] | None:
        """Return a member's session, and whether an earlier session continues; None if the member is disconnected."""
        session = self.connected.get(peer)
        if session is None:
            return None  # the member is disconnected, and will rejoin
        member = self.members.setdefault(incarnation, session)
        member.incarnation = incarnation
        self.connected[peer] = member
        is_resumed, member.peer = member.peer is not peer, peer
        return member, is_resumed

    def take_over(self, peer: object, incarnation: int) -> Session:
        session = self.connected.get(peer)
        if session is None:  # the connection broke again, and the member will rejoin
            session = Session(peer)
            session.end.is_foreign, session.peer = True, None
        session.incarnation = incarnation
        self.members[incarnation] = session
        return session

    def __iter__(self) -> Iterator[tuple[int, Session]]:
        return iter(self.members.items())
