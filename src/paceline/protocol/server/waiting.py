"""The waiting requests of a server: early requests and blocked reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from paceline.protocol.server.events import Read, Timing

POSTPONED = (Timing.EARLY, Timing.UNNAMED, Timing.BEFORE_CLOCKS)
"""The timings of postponed requests."""


class EarlyRequests:
    """The postponed requests, in order of arrival."""

    def __init__(self) -> None:
        self._requests: dict[Timing, list[tuple[int, object]]] = {timing: [] for timing in POSTPONED}
        self.is_empty = True

    def __iter__(self) -> Iterator[object]:
        """Yield all tokens."""
        for requests in self._requests.values():
            for _, token in requests:
                yield token

    def has_of(self, sender: int) -> bool:
        """Whether a request of this process waits for a view."""
        return any(sender == other for other, _ in self._requests[Timing.EARLY])

    def postpone(self, timing: Timing, sender: int, token: object) -> None:
        """Store a request of a process."""
        self._requests[timing].append((sender, token))
        self.is_empty = False

    def take(self, timing: Timing) -> list[object]:
        """Remove and return the requests with this timing."""
        requests, self._requests[timing] = self._requests[timing], []
        self._note_empty()
        return [token for _, token in requests]

    def drop(self, is_meant: Callable[[object], bool]) -> None:
        """Drop the requests that `is_meant` selects."""
        for timing, requests in self._requests.items():
            if requests:
                self._requests[timing] = [request for request in requests if not is_meant(request[1])]
        self._note_empty()

    def _note_empty(self) -> None:
        self.is_empty = not any(self._requests.values())


class BlockedReads:
    """The reads that wait: first for the gate, then for the end of a takeover and for the chain."""

    def __init__(self) -> None:
        self._reads: dict[object, Read] = {}
        self._past_gate: dict[object, None] = {}

    def __len__(self) -> int:
        return len(self._reads)

    def __iter__(self) -> Iterator[object]:
        """Yield all tokens."""
        return iter(self._reads)

    @property
    def has_passed_gate(self) -> bool:
        """Whether the gate is open for a blocked read."""
        return bool(self._past_gate)

    def block(self, read: Read) -> None:
        """Add a read."""
        self._reads[read.token] = read

    def pass_gate(self, token: object) -> None:
        """Record that the gate is open for a read, if it still waits."""
        if token in self._reads:
            self._past_gate[token] = None

    def take_readable(self, may_read: Callable[[int], bool]) -> list[object]:
        """Remove and return the reads that no longer wait, in the order in which they passed the gate."""
        found = [token for token in self._past_gate if may_read(self._reads[token].clock)]
        for token in found:
            self._drop(token)
        return found

    def take_late(self, time_s: float) -> list[object]:
        """Remove and return the reads whose deadline has passed."""
        late = [token for token, read in self._reads.items() if read.deadline_s <= time_s]
        for token in late:
            self._drop(token)
        return late

    def take_of(self, worker: int) -> list[object]:
        """Remove and return the reads of one worker."""
        found = [token for token, read in self._reads.items() if read.worker == worker]
        for token in found:
            self._drop(token)
        return found

    def take_all(self) -> list[object]:
        """Remove and return all reads."""
        found = list(self._reads)
        self._reads, self._past_gate = {}, {}
        return found

    def drop_all(self, is_meant: Callable[[object], bool]) -> None:
        """Drop the reads that `is_meant` selects."""
        for token in [token for token in self._reads if is_meant(token)]:
            self._drop(token)

    def _drop(self, token: object) -> None:
        self._reads.pop(token, None)
        self._past_gate.pop(token, None)
