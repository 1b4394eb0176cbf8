"""What a process and the scheduler say to each other, exactly once each, however often their connection breaks.

A process numbers what it sends, and its end of the line (:class:`MemberEnd`) keeps that until it is known to have
come. The scheduler's end (:class:`SchedulerEnd`) knows the last number that it has, and keeps its answers until they
are known to have come: when the process is connected again, both go on where they were.

Another scheduler has another end, which has nothing. What members told the former one it learns from what they
remember, as they say when they rejoin; what the former may not have had they say again, though some of it comes twice:
it may have taken the cluster over by what they remembered on a connection before this one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Final

_MAX_ANSWERS: Final = 256
"""Of one process, that are kept: more than it ever waits for."""


@dataclass(frozen=True, slots=True)
class SentMessage:
    """What a process says: a call, which is answered, or a notice. `content` is the runtime's."""

    number: int
    content: Any
    is_call: bool
    is_numbered: bool
    """Whether it must come, and once."""
    supersedes: Hashable = None
    """A notice that comes before it and has the same here need not come any more."""


class MemberEnd:
    """The messages of one process in the order of their numbers."""

    def __init__(self) -> None:
        self._number = 0
        self._calls: dict[int, SentMessage] = {}  # those that are not answered
        self._notices: dict[int, SentMessage] = {}  # those that the scheduler may not have

    @property
    def lowest(self) -> int:
        """The lowest number of a call that is not answered: answers below it need not be kept."""
        return min(self._calls, default=self._number + 1)

    def add(
        self, content: Any, *, is_call: bool = False, is_numbered: bool = True, supersedes: Hashable = None
    ) -> SentMessage:
        """Number a message, and keep it if it must not be lost."""
        self._number += 1
        message = SentMessage(self._number, content, is_call, is_numbered, supersedes)
        if is_call:
            self._calls[message.number] = message
        elif is_numbered:
            if supersedes is not None:
                former = [each for each, kept in self._notices.items() if kept.supersedes == supersedes]
                for each in former:
                    del self._notices[each]
            self._notices[message.number] = message
        return message

    def received(self, number: int) -> None:
        """Note that the scheduler has all up to this number."""
        for each in [each for each in self._notices if each <= number]:
            del self._notices[each]

    def take(self, request: int) -> SentMessage | None:
        """Forget a call, which is answered or given up; return it."""
        return self._calls.pop(request, None)

    def calls(self) -> list[SentMessage]:
        """The calls that are not answered."""
        return [self._calls[number] for number in sorted(self._calls)]

    def since(self, received: int) -> list[SentMessage]:
        """What a scheduler may lack that has all up to a number; what it has it answers by itself."""
        unsent = {**self._calls, **self._notices}
        return [unsent[each] for each in sorted(unsent) if each > received or not unsent[each].is_numbered]


class SchedulerEnd:
    """What one process has said and was answered. `is_foreign`: it is a member of a former scheduler's cluster."""

    def __init__(self, *, is_foreign: bool = False) -> None:
        self.is_foreign = is_foreign
        self.received = 0
        """The number of the last message."""
        self._answers: dict[int, Any] = {}  # those that may not have come

    @property
    def welcome_number(self) -> int:
        """What the process is told of :attr:`received` when it is connected again."""
        return -1 if self.is_foreign and not self.received else self.received

    def is_new(self, number: int, lowest: int) -> bool:
        """Note a message; return whether it did not come before. `lowest` is as in :attr:`MemberEnd.lowest`."""
        for known in [known for known in self._answers if known < lowest]:
            del self._answers[known]
        if number > self.received:
            self.received = number
            return True
        return not number

    def answered(self, request: int, answer: Any) -> None:
        """Keep the answer to a call."""
        self._answers[request] = answer
        if len(self._answers) > _MAX_ANSWERS:
            del self._answers[next(iter(self._answers))]

    def answer_to(self, request: int) -> Any | None:
        """The answer to a call, if it may not have come."""
        return self._answers.get(request)

    def answers(self) -> Iterator[tuple[int, Any]]:
        """The answers that may not have come, in the order of the calls."""
        return iter(sorted(self._answers.items(), key=lambda each: each[0]))
