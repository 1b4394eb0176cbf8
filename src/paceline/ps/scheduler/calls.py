"""The calls and notices of one process to the scheduler, on whatever connection there is, and their answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from paceline.errors import ConnectionLostError, PacelineError
from paceline.protocol.scheduler.line import MemberEnd, SentMessage
from paceline.ps import messages
from paceline.ps.forked import NoLock
from paceline.ps.messages import NOTICE
from paceline.ps.scheduler.memory import Memory
from paceline.ps.scheduler.outgoing import Answer, Content, add, send
from paceline.transport import Channel, Frame, frame_parts


class CallLine:
    """What a process says to the scheduler from any thread; `memory` is told all of it."""

    def __init__(self, channel: Channel, memory: Memory) -> None:
        self.channel = channel
        self.is_connected = True
        """Whether the scheduler takes messages on this channel; else they are kept until it does again."""
        self.lost: PacelineError | None = None
        """Why nothing can be said any more."""
        self._memory = memory
        self._end = MemberEnd()
        self._lock: threading.Lock | NoLock = threading.Lock()

    def disown(self) -> None:
        """Leave everything to the parent of this process, which has been forked."""
        self._lock = NoLock()

    def say(self, struct: msgspec.Struct, body: tuple[Any, ...] = (), answer: Answer | None = None) -> SentMessage:
        """Send a message, or keep it until there is a scheduler again."""
        with self._lock:
            if self.lost is not None:
                raise self.lost
            message = add(self._end, self._memory.sent(struct, body), body, answer)
            if self.is_connected:
                try:
                    send(self._end, self.channel, message)
                except ConnectionLostError:
                    self.is_connected = False  # the link's thread sees it too, and does what is to be done
                except PacelineError:
                    self._end.take(message.number)
                    raise
            return message

    def say_once(self, notice: msgspec.Struct) -> None:
        """Send what need not come: the scheduler asks again, or does not mind."""
        with self._lock:
            self.channel.send(*frame_parts(NOTICE, meta=messages.encode(notice)))

    def take(self, request: int) -> Content | None:
        """Return the call of this number, which is answered or given up; None if it waits no more."""
        with self._lock:
            message = self._end.take(request)
        return None if message is None else message.content

    def received(self, frame: Frame) -> Content | None:
        """Take note of a frame of the scheduler; return the call that it answers, if any."""
        if frame.header.sequence:
            with self._lock:
                self._end.received(frame.header.sequence)
        return None if frame.header.kind == NOTICE else self.take(frame.header.request)

    # Connections.

    def disconnected(self) -> None:
        """Keep what is said from now on, until there is another connection."""
        with self._lock:
            self.is_connected = False
        self.channel.close()

    def register_again(self, channel: Channel) -> None:
        """Say everything on another connection: the scheduler does not know this process yet."""
        with self._lock:
            self._begin_on(channel)
            self._send_again(0)

    def rejoin(self, channel: Channel, make: Callable[[], messages.Rejoin]) -> SentMessage:
        """Tell the scheduler on another connection who this is, as of now; nothing else is sent before it answers."""
        with self._lock:
            self._begin_on(channel)
            message = add(self._end, make(), (), Future())
            send(self._end, channel, message)
        return message

    def send_again(self, received: int) -> None:
        """Send what the scheduler may not have; -1: it is another one, and has nothing."""
        with self._lock:
            self._send_again(received)

    def _begin_on(self, channel: Channel) -> None:
        # In one step with what is sent first: a farewell comes behind that, or nothing goes out by this connection.
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

    # The end.

    def leave(self, error: PacelineError) -> None:
        """Say farewell; nothing is said after it, for this reason."""
        with self._lock:
            try:
                self.channel.send(*frame_parts(NOTICE, meta=messages.encode(messages.Leave())))
            except PacelineError:
                pass
            self.lost = self.lost or error

    def fail(self, error: PacelineError) -> PacelineError:
        """Fail all that waits for an answer; return the reason, which may be a former one."""
        with self._lock:
            lost = self.lost = self.lost or error
            calls = self._end.calls()
        for message in calls:
            if not message.content.answer.done():
                message.content.answer.set_exception(lost)
        self.channel.close()
        return lost
