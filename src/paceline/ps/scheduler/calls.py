"""Calls and notices of one process to the scheduler, their answers, and the process's record for a new scheduler."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeAlias

import msgspec

from paceline.errors import ConnectionLostError, PacelineError
from paceline.protocol.jobs import Job, JobMemory, JobRecord, JobState, Lease, TakenReport
from paceline.protocol.jobs.messages import JobRequest
from paceline.protocol.scheduler.numbered_messages import MemberEnd, SentMessage
from paceline.ps import messages
from paceline.ps.forked import NoLock
from paceline.ps.messages import CALL, NOTICE, KnownTable
from paceline.transport import Channel, Frame, frame_parts, read_meta

_ANSWERS: Final[dict[type, Any]] = {
    messages.DeclareTable: KnownTable,
    messages.TakeLease: Lease,
    messages.GetJob: Job,
    messages.PostJob: int,
    messages.JobStatus: JobState,
    messages.TakeReports: TakenReport | None,
}
"""The types of the answers that are recorded for a new scheduler."""


Answer: TypeAlias = Future[tuple[bytes, memoryview]]


class SchedulerCalls:
    """The messages of a process to the scheduler, and its record for a new scheduler. Thread-safe."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.is_connected = True
        """Whether messages are sent on this channel. If not, they are stored until the next connection."""
        self.lost: PacelineError | None = None
        self._tables: dict[int, KnownTable] = {}
        self._end = MemberEnd()
        self._lock: threading.Lock | NoLock = threading.Lock()

    def disown(self) -> None:
        self._lock = NoLock()

    def send(self, struct: msgspec.Struct, body: tuple[Any, ...] = (), answer: Answer | None = None) -> SentMessage:
        """Send a message, or store it until the next connection."""
        with self._lock:
            if self.lost is not None:
                raise self.lost
            message = self._end.add(struct, body, answer)
            if self.is_connected:
                try:
                    self._transmit(message)
                except ConnectionLostError:
                    self.is_connected = False  # the link's thread detects the broken connection too, and reconnects
                except PacelineError:
                    self._end.take(message.number)
                    raise
            return message

    def _transmit(self, message: SentMessage) -> None:
        numbers = self._end.numbers(message)
        self.channel.send(
            *frame_parts(
                NOTICE if message.answer is None else CALL,
                request=numbers.request,
                clock=numbers.lowest,
                sequence=numbers.sequence,
                meta=messages.encode(message.content),
                body=message.body,
            )
        )

    def send_once(self, notice: msgspec.Struct) -> None:
        with self._lock:
            self.channel.send(*frame_parts(NOTICE, meta=messages.encode(notice)))

    def take(self, request: int) -> SentMessage | None:
        """Remove and return the call with this number, which is answered or abandoned; None if no such call exists."""
        with self._lock:
            return self._end.take(request)

    def received(self, frame: Frame) -> SentMessage | None:
        """Drop the notices that a scheduler's frame acknowledges. Return the call that the frame answers, or None."""
        if frame.header.sequence:
            with self._lock:
                self._end.received(frame.header.sequence)
        return None if frame.header.kind == NOTICE else self.take(frame.header.request)

    # The record for a new scheduler.

    def joined(self, incarnation: int) -> None:
        self._end.ledger.incarnation = incarnation

    def answered(self, message: msgspec.Struct, meta: bytes) -> None:
        """Record the answer to a message. The receiving thread calls this, so that no received answer is missing."""
        kind = _ANSWERS.get(type(message))
        if kind is not None:
            answer = read_meta(meta, kind, "an answer of the scheduler")
            with self._lock:
                if isinstance(message, JobRequest):
                    self._end.ledger.answered(message, answer, time.monotonic())
                else:
                    self._tables.setdefault(answer.number, answer)

    def merge_news(self, news: JobRecord) -> None:
        with self._lock:
            self._end.ledger.merge_news(news)

    def tables(self) -> tuple[KnownTable, ...]:
        with self._lock:
            return tuple(self._tables.values())

    # Connections.

    def disconnected(self) -> None:
        """Store all messages until the next connection."""
        with self._lock:
            self.is_connected = False
        self.channel.close()

    def register_again(self, channel: Channel, highest_term: int) -> None:
        """Send all messages again on a new connection, because this process is not a member yet."""
        with self._lock:
            self._end.register_again(highest_term)
            self._begin_on(channel)
            self._send_again(0)

    def rejoin(self, channel: Channel, make: Callable[[JobMemory | None], messages.Rejoin]) -> SentMessage:
        """Send the Rejoin with the record of the job on a new connection. Other messages follow after its answer."""
        with self._lock:
            self._begin_on(channel)
            message = self._end.add(make(self._end.ledger.memory(time.monotonic())), (), Future())
            self._transmit(message)
        return message

    def send_again(self, received: int) -> None:
        """Send the messages after number `received` again; all messages if `received` is -1 (a new scheduler)."""
        with self._lock:
            self._send_again(received)

    def _begin_on(self, channel: Channel) -> None:
        # Hold the lock until the first message is sent, so that Leave comes before all messages or after the first.
        self.channel = channel
        if self.lost is not None:
            raise self.lost

    def _send_again(self, received: int) -> None:
        for message in self._end.since(received):
            self._transmit(message)
        self.is_connected = True

    def leave(self, error: PacelineError) -> None:
        """Send Leave; later messages fail with this error."""
        with self._lock:
            try:
                self.channel.send(*frame_parts(NOTICE, meta=messages.encode(messages.Leave())))
            except PacelineError:
                pass
            self.lost = self.lost or error

    def fail(self, error: PacelineError) -> PacelineError:
        """Fail all calls without an answer; return the error, which may be an earlier error."""
        with self._lock:
            lost = self.lost = self.lost or error
            calls = self._end.calls()
        for message in calls:
            if not message.answer.done():
                message.answer.set_exception(lost)
        self.channel.close()
        return lost
