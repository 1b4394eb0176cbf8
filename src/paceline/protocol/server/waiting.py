"""What waits at a server: requests that came too early, and reads that may not be answered yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from paceline.protocol.server.events import Read, Timing

KEPT = (Timing.EARLY, Timing.UNNAMED, Timing.BEFORE_CLOCKS)
"""Why a request may be kept."""


class EarlyRequests:
    """The requests that are kept, in the order in which they came."""

    def __init__(self) -> None:
        self._requests: dict[Timing, list[tuple[int, object]]] = {timing: [] for timing in KEPT}
        self.is_empty = True

    def __iter__(self) -> Iterator[object]:
        """Yield all that are kept."""
        for requests in self._requests.values():
            for _, token in requests:
                yield token

    def has_of(self, sender: int) -> bool:
        """Whether a request of this process waits for a view."""
        return any(sender == other for other, _ in self._requests[Timing.EARLY])

    def keep(self, timing: Timing, sender: int, token: object) -> None:
        """Keep a request of a process."""
        self._requests[timing].append((sender, token))
        self.is_empty = False

    def take(self, timing: Timing) -> list[object]:
        """Return the requests that were kept for one reason, and keep them no more."""
        requests, self._requests[timing] = self._requests[timing], []
        self._note_empty()
        return [token for _, token in requests]

    def drop(self, is_meant: Callable[[object], bool]) -> None:
        """Forget the requests that are meant."""
        for timing, requests in self._requests.items():
            if requests:
                self._requests[timing] = [each for each in requests if not is_meant(each[1])]
        self._note_empty()

    def _note_empty(self) -> None:
        self.is_empty = not any(self._requests.values())


class BlockedReads:
    """The reads that wait: for the gate, then for a takeover to be over and for the chain to have what they read."""

    def __init__(self) -> None:
        self._reads: dict[object, Read] = {}
        self._past_gate: dict[object, None] = {}

    def __len__(self) -> int:
        return len(self._reads)

    def __iter__(self) -> Iterator[object]:
        """Yield the tokens of all."""
        return iter(self._reads)

    @property
    def has_passed_gate(self) -> bool:
        """Whether the gate is open for a read that waits."""
        return bool(self._past_gate)

    def block(self, read: Read) -> None:
        """Have a read wait."""
        self._reads[read.token] = read

    def pass_gate(self, token: object) -> None:
        """Note that the gate is open for a read, if it still waits."""
        if token in self._reads:
            self._past_gate[token] = None

    def take_readable(self, may_read: Callable[[int], bool]) -> list[object]:
        """Return the reads that need not wait any more, in the order in which the gate let them pass."""
        found = [token for token in self._past_gate if may_read(self._reads[token].clock)]
        for token in found:
            self._drop(token)
        return found

    def take_late(self, now_s: float) -> list[object]:
        """Return the reads whose deadline has passed."""
        late = [token for token, read in self._reads.items() if read.deadline_s <= now_s]
        for token in late:
            self._drop(token)
        return late

    def take_of(self, worker: int) -> list[object]:
        """Return the reads of one worker."""
        found = [token for token, read in self._reads.items() if read.worker == worker]
        for token in found:
            self._drop(token)
        return found

    def take_all(self) -> list[object]:
        """Return all reads."""
        found = list(self._reads)
        self._reads, self._past_gate = {}, {}
        return found

    def drop_all(self, is_meant: Callable[[object], bool]) -> None:
        """Forget the reads that are meant."""
        for token in [token for token in self._reads if is_meant(token)]:
            self._drop(token)

    def _drop(self, token: object) -> None:
        self._reads.pop(token, None)
        self._past_gate.pop(token, None)
