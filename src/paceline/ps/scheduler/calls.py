"""Calls and notices of one process to the scheduler, their answers, and the process's record for a new scheduler."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from paceline.errors import ConnectionLostError, PacelineError
from paceline.protocol.jobs import Job, JobMemory, JobRecord, JobState, Lease, MemberLedger, TakenReport
from paceline.protocol.jobs.messages import JobRequest
from paceline.protocol.scheduler.numbered_messages import MemberEnd, SentMessage
from paceline.ps import messages
from paceline.ps.forked import NoLock
from paceline.ps.messages import CALL, NOTICE, KnownTable
from paceline.transport import Channel, Frame, frame_parts, read_meta

_ANSWERS: Final[dict[type, Any]] = {
    messages.TakeLease: Lease,
    messages.GetJob: Job,
    messages.PostJob: int,
    messages.JobStatus: JobState,
    messages.TakeReports: TakenReport | None,
}
"""The recorded answers to requests about jobs."""


def _decode(meta: bytes, kind: Any) -> Any:
    return read_meta(meta, kind, "an answer of the scheduler")


class Memory:
    """One process's record for a new scheduler. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: dict[int, KnownTable] = {}
        self._ledger = MemberLedger()

    def joined(self, incarnation: int) -> None:
        self._ledger.incarnation = incarnation

    def sent(self, message: msgspec.Struct, body: Iterable[Any] = ()) -> msgspec.Struct:
        """Record a message before it is sent; return the message to send."""
        match message:
            case messages.Heartbeat(progress=progress) if progress:
                with self._lock:
                    self._ledger.counted(progress)
            case JobRequest():
                with self._lock:
                    return self._ledger.sent(message, tuple(body))
            case _:
                pass
        return message

    def answered(self, message: msgspec.Struct, meta: bytes) -> None:
        """Record the answer to a message. The receiving thread calls this, so that no received answer is missing."""
        if isinstance(message, messages.DeclareTable):
            known = _decode(meta, KnownTable)
            with self._lock:
                self._tables.setdefault(known.number, known)
        elif isinstance(message, JobRequest) and type(message) in _ANSWERS:
            answer = _decode(meta, _ANSWERS[type(message)])
            with self._lock:
                self._ledger.answered(message, answer, time.monotonic())

    def merge_news(self, news: JobRecord) -> None:
        with self._lock:
            self._ledger.merge_news(news)

    def tables(self) -> tuple[KnownTable, ...]:
        with self._lock:
            return tuple(self._tables.values())

    def job(self) -> JobMemory | None:
        with self._lock:
            return self._ledger.memory(time.monotonic())

    def again(self) -> list[tuple[msgspec.Struct, tuple[Any, ...]]]:
        """Return the messages about this worker's job, with their bodies, to resend to a new scheduler."""
        with self._lock:
            return list(self._ledger.again())


Answer: TypeAlias = Future[tuple[bytes, memoryview]]

_UNNUMBERED = (messages.Register, messages.Rejoin, messages.Leave)
"""Messages without a number, because they may arrive twice."""


@dataclass(frozen=True, slots=True)
class Content:
    """A message to the scheduler, and the future of its answer (None for a notice)."""

    struct: msgspec.Struct
    body: tuple[Any, ...]
    answer: Answer | None


def add(
    end: MemberEnd, struct: msgspec.Struct, body: tuple[Any, ...] = (), answer: Answer | None = None
) -> SentMessage:
    """Number a message, and store it if it must not be lost. A heartbeat without progress may be lost."""
    content = Content(struct, body, answer)
    if isinstance(struct, messages.Heartbeat):
        return end.add(content, is_numbered=bool(struct.progress), supersedes=messages.Heartbeat)
    return end.add(content, is_call=answer is not None, is_numbered=not isinstance(struct, _UNNUMBERED))


def send(end: MemberEnd, channel: Channel, message: SentMessage) -> None:
    content: Content = message.content
    channel.send(
        *frame_parts(
            CALL if message.is_call else NOTICE,
            request=message.number if message.is_call else 0,
            clock=end.lowest,
            sequence=message.number if message.is_numbered else 0,
            meta=messages.encode(content.struct),
            body=content.body,
        )
    )


class SchedulerCalls:
    """The messages of a process to the scheduler. Thread-safe; `memory` records them."""

    def __init__(self, channel: Channel, memory: Memory) -> None:
        self.channel = channel
        self.is_connected = True
        """Whether messages are sent on this channel. If not, they are stored until the next connection."""
        self.lost: PacelineError | None = None
        self._memory = memory
        self._end = MemberEnd()
        self._lock: threading.Lock | NoLock = threading.Lock()

    def disown(self) -> None:
        self._lock = NoLock()

    def send(self, struct: msgspec.Struct, body: tuple[Any, ...] = (), answer: Answer | None = None) -> SentMessage:
        """Send a message, or store it until the next connection."""
        with self._lock:
            if self.lost is not None:
                raise self.lost
            message = add(self._end, self._memory.sent(struct, body), body, answer)
            if self.is_connected:
                try:
                    send(self._end, self.channel, message)
                except ConnectionLostError:
                    self.is_connected = False  # the link's thread detects the broken connection too, and reconnects
                except PacelineError:
                    self._end.take(message.number)
                    raise
            return message

    def send_once(self, notice: msgspec.Struct) -> None:
        with self._lock:
            self.channel.send(*frame_parts(NOTICE, meta=messages.encode(notice)))

    def take(self, request: int) -> Content | None:
        """Remove and return the call of this number, which is answered or abandoned; None without such a call."""
        with self._lock:
            message = self._end.take(request)
        return None if message is None else message.content

    def received(self, frame: Frame) -> Content | None:
        """Apply the confirmation in a scheduler's frame; return the call that the frame answers, if any."""
        if frame.header.sequence:
            with self._lock:
                self._end.received(frame.header.sequence)
        return None if frame.header.kind == NOTICE else self.take(frame.header.request)

    def disconnected(self) -> None:
        """Store all messages until the next connection."""
        with self._lock:
            self.is_connected = False
        self.channel.close()

    def register_again(self, channel: Channel) -> None:
        """Send all messages again on a new connection, because this process is not a member yet."""
        with self._lock:
            self._begin_on(channel)
            self._send_again(0)

    def rejoin(self, channel: Channel, make: Callable[[], messages.Rejoin]) -> SentMessage:
        """Send the current Rejoin on a new connection. Other messages are sent after its answer."""
        with self._lock:
            self._begin_on(channel)
            message = add(self._end, make(), (), Future())
            send(self._end, channel, message)
        return message

    def send_again(self, received: int) -> None:
        """Send the messages after number `received` again; all messages if `received` is -1 (a new scheduler)."""
        with self._lock:
            self._send_again(received)

    def _begin_on(self, channel: Channel) -> None:
        # Hold the lock until the first message is sent, so that a Leave comes before all messages or after the first
        # one.
        self.channel = channel
        if self.lost is not None:
            raise self.lost

    def _send_again(self, received: int) -> None:
        if received < 0:
            for message, parts in self._memory.again():
                self.channel.send(*frame_parts(NOTICE, meta=messages.encode(message), body=parts))
        for sent in self._end.since(received):
            send(self._end, self.channel, sent)
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
            if not message.content.answer.done():
                message.content.answer.set_exception(lost)
        self.channel.close()
        return lost
