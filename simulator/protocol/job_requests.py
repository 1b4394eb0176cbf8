"""A member's requests to the scheduler about jobs, and the programs that make them. They have no rule of their own."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, TypeAlias

from paceline.protocol.client import Request
from paceline.protocol.jobs import Counters, JobMemory, MemberLedger, messages
from paceline.protocol.scheduler.events import SendMessage
from paceline.protocol.scheduler.messages import Heartbeat
from paceline.protocol.scheduler.numbered_messages import MemberEnd, SentMessage
from paceline.protocol.scheduler.sessions import MessageNumbers
from simulator.protocol.messages import EndWork, SchedulerMessage

JobCall: TypeAlias = messages.JobRequest | EndWork
Program: TypeAlias = Generator[float | list[Request] | JobCall, Any, None]
"""The work of a node. It yields a time to sleep, requests to servers to wait for, or a request about jobs."""


class JobRequests:
    """The requests of one member. `send` sends to the scheduler, `time_s` returns the member's time."""

    def __init__(self, send: Callable[[SchedulerMessage], None], time_s: Callable[[], float]) -> None:
        self._send_message = send
        self._time_s = time_s
        self._is_welcome = False  # by the scheduler of the present connection
        self._messages = MemberEnd()
        self._ledger = MemberLedger()
        self._callbacks: dict[int, Callable[[Any], None]] = {}  # by request

    def request(self, request: JobCall, then: Callable[[Any], None] = lambda answer: None) -> None:
        """Send a request, and call `then` with the answer, which may be an error."""
        content = request if isinstance(request, EndWork) else self._ledger.sent(request)
        message = self._messages.add(content, is_call=True)
        self._callbacks[message.number] = then
        self._send(message)

    def notify(self, notice: messages.JobRequest) -> None:
        self._send(self._messages.add(self._ledger.sent(notice)))

    def send_counters(self, counters: Counters) -> None:
        """Send this worker's counters; they replace unsent ones."""
        self._ledger.counted(counters)
        self._send(self._messages.add(Heartbeat(progress=counters), supersedes=Heartbeat))

    def disconnected(self) -> JobMemory | None:
        """Send nothing until the next welcome; return the knowledge for a new scheduler."""
        self._is_welcome = False
        return self._ledger.memory(self._time_s())

    def welcomed(self, incarnation: int, received: int) -> None:
        """Send again the messages that the scheduler may lack."""
        self._ledger.incarnation, self._is_welcome = incarnation, True
        for report, _ in self._ledger.again() if received < 0 else ():
            self._send_message(SchedulerMessage(report, MessageNumbers(lowest=self._messages.lowest)))
        for message in self._messages.since(received):
            self._send(message)

    def _send(self, message: SentMessage) -> None:
        if self._is_welcome:
            number = message.number if message.is_call else 0
            numbers = MessageNumbers(number, message.number, self._messages.lowest)
            self._send_message(SchedulerMessage(message.content, numbers))

    def receive(self, sent: SendMessage) -> None:
        answer = sent.message
        self._messages.received(sent.received)
        if isinstance(answer, messages.JobNews):
            self._ledger.merge_news(answer.record)
            return
        message = self._messages.take(sent.request)
        if message is not None:
            if not isinstance(message.content, EndWork) and not isinstance(answer, Exception):
                self._ledger.answered(message.content, answer, self._time_s())
            self._callbacks.pop(sent.request)(answer)


class Performer:
    """Runs one program at a time. `later` calls a function after a delay, `is_done` checks a list of requests."""

    def __init__(
        self,
        jobs: JobRequests,
        later: Callable[..., None],
        is_done: Callable[[list[Request]], bool] = lambda requests: True,
    ) -> None:
        self._jobs = jobs
        self._later = later
        self._is_done = is_done
        self._program: Program | None = None
        self._pending: list[Request] | None = None

    @property
    def is_waiting(self) -> bool:
        return self._pending is not None

    def perform(self, program: Program) -> None:
        """Run a program from its beginning. The former program stops."""
        self._program = program
        self._resume(program, None)

    def resume(self) -> None:
        if self._program is not None and self._pending is not None and self._is_done(self._pending):
            self._resume(self._program, None)

    def _resume(self, program: Program, value: Any) -> None:
        if program is not self._program:
            return
        self._pending = None
        try:
            step = program.send(value)
            while isinstance(step, list) and self._is_done(step):
                step = program.send(None)
        except StopIteration:
            return
        if isinstance(step, list):
            self._pending = step
        elif isinstance(step, float):
            self._later(step, self._resume, program, None)
        else:
            self._jobs.request(step, partial(self._resume, program))
