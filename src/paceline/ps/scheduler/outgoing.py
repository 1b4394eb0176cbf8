"""What a process has said to the scheduler, until it is known to have come: the process's side of a session.

The scheduler's side is :mod:`paceline.ps.scheduler.sessions`.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from paceline.ps import messages
from paceline.ps.messages import CALL, NOTICE
from paceline.transport import Channel

Answer: TypeAlias = Future[tuple[bytes, memoryview]]

_UNNUMBERED = (messages.Register, messages.Rejoin, messages.Leave)
"""Messages that may come twice."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message; `answer` is None if it wants none."""

    number: int
    content: msgspec.Struct
    body: tuple[Any, ...]
    answer: Answer | None

    @property
    def is_numbered(self) -> bool:
        """Whether it must come, and once; a sign of life need not."""
        if isinstance(self.content, messages.Heartbeat):
            return bool(self.content.progress)
        return not isinstance(self.content, _UNNUMBERED)


class Outgoing:
    """The messages of one process in the order of their numbers. Not thread-safe."""

    def __init__(self) -> None:
        self._number = 0
        self._calls: dict[int, Message] = {}  # those that are not answered
        self._notices: dict[int, Message] = {}  # those that the scheduler may not have

    def add(self, content: msgspec.Struct, body: tuple[Any, ...] = (), answer: Answer | None = None) -> Message:
        """Number a message, and keep it if it must not be lost."""
        self._number += 1
        message = Message(self._number, content, body, answer)
        if answer is not None:
            self._calls[message.number] = message
        elif message.is_numbered:
            if isinstance(content, messages.Heartbeat):  # the newest says all
                for each in [
                    each for each, kept in self._notices.items() if isinstance(kept.content, messages.Heartbeat)
                ]:
                    del self._notices[each]
            self._notices[message.number] = message
        return message

    def send(self, channel: Channel, message: Message) -> None:
        """Send a message."""
        is_call = message.answer is not None
        channel.send_frame(
            CALL if is_call else NOTICE,
            request=message.number if is_call else 0,
            clock=min(self._calls, default=self._number + 1),
            sequence=message.number if message.is_numbered else 0,
            meta=messages.encode(message.content),
            body=message.body,
        )

    def received(self, number: int) -> None:
        """Note that the scheduler has all up to this number."""
        for each in [each for each in self._notices if each <= number]:
            del self._notices[each]

    def take(self, request: int) -> Message | None:
        """Forget a call, which is answered or given up; return it."""
        return self._calls.pop(request, None)

    def calls(self) -> list[Message]:
        """The calls that are not answered."""
        return [self._calls[number] for number in sorted(self._calls)]

    def since(self, received: int) -> list[Message]:
        """What is to be sent again to a scheduler that has all up to a number; what it has it answers by itself."""
        unsent = {**self._calls, **self._notices}
        return [unsent[each] for each in sorted(unsent) if each > received or not unsent[each].is_numbered]

    def forget_notices(self) -> None:
        """Note that another scheduler learns otherwise what they said."""
        self._notices = {}
