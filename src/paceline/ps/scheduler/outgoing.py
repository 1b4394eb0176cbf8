"""Frames of a process's messages to the scheduler.

The scheduler's end is :mod:`paceline.protocol.scheduler.sessions`.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from paceline.protocol.scheduler.line import MemberEnd, SentMessage
from paceline.ps import messages
from paceline.ps.messages import CALL, NOTICE
from paceline.transport import Channel, frame_parts

Answer: TypeAlias = Future[tuple[bytes, memoryview]]

_UNNUMBERED = (messages.Register, messages.Rejoin, messages.Leave)
"""Messages that may arrive twice."""


@dataclass(frozen=True, slots=True)
class Content:
    """A message to the scheduler, and the future of its answer; None for a notice."""

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
    """Send a message."""
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
