"""Members of a protocol run: registration, heartbeats, views, messages to the scheduler. They add no rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from typing_extensions import override

from paceline.protocol.jobs.messages import JobNews, JobRequest
from paceline.protocol.membership import ProcessIdentity, Role
from paceline.protocol.scheduler import messages
from paceline.protocol.scheduler.cluster import HEARTBEATS_PER_TIMEOUT
from paceline.protocol.scheduler.events import SendMessage
from paceline.protocol.scheduler.member_state import MemberState
from paceline.protocol.scheduler.numbered_messages import MemberEnd, MessageNumbers, SentMessage
from paceline.protocol.scheduler.views import View
from simulator.network import VirtualNetwork
from simulator.oracle import Oracle
from simulator.protocol.links import SCHEDULER, MessageEnd, MessageProcess
from simulator.protocol.messages import SchedulerMessage
from simulator.settings import RunSettings

_JOIN: Final = MessageNumbers(-1)
"""The numbers of Register and Rejoin."""
_ELSEWHERE_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The parts of a cluster that its nodes use."""

    network: VirtualNetwork
    oracle: Oracle
    settings: RunSettings


class SimulatedNode(MessageProcess):
    """A process that registers at the scheduler, sends heartbeats and receives views."""

    def __init__(self, name: str, around: Surroundings, role: Role, *, is_extra: bool = False) -> None:
        super().__init__(name, around.network)
        self.settings = around.settings
        self.oracle = around.oracle
        self.role: Role = role
        self.is_extra = is_extra
        self.identity: ProcessIdentity | None = None
        self.state = MemberState(around.settings.num_buckets)
        self._end = MemberEnd()
        self._is_welcome = False  # whether the scheduler has sent a Welcome on the current connection
        self.later(0.0, self.want, SCHEDULER)
        self._heartbeat_s = around.settings.heartbeat_timeout_s / HEARTBEATS_PER_TIMEOUT
        self.later(self._heartbeat_s * (0.5 + self.world.random.random()), self._beat)

    @property
    @override
    def incarnation(self) -> int:
        return 0 if self.state.welcome is None else self.state.welcome.incarnation

    @property
    def is_member(self) -> bool:
        return self.state.welcome is not None

    # Subclasses override these methods.

    def welcomed(self) -> None:
        """Begin the work of a member."""

    def view_changed(self, view: View) -> None:
        """Apply a newer view."""

    def unreachable(self) -> tuple[int, ...]:
        """Return the servers that this node cannot reach; a heartbeat contains them."""
        return ()

    def receive_from_peer(self, connection: MessageEnd, message: Any) -> None:
        """Receive a message of a worker or server."""

    # Links.

    @override
    def address(self, target: int) -> str | None:
        if target == SCHEDULER:
            return "scheduler"
        view = self.state.views.committed
        return None if view is None else next((m.address for m in view.members if m.incarnation == target), None)

    @override
    def link_changed(self, target: int, *, is_up: bool) -> None:
        if target == SCHEDULER:
            self._is_welcome = False
            if is_up:
                self._introduce()

    @override
    def receive(self, connection: MessageEnd, message: Any) -> None:
        if connection.target != SCHEDULER:
            self.receive_from_peer(connection, message)
        elif connection is self.links.get(SCHEDULER):
            self._receive_from_scheduler(message)

    # The scheduler.

    def request(self, message: Any, then: Callable[[Any], None] = lambda answer: None) -> None:
        """Send a request to the scheduler, and call `then` with the answer, which may be an error."""
        self._send(self._end.add(message, answer=then))

    def notify(self, message: Any) -> None:
        self._send(self._end.add(message))

    def _send(self, message: SentMessage) -> None:
        if self._is_welcome:
            self.send(SCHEDULER, SchedulerMessage(message.content, self._end.numbers(message)))

    def _introduce(self) -> None:
        name, state = self.name, self.state
        message: messages.Register | messages.Rejoin
        if state.welcome is None:
            message = messages.Register(
                node=name,
                role=self.role,
                address=name,
                is_extra=self.is_extra,
                process=self.identity,
                highest_term=state.views.highest_term,
            )
            state.registration = message
        else:
            message = state.rejoin((), self._end.ledger.memory(self.own_time_s))
        self.send(SCHEDULER, SchedulerMessage(message, _JOIN))

    def _beat(self) -> None:
        if self.is_member:
            self.notify(messages.Heartbeat(unreachable=self.unreachable()))
        self.later(self._heartbeat_s, self._beat)

    def _receive_from_scheduler(self, sent: SendMessage) -> None:
        end, message = self._end, sent.message
        end.received(sent.received)
        match message:
            case messages.Welcome():
                self._welcome(message)
            case messages.Elsewhere():
                self.drop(SCHEDULER)
                self.later(_ELSEWHERE_S, self.want, SCHEDULER)
            case JobNews(record=record):
                end.ledger.merge_news(record)
            case Exception() if sent.request == _JOIN.request:  # the scheduler does not readmit this incarnation
                self.kill()
            case _ if sent.request:
                call = end.take(sent.request)
                if call is not None:
                    if isinstance(call.content, JobRequest) and not isinstance(message, Exception):
                        end.ledger.answered(call.content, message, self.own_time_s)
                    call.answer(message)
            case _:
                view, answer = self.state.take(message)
                if answer is not None:
                    self.send(SCHEDULER, SchedulerMessage(answer, MessageNumbers()))
                if self.state.is_over:
                    self.kill()
                else:
                    self._act_on(view)

    def _welcome(self, welcome: messages.Welcome) -> None:
        is_first = not self.is_member
        view = self.state.welcomed(welcome)
        self._end.ledger.incarnation = welcome.incarnation
        self._is_welcome = True
        if is_first:
            self.welcomed()
        for message in self._end.since(welcome.received):
            self._send(message)
        self._act_on(view)

    def _act_on(self, view: View | None) -> None:
        if view is None:
            return
        if view.version:
            self.oracle.record_view(view.version, view.groups, self.name)
        if self.role is not Role.OBSERVER and view.excludes(self.incarnation):
            self.kill()
        else:
            self.view_changed(view)
            self.connect()  # the view may contain an address that was unknown before
