"""The gate of one server: the vector clock determines which iterations workers may begin.

Every worker sends a *tick* to every server when it finishes an iteration. So each gate decides alone, without a central
coordinator. Comments refer to the rules of section "Clocks and the gate" in docs/explanation/protocol.md.

Source: OSDI'14 "Scaling Distributed Machine Learning with the Parameter Server", sections 3.4 (flexible consistency)
and 4.1 (vector clocks); the clocks are those of Lamport 1978 and Mattern 1988.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

from paceline.errors import UsageError
from paceline.protocol.consistency import Consistency, Sequential
from paceline.protocol.transitions import OUTSIDE, StateTable, Transition


class VectorClock:
    """The number of finished iterations of each worker (by id), and the minimum over the counted workers.

    The counted workers are the members that have not finished, and the missing expected workers. Until ``num_expected``
    workers have joined, each missing worker has the clock ``first_clock``, so that the first workers wait. Without
    counted workers, the minimum is the highest clock so far. The minimum never decreases.
    """

    def __init__(self, num_expected: int = 0, first_clock: int = 0) -> None:
        self._clocks: dict[int, int] = {}  # every member
        self._finished: set[int] = set()  # finished members, whose clocks do not count
        self._seen: set[int] = set()  # expected workers that have joined
        self._num_missing = num_expected
        self._first_clock = first_clock
        self._tally: dict[int, int] = {first_clock: num_expected} if num_expected else {}  # clock → number of workers
        self._minimum = first_clock
        self._highest = first_clock

    @property
    def minimum(self) -> int:
        """The smallest clock of the counted workers: unfinished members and missing expected workers. O(1)."""
        return self._minimum

    @property
    def num_missing(self) -> int:
        return self._num_missing

    @property
    def clocks(self) -> Mapping[int, int]:
        """Every member's clock, including finished members. The mapping is read-only and always current."""
        return MappingProxyType(self._clocks)

    def counts(self, worker: int) -> bool:
        return worker in self._clocks and worker not in self._finished

    def join(self, worker: int, clock: int = 0) -> int:
        """Add a worker, or raise the clock of a member; return its clock."""
        if worker in self._clocks:
            self.tick(worker, clock)
            return self._clocks[worker]
        start = max(self._minimum, clock)
        self._clocks[worker] = start
        self._highest = max(self._highest, start)
        self._add(start)
        if self._num_missing and worker not in self._seen:
            self._seen.add(worker)
            self._num_missing -= 1
            self._remove(self._first_clock)
        return start

    def leave(self, worker: int) -> None:
        """Remove a worker; unknown workers are ignored."""
        counted = self.counts(worker)
        clock = self._clocks.pop(worker, None)
        self._finished.discard(worker)
        if counted and clock is not None:
            self._remove(clock)

    def finish(self, worker: int) -> None:
        if self.counts(worker):
            self._finished.add(worker)
            self._remove(self._clocks[worker])

    def resume(self, worker: int) -> None:
        """Count a finished member again; ignore other workers."""
        if worker in self._finished:
            self._finished.remove(worker)
            start = self._clocks[worker] = max(self._minimum, self._clocks[worker])
            self._add(start)

    def tick(self, worker: int, clock: int) -> bool:
        """Raise a member's clock; return False if the worker is not a member or its clock does not rise.

        A rise by one takes O(1).
        """
        before = self._clocks.get(worker)
        if before is None or clock <= before:
            return False
        self._clocks[worker] = clock
        self._highest = max(self._highest, clock)
        if worker not in self._finished:
            self._add(clock)
            self._remove(before)
        elif not self._tally:
            self._minimum = self._highest
        return True

    def lagging(self, below: int) -> tuple[int, ...]:
        """Return the counted workers with a clock below `below`, ascending. O(workers)."""
        return tuple(sorted(w for w, c in self._clocks.items() if c < below and w not in self._finished))

    def _add(self, clock: int) -> None:
        if not self._tally:
            self._minimum = clock
        self._tally[clock] = self._tally.get(clock, 0) + 1

    def _remove(self, clock: int) -> None:
        self._tally[clock] -= 1
        if self._tally[clock]:
            return
        del self._tally[clock]
        if clock == self._minimum:
            # If the last worker at the minimum ticks once, its new clock is the new minimum: O(1). The distinct
            # clocks are searched only after a leave, a finish or a jump of a clock.
            self._minimum = clock + 1 if clock + 1 in self._tally else min(self._tally, default=self._highest)

    def validate(self) -> None:
        counted = [c for w, c in self._clocks.items() if w not in self._finished]
        counted += [self._first_clock] * self._num_missing
        assert self._minimum == min(counted, default=self._highest)
        assert sum(self._tally.values()) == len(counted)
        assert all(n == counted.count(c) and n > 0 for c, n in self._tally.items())
        assert self._finished <= self._clocks.keys()
        assert self._highest >= max(self._clocks.values(), default=self._minimum)


@dataclass(frozen=True, slots=True)
class Complete:
    """Sequential only: sum the pushes of ``workers`` in ``iteration``, in this order, and apply the sum once.

    ``workers`` have ticked the iteration. Pushes of other workers are dropped, because they died or retired before
    their tick.
    """

    iteration: int
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unblock:
    """Serve the request with this ticket."""

    ticket: object


Instruction: TypeAlias = Complete | Unblock

