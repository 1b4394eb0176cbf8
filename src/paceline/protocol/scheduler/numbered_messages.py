"""Messages between a process and the scheduler, delivered exactly once even if their connection breaks.

Each end numbers and stores its messages until the other end has confirmed them (:class:`MemberEnd`,
:class:`SchedulerEnd`). After a reconnection both ends continue.

A new scheduler has no stored messages; each member's Rejoin contains the results of the member's former messages.
Members resend the messages that the former scheduler may not have received. The effect of such a message may also be in
the Rejoin, if the new scheduler used a Rejoin of an earlier connection.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Final

_MAX_ANSWERS: Final = 256
"""The maximum number of stored answers to one process. A process has fewer concurrent calls."""


@dataclass(frozen=True, slots=True)
class SentMessage:
    """A call (with an answer) or a notice of a process. The core does not read the `content`."""

    number: int
    content: Any
    is_call: bool
    is_numbered: bool
    """Whether the message must be delivered exactly once."""
    supersedes: Hashable = None
    """This notice makes earlier stored notices with the same value obsolete; None for other messages."""


class MemberEnd:
    """The messages of one process in the order of their numbers."""

    def __init__(self) -> None:
        self._number = 0
        self._calls: dict[int, SentMessage] = {}  # number → call without an answer
        self._notices: dict[int, SentMessage] = {}  # number → notice that the scheduler may not have received

    @property
    def lowest(self) -> int:
        """The lowest number of a call without an answer. The scheduler may drop answers below it."""
        return min(self._calls, default=self._number + 1)

    def add(
        self, content: Any, *, is_call: bool = False, is_numbered: bool = True, supersedes: Hashable = None
    ) -> SentMessage:
        """Number a message, and store it if it must not be lost."""
        self._number += 1
        message = SentMessage(self._number, content, is_call, is_numbered, supersedes)
        if is_call:
            self._calls[message.number] = message
        elif is_numbered:
            if supersedes is not None:
                former = [number for number, kept in self._notices.items() if kept.supersedes == supersedes]
                for number in former:
                    del self._notices[number]
            self._notices[message.number] = message
        return message

    def received(self, number: int) -> None:
        """Drop the notices up to this number, which the scheduler has."""
        for known in [known for known in self._notices if known <= number]:
            del self._notices[known]

    def take(self, request: int) -> SentMessage | None:
        return self._calls.pop(request, None)

    def calls(self) -> list[SentMessage]:
        return [self._calls[number] for number in sorted(self._calls)]

    def since(self, received: int) -> list[SentMessage]:
        """Return the messages to resend to a scheduler that has all messages up to the number `received`."""
        unsent = {**self._calls, **self._notices}
        return [unsent[number] for number in sorted(unsent) if number > received or not unsent[number].is_numbered]


class SchedulerEnd:
    """The last number and the answers of one process; `is_foreign`: the process is a former scheduler's member."""

    def __init__(self, *, is_foreign: bool = False) -> None:
        self.is_foreign = is_foreign
        self.received = 0
        """The number of the last received message."""
        self._answers: dict[int, Any] = {}  # number → answer that the process may not have received

    @property
    def welcome_number(self) -> int:
        """The number in the welcome: :attr:`received`, or -1 if this scheduler has no message of a foreign member."""
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
