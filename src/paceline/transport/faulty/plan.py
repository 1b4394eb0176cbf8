"""Which frames fail on purpose, and how: given as (rank, step, kind), and kept account of."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from paceline.errors import UsageError
from paceline.transport.security.authentication import Hello

Action = Literal["drop", "delay", "duplicate", "cut"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One failure, which happens once."""

    action: Action
    """drop: the frame does not go out. delay: it does, after ``delay_s``. duplicate: it goes out twice. cut:
    the connection is closed.
    """
    rank: int
    """The rank of the client that sends."""
    step: int
    """The how-many-th frame, from 0, that this rank sends, of this kind if one is given; reconnecting goes on
    counting.
    """
    kind: int | None = None
    """The kind of frame; ``None`` counts all."""
    role: str = "worker"
    """The role of the client."""
    delay_s: float = 0.0
    """For delay."""
    when: Literal["before", "after"] = "before"
    """For cut: before the frame goes out, or after it (the server gets it, the answer is lost)."""


class FaultPlan:
    """The faults to come, and those that came. Thread-safe; one plan may serve many channels."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._lock = threading.Lock()
        self._waiting = list(faults)
        self._num_sent: Counter[tuple[str, int, int | None]] = Counter()
        self.fired: list[Fault] = []
        """The faults that have happened, in their order."""

    def add(self, fault: Fault) -> None:
        """Plan one more."""
        with self._lock:
            self._waiting.append(fault)

    def next_fault(self, hello: Hello, kind: int) -> Fault | None:
        """Count a frame that is about to be sent, and return the fault that is to happen to it, if any."""
        with self._lock:
            steps: dict[int | None, int] = {}
            for counted in (None, kind):
                key = (hello.role, hello.rank, counted)
                steps[counted] = self._num_sent[key]
                self._num_sent[key] += 1
            for index, fault in enumerate(self._waiting):
                if (fault.role, fault.rank) == (hello.role, hello.rank) and steps.get(fault.kind) == fault.step:
                    self.fired.append(self._waiting.pop(index))
                    return fault
            return None

    def check_all_fired(self) -> None:
        """Raise UsageError if a planned fault has not happened: the test has not tested what it says."""
        with self._lock:
            if self._waiting:
                raise UsageError(f"these faults never happened: {self._waiting}; those did: {self.fired}")