WORKER: Final = StateTable(
    "a worker at the gate",
    ("counting", "finished"),
    (
        Transition(OUTSIDE, "join", "counting"),
        Transition("counting", "join", "counting"),
        Transition("counting", "tick", "counting"),
        Transition("counting", "finish", "finished"),
        Transition("finished", "resume", "counting"),
        Transition("finished", "join", "finished"),
        Transition("finished", "tick", "finished"),
        Transition("counting", "depart", OUTSIDE),
        Transition("finished", "depart", OUTSIDE),
    ),
)


class Gate:
    """Decides which worker may begin which iteration, at one server.

    The minimum stays at ``first_clock`` until ``expected_workers`` distinct workers have joined. A worker id is one
    incarnation. A runtime that reuses ids (ranks) must drop a worker's buffered pushes of unfinished iterations when
    the worker leaves.

    Raises UsageError if ``expected_workers`` or ``first_clock`` is negative.
    """

    def __init__(self, consistency: Consistency, expected_workers: int = 1, *, first_clock: int = 0) -> None:
        if expected_workers < 0 or first_clock < 0:
            raise UsageError(
                f"Gate(expected_workers={expected_workers}, first_clock={first_clock}): expected both to be at least 0."
            )
        self.consistency = consistency
        self._tau = consistency.tau
        self._aggregates = isinstance(consistency, Sequential)
        self._vector = VectorClock(expected_workers, first_clock)
        self._held: dict[int, list[tuple[int, object]]] = {}  # clock → workers and tickets, in order of arrival
        self._ticked: dict[int, set[int]] = {}  # incomplete iteration → the workers that ticked it
        # the minimum at which iterations were last completed and requests last released
        self._seen_minimum = first_clock

    @property
    def minimum(self) -> int:
        """The number of iterations that every counted worker has finished. O(1)."""
        return self._vector.minimum

    @property
    def num_missing(self) -> int:
        """The number of expected workers that have not joined yet; until then the minimum does not rise."""
        return self._vector.num_missing

    @property
    def clocks(self) -> Mapping[int, int]:
        return self._vector.clocks

    def is_open(self, clock: int) -> bool:
        """Whether iteration ``clock`` may begin. O(1)."""
        # Rule 1: a worker may begin iteration t once every live worker has finished iteration t - tau - 1.
        return self._tau is None or self._vector.minimum >= clock - self._tau

    def lagging(self, clock: int) -> tuple[int, ...]:
        """Return the workers that a request for iteration ``clock`` waits for; see also :attr:`num_missing`."""
        return () if self._tau is None else self._vector.lagging(clock - self._tau)

    def begin(self, worker: int, clock: int, ticket: object) -> list[Instruction]:
        """Request to begin iteration `clock`. This call or a later call returns an Unblock with `ticket`."""
        if self.is_open(clock):
            return [Unblock(ticket)]
        self._held.setdefault(clock, []).append((worker, ticket))
        return []

    def tick(self, worker: int, clock: int) -> list[Instruction]:
        """Record that a worker has finished `clock` iterations. A tick that does not raise its clock is a duplicate."""
        before = self._vector.clocks.get(worker, clock)
        if self._vector.tick(worker, clock) and self._aggregates:
            # Iterations below the minimum are complete, so late ticks of a finished worker are not recorded there.
            for iteration in range(max(before, self._seen_minimum), clock):
                self._ticked.setdefault(iteration, set()).add(worker)
        return self._advance()

    def join(self, worker: int, clock: int = 0) -> list[Instruction]:
        """Add a worker. The worker starts at the minimum clock, or at `clock` if that is higher.

        A second join of a member raises its clock to `clock`, without ticks for the skipped iterations.
        """
        self._vector.join(worker, clock)
        return self._advance()

    def depart(self, worker: int) -> list[Instruction]:
        # Rule 2: the clock of a worker that leaves is no longer counted. Its requests are dropped.
        self._vector.leave(worker)
        self._forget_requests(worker)
        return self._advance()

    def finish(self, worker: int) -> list[Instruction]:
        # Rule 3: the clock of a finished worker is not counted. The worker stays a member, and may still send requests.
        self._vector.finish(worker)
        return self._advance()

    def resume(self, worker: int) -> list[Instruction]:
        """Count a finished worker again. It continues at the minimum clock, or at its own clock if that is higher."""
        self._vector.resume(worker)
        return self._advance()

    def _advance(self) -> list[Instruction]:
        minimum = self._vector.minimum
        if minimum == self._seen_minimum:
            return []
        instructions: list[Instruction] = []
        if self._aggregates:
            # Rule 4: complete iterations in order, each once. Release requests for later iterations afterwards.
            for iteration in range(self._seen_minimum, minimum):
                workers = tuple(sorted(self._ticked.pop(iteration, ())))
                instructions.append(Complete(iteration, workers))
        self._seen_minimum = minimum
        # Rule 5: the event that opens the gate also releases the waiting requests, those for older iterations first.
        for clock in sorted(c for c in self._held if self.is_open(c)):
            instructions += [Unblock(ticket) for _, ticket in self._held.pop(clock)]
        return instructions

    def _forget_requests(self, worker: int) -> None:
        for clock in list(self._held):
            kept = [request for request in self._held[clock] if request[0] != worker]
            if kept:
                self._held[clock] = kept
            else:
                del self._held[clock]

    def validate(self) -> None:
        self._vector.validate()
        assert self._seen_minimum == self._vector.minimum, "the minimum moved without instructions"
        assert not any(self.is_open(clock) for clock in self._held), "a request is held at an open gate"
        assert all(self._held.values())
        assert all(iteration >= self._seen_minimum for iteration in self._ticked)
        assert self._aggregates or not self._ticked
