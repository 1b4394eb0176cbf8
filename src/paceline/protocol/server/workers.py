"""The workers as one server knows them: who is a member, who takes part in the iterations, and where each stands."""

from __future__ import annotations

from paceline.errors import ProtocolError
from paceline.protocol import clocks
from paceline.protocol.clocks import Gate
from paceline.protocol.consistency import Consistency, Sequential
from paceline.protocol.iterations import Iterations, OnArrival
from paceline.protocol.server.events import Clocks, ViewChanged

_MAX_LEAP = 1 << 16  # iterations by which one frame may advance a worker's clock: more than it has frames under way
_MAX_AHEAD = 1 << 20  # iterations by which one worker may be ahead of another, as a server tells


class Workers:
    """The gate of one server, and who may pass it.

    `expected` workers must have joined before the first iteration can complete. What returns instructions returns those
    of the gate.
    """

    def __init__(self, consistency: Consistency, expected: int) -> None:
        self._consistency = consistency
        self._is_sequential = isinstance(consistency, Sequential)
        self.gate = Gate(consistency, expected)
        self.ranks: dict[int, int] = {}
        """Incarnation → rank of workers that have joined the iterations."""
        self.counted: set[int] = set()
        """Those of them that take part now."""
        self.named: frozenset[int] = frozenset()
        """The workers that are members by the newest view, or may be: nobody else joins."""
        self.last_incarnation = 0
        """Whoever has an incarnation up to this one, and is no member, is gone."""
        self.gone: set[int] = set()
        """Former members: they never come back."""

    def is_gone(self, incarnation: int) -> bool:
        """Whether a process has left or is dead, as far as is known; 0, the number of sums, never was a member."""
        return incarnation < 1 or incarnation in self.gone

    def is_unnamed(self, worker: int) -> bool:
        """Whether a worker is newer than the view that is here."""
        return worker > self.last_incarnation and worker not in self.named

    def may_join(self, worker: int) -> bool:
        """Whether a worker is a member, as far as is known."""
        return worker in self.named and worker not in self.gone

    def has_begun(self, worker: int, iteration: int) -> bool:
        """Whether a worker takes part in an iteration, or took part in it before it retired."""
        return worker in self.counted or (worker in self.ranks and iteration < self.gate.clocks[worker])

    # Views.

    def excluded_by(self, view: ViewChanged) -> list[int]:
        """Take note of a newer view; return the workers that are gone by it: see :meth:`leave`."""
        self.last_incarnation = view.last_incarnation
        # Who joined and died between two views was in neither; who is above the last may come yet to a new scheduler.
        absent = (self.named | self.counted) - view.members
        gone = {worker for worker in absent if worker <= view.last_incarnation}
        self.named = view.workers | ((self.named & absent) - gone)
        return sorted(gone)

    def leave(self, worker: int) -> list[clocks.Instruction]:
        """Wait for a worker never again."""
        self.gone.add(worker)
        joined: list[clocks.Instruction] = []
        if worker not in self.ranks:  # it died on its way here: the others must not wait for it to join
            joined = self.gate.handle(clocks.Join(worker))
        self.counted.discard(worker)
        self.ranks.pop(worker, None)
        return joined + self.gate.handle(clocks.Depart(worker))

    # Another server's clocks.

    def known_clocks(self) -> Clocks:
        """Return what a server that is being filled has to know."""
        known = tuple(
            (worker, self.ranks[worker], clock, worker in self.counted)
            for worker, clock in self.gate.clocks.items()
            if worker in self.ranks
        )
        return Clocks(known, self.gate.num_missing, self.gate.minimum)

    def check_clocks(self, known: Clocks) -> None:
        """Raise ProtocolError unless another server's clocks can be true."""
        highest = max((clock for _, _, clock, _ in known.workers), default=0)
        if self._is_sequential and highest > known.minimum + _MAX_AHEAD:
            raise ProtocolError(
                f"clocks from a server say that a worker is in iteration {highest}, and others in {known.minimum}: at "
                f"most {_MAX_AHEAD} iterations can be under way"
            )

    def begin(self, num_missing: int, first_clock: int) -> None:
        """Begin anew at `first_clock`, without any worker."""
        self.gate = Gate(self._consistency, num_missing, first_clock=first_clock)
        self.ranks.clear()
        self.counted.clear()

    def take_clocks(self, known: Clocks) -> list[clocks.Instruction]:
        """Take note of the workers that are not known here."""
        instructions: list[clocks.Instruction] = []
        # Those who count first, the lowest first: the first who joins an empty gate says where it stands.
        for worker, rank, clock, counts in sorted(known.workers, key=lambda each: (not each[3], each[2])):
            if worker in self.gone or worker in self.ranks:
                continue
            instructions += self._join(worker, rank, clock)
            if not counts:
                instructions += self.retire(worker)
        return instructions

    # What workers say.

    def join(self, worker: int, rank: int, clock: int) -> list[clocks.Instruction]:
        """Have a worker take part from iteration `clock` or later."""
        return self.gate.handle(clocks.Resume(worker)) + self._join(worker, rank, clock)

    def sync(self, worker: int, rank: int, clock: int, counts: bool) -> list[clocks.Instruction]:
        """Take the word for its clock of a worker that has taken part, and for whether it does now."""
        instructions: list[clocks.Instruction] = []
        if worker not in self.gate.clocks:
            instructions += self._join(worker, rank, clock)
        elif counts and worker not in self.counted:
            self.counted.add(worker)
            instructions += self.gate.handle(clocks.Resume(worker))
        return instructions + self.gate.handle(clocks.Tick(worker, clock))

    def tick(self, worker: int, clock: int) -> list[clocks.Instruction]:
        """Note that a worker has finished `clock` iterations."""
        return self.gate.handle(clocks.Tick(worker, clock)) if worker in self.counted else []

    def retire(self, worker: int) -> list[clocks.Instruction]:
        """Wait for a worker no more until it joins again."""
        self.counted.discard(worker)
        return self.gate.handle(clocks.Finish(worker))

    def check_leap(self, worker: int, clock: int, updates: Iterations | OnArrival) -> None:
        """Raise ProtocolError if a worker says that it has finished iterations that it cannot have begun.

        Each of them is completed by itself under sequential consistency, and so many at once would hold up everybody.
        """
        if not self._is_sequential:
            return
        known = max(self.gate.clocks.get(worker, 0), self.gate.minimum)
        if clock > known + _MAX_LEAP and clock > (known := max(known, updates.first_clock)) + _MAX_LEAP:
            raise ProtocolError(
                f"a worker (incarnation {worker}) went from iteration {known} to {clock} at once: at most {_MAX_LEAP} "
                "iterations can be under way"
            )

    def _join(self, worker: int, rank: int, clock: int) -> list[clocks.Instruction]:
        self.ranks[worker] = rank
        self.counted.add(worker)
        return self.gate.handle(clocks.Join(worker, clock))

    def validate(self) -> None:
        """Assert the invariants."""
        self.gate.validate()
        assert self.counted <= self.ranks.keys() == self.gate.clocks.keys(), "a worker that the gate does not know"
        assert not self.gone & self.ranks.keys(), "a worker that is gone takes part"
