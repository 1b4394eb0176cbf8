"""A simulated member's line to the scheduler: its end, and its ledger of the job. It has no rule of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from paceline.protocol.jobs import Counters, JobMemory, MemberLedger, messages
from paceline.protocol.scheduler.line import MemberEnd, SentMessage
from simulator.messages import EndWork, NewsFrame, Reply, Say
from simulator.network import SimulatedConnection


class Speaker(Protocol):
    """A node, as its line sees it."""

    @property
    def own_now_s(self) -> float:
        """What it takes for the time."""

    def tell(self, frame: Any) -> None:
        """Send a frame to the scheduler."""


class Line:
    """The requests of a node about jobs, with a callback for each answer."""

    def __init__(self, node: Speaker) -> None:
        self._node = node
        self._end = MemberEnd()
        self._ledger = MemberLedger()
        self._then: dict[int, Callable[[Any], None]] = {}
        self._is_connected = False

    def ask(self, request: messages.JobRequest | EndWork, then: Callable[[Any], None] = lambda answer: None) -> None:
        """Ask the scheduler, and do something with the answer, which is an error where the request was refused."""
        content = request if isinstance(request, EndWork) else self._ledger.sent(request)
        message = self._end.add(content, is_call=True)
        self._then[message.number] = then
        self._send(message)

    def tell(self, request: messages.JobRequest) -> None:
        """Send the scheduler a request without waiting for its answer."""
        self._send(self._end.add(self._ledger.sent(request)))

    def send_counters(self, counters: Counters) -> None:
        """Send the scheduler this worker's counters, which replace those that are still to be sent."""
        self._ledger.counted(counters)
        message = messages.CountersReceived(counters=counters)
        self._send(self._end.add(message, supersedes=messages.CountersReceived))

    def rejoins(self) -> JobMemory | None:
        """Return what to tell a scheduler that knows nothing."""
        self._is_connected = False
        return self._ledger.memory(self._node.own_now_s)

    def welcomed(self, incarnation: int, received: int) -> None:
        """Say again what the scheduler may lack."""
        self._ledger.incarnation, self._is_connected = incarnation, True
        for report, _ in self._ledger.again() if received < 0 else ():
            self._node.tell(Say(0, 0, self._end.lowest, report))
        for message in self._end.since(received):
            self._send(message)

    def _send(self, message: SentMessage) -> None:
        if self._is_connected:
            number = message.number if message.is_call else 0
            self._node.tell(Say(number, message.number, self._end.lowest, message.content))

    def on_reply(self, _: SimulatedConnection, frame: Reply) -> None:
        """Take an answer."""
        self._end.received(frame.received)
        message = self._end.take(frame.request)
        if message is not None:
            if not isinstance(message.content, EndWork) and not isinstance(frame.content, Exception):
                self._ledger.answered(message.content, frame.content, self._node.own_now_s)
            self._then.pop(frame.request)(frame.content)

    def on_news(self, _: SimulatedConnection, frame: NewsFrame) -> None:
        """Take the scheduler's news."""
        self._end.received(frame.received)
        self._ledger.told(frame.record)
