"""Planned faults of frames, given as (rank, step, kind), and a record of fired faults."""

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
    """One fault, which fires once."""

    action: Action
    """drop: the frame is not sent. delay: it is sent after ``delay_s``. duplicate: it is sent twice. cut: the
    connection is closed.
    """
    rank: int
    """The rank of the client that sends."""
    step: int
    """Index, from 0, of the frame among the frames of this rank (and kind, if given), across reconnections."""
    kind: int | None = None
    """The kind of frame. ``None`` counts frames of all kinds."""
    role: str = "worker"
    """The role of the client."""
    delay_s: float = 0.0
    """The delay of the fault ``delay``."""
    when: Literal["before", "after"] = "before"
    """Whether ``cut`` is before or after the frame. If after, the server receives the frame, but the reply is lost."""


class FaultPlan:
    """Pending and fired faults. Thread-safe; one plan may serve many channels."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._lock = threading.Lock()
        self._waiting = list(faults)
        self._num_sent: Counter[tuple[str, int, int | None]] = Counter()
        self.fired: list[Fault] = []
        """The fired faults, in order."""

    def add(self, fault: Fault) -> None:
        """Add a fault."""
        with self._lock:
            self._waiting.append(fault)

    def next_fault(self, hello: Hello, kind: int) -> Fault | None:
        """Count a frame before it is sent, and return its fault, if any."""
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
        """Raise UsageError if a planned fault has not fired, because the test then has not tested its case."""
        with self._lock:
            if self._waiting:
                raise UsageError(f"planned faults that did not fire: {self._waiting}; fired: {self.fired}")
