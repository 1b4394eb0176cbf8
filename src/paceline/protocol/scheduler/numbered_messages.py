"""Messages between a process and the scheduler, delivered exactly once even if their connection breaks.

Each end numbers and stores its messages until the other end has confirmed them (:class:`MemberEnd`,
:class:`SchedulerEnd`). After a reconnection both ends continue.

A new scheduler has no stored messages. Each member's Rejoin contains the effects of the member's earlier requests for
its job, and the member resends the messages that the former scheduler has not confirmed. The effect of a resent message
may already be in the Rejoin, because a member records a request before it sends the request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from msgspec import Struct, structs

from paceline.protocol.jobs import MemberLedger
from paceline.protocol.jobs.messages import JobRequest
from paceline.protocol.scheduler.messages import Heartbeat, Register, Rejoin

_MAX_ANSWERS: Final = 256
"""The maximum number of stored answers to one process. A process has fewer concurrent calls."""


class MessageNumbers(Struct, frozen=True):
    """The numbers in the header of a message."""

    request: int = 0
    """The number of the call; 0: the process expects no answer."""
    sequence: int = 0
    """The number of the message; 0: the message may be lost."""
    lowest: int = 0
    """The lowest number of an unanswered call."""


@dataclass(frozen=True, slots=True)
class SentMessage:
    """A call or a notice of a process."""

    number: int
    content: Any
    body: Any = ()
    answer: Any = None
    """The runtime's object for the answer to a call; None for a notice."""
    is_numbered: bool = True
    """Whether the message must be delivered exactly once."""


class MemberEnd:
    """The messages of one process in the order of their numbers, and the record of its job for a new scheduler."""

    def __init__(self) -> None:
        self.ledger = MemberLedger()
        self._number = 0
        self._calls: dict[int, SentMessage] = {}  # number → call without an answer
        self._notices: dict[int, SentMessage] = {}  # number → notice that the scheduler may not have received

    @property
    def lowest(self) -> int:
        """The lowest number of a call without an answer. The scheduler may drop answers to earlier calls."""
        return min(self._calls, default=self._number + 1)

    def register_again(self, highest_term: int) -> None:
        """Add the newest term to the registrations, which are sent again to another scheduler."""
        for number, call in self._calls.items():
            if isinstance(call.content, Register):
                content = structs.replace(call.content, highest_term=highest_term)
                self._calls[number] = replace(call, content=content)

    def add(self, content: Any, body: Any = (), answer: Any = None) -> SentMessage:
        """Record and number a message. Store it, unless its loss is harmless (a heartbeat without progress)."""
        is_numbered = not isinstance(content, Register | Rejoin)  # a Register or Rejoin may arrive twice
        if isinstance(content, Heartbeat):
            is_numbered = bool(content.progress)
            if is_numbered:
                self.ledger.record_counters(content.progress)
                for number in [number for number, kept in self._notices.items() if isinstance(kept.content, Heartbeat)]:
                    del self._notices[number]  # the new heartbeat's counters include those of earlier heartbeats
        elif isinstance(content, JobRequest):
            content = self.ledger.sent(content, body)
        self._number += 1
        message = SentMessage(self._number, content, body, answer, is_numbered)
        if answer is not None:
            self._calls[message.number] = message
        elif is_numbered:
            self._notices[message.number] = message
        return message

    def numbers(self, message: SentMessage) -> MessageNumbers:
        """Return the numbers in the header of a message that is sent now."""
        number = message.number
        return MessageNumbers(
            0 if message.answer is None else number, number if message.is_numbered else 0, self.lowest
        )

    def received(self, number: int) -> None:
        """Drop the notices up to this number, which the scheduler has."""
        for known in [known for known in self._notices if known <= number]:
            del self._notices[known]

    def take(self, request: int) -> SentMessage | None:
        return self._calls.pop(request, None)

    def calls(self) -> list[SentMessage]:
        return [self._calls[number] for number in sorted(self._calls)]

    def since(self, received: int) -> list[SentMessage]:
        """Return the messages to resend to a scheduler that has all messages up to the number `received`.

        A new scheduler has no messages (-1), and also receives the messages in the record of the job.
        """
        again = self.ledger.requests_to_resend() if received < 0 else ()
        unsent = {**self._calls, **self._notices}
        return [
            *(SentMessage(0, content, body, is_numbered=False) for content, body in again),
            *(unsent[number] for number in sorted(unsent) if number > received or not unsent[number].is_numbered),
        ]


class SchedulerEnd:
    """The last number and the answers of one process. `is_foreign`: the process was a member under the former
    scheduler."""

    def __init__(self, *, is_foreign: bool = False) -> None:
        self.is_foreign = is_foreign
        self.received = 0
        """The number of the last received message."""
        self._answers: dict[int, Any] = {}  # number → answer that the process may not have received

    @property
    def welcome_number(self) -> int:
        """The number in the welcome: :attr:`received`, or -1 if this scheduler has received no message from a foreign
        member."""
        return -1 if self.is_foreign and not self.received else self.received

    def receive(self, number: int, lowest: int) -> bool:
        """Record a message, drop answers below :attr:`MemberEnd.lowest`, and return False for a repeat."""
        for known in [known for known in self._answers if known < lowest]:
            del self._answers[known]
        if number > self.received:
            self.received = number
            return True
        return not number

    def answered(self, request: int, answer: Any) -> None:
        self._answers[request] = answer
        if len(self._answers) > _MAX_ANSWERS:
            del self._answers[next(iter(self._answers))]

    def answer_to(self, request: int) -> Any | None:
        return self._answers.get(request)

    def answers(self) -> Iterator[tuple[int, Any]]:
        return iter(sorted(self._answers.items(), key=lambda item: item[0]))
