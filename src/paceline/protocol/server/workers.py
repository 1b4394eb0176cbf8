"""One server's record of the workers: membership, participation in iterations, and clocks."""

from __future__ import annotations

from paceline.errors import ProtocolError
from paceline.protocol import clocks
from paceline.protocol.clocks import Gate
from paceline.protocol.consistency import Consistency, Sequential
from paceline.protocol.membership import Role
from paceline.protocol.scheduler.views import View
from paceline.protocol.server.events import Clocks

_MAX_AHEAD = 1 << 20  # iterations by which one worker may be ahead of another in a server's clocks


class Workers:
    """The workers of one server, and the :class:`Gate` that decides which iterations they may begin.

    The methods return instructions of the gate.
    """

    def __init__(self, consistency: Consistency, expected: int) -> None:
        self._consistency = consistency
        self._is_sequential = isinstance(consistency, Sequential)
        self.gate = Gate(consistency, expected)
        self.ranks: dict[int, int] = {}
        """Incarnation → rank of workers that have joined the iterations."""
        self.counted: set[int] = set()
        self.named: frozenset[int] = frozenset()
        """The workers that are members in the newest view, or that a new scheduler may readmit. Only they can join."""
        self.last_incarnation = 0
        """Processes with incarnations up to this one that are not members have left or died."""
        self.departed: set[int] = set()
        """Former members, which never rejoin with the same incarnation."""

    def is_excluded(self, incarnation: int) -> bool:
        """Whether a process has left or died. Incarnation 0, under which sums are stored, counts as excluded."""
        return incarnation < 1 or incarnation in self.departed

    def is_unnamed(self, worker: int) -> bool:
        """Whether a worker registered after this server's view was made."""
        return worker > self.last_incarnation and worker not in self.named

    def may_join(self, worker: int) -> bool:
        return worker in self.named and worker not in self.departed

    def has_started(self, worker: int, iteration: int) -> bool:
        """Whether a worker takes part in an iteration, or took part in it before it retired."""
        return worker in self.counted or (worker in self.ranks and iteration < self.gate.clocks[worker])

    def excluded_by(self, view: View) -> list[int]:
        """Apply a newer view; return the workers that have left, for which the caller calls :meth:`leave`."""
        self.last_incarnation = view.last_incarnation
        # A worker that joined and died between two views is in neither view, but the gate counts it. A worker with an
        # incarnation above `last_incarnation` may still reconnect to a new scheduler.
        absent = (self.named | self.counted) - view.incarnations
        excluded = {worker for worker in absent if worker <= view.last_incarnation}
        workers = frozenset(member.incarnation for member in view.of_role(Role.WORKER))
        self.named = workers | ((self.named & absent) - excluded)
        return sorted(excluded)

    def leave(self, worker: int) -> list[clocks.Instruction]:
        self.departed.add(worker)
        joined: list[clocks.Instruction] = []
        if worker not in self.ranks:  # this worker died before it joined, so the gate must not wait for it
            joined = self.gate.join(worker)
        self.counted.discard(worker)
        self.ranks.pop(worker, None)
        return joined + self.gate.depart(worker)

    def known_clocks(self) -> Clocks:
        known = tuple(
            (worker, self.ranks[worker], clock, worker in self.counted)
            for worker, clock in self.gate.clocks.items()
            if worker in self.ranks
        )
        return Clocks(known, self.gate.num_missing, self.gate.minimum)

    def check_clocks(self, known: Clocks) -> None:
        highest = max((clock for _, _, clock, _ in known.workers), default=0)
        if self._is_sequential and highest > known.minimum + _MAX_AHEAD:
            raise ProtocolError(
                f"a server's clocks have one worker in iteration {highest} and another in {known.minimum}: expected "
                f"a difference of at most {_MAX_AHEAD}"
            )

    def begin(self, num_missing: int, first_clock: int) -> None:
        self.gate = Gate(self._consistency, num_missing, first_clock=first_clock)
        self.ranks.clear()
        self.counted.clear()

    def take_clocks(self, known: Clocks) -> list[clocks.Instruction]:
        instructions: list[clocks.Instruction] = []
        # Counted workers join first, by ascending clock, because the first worker to join an empty gate sets the
        # minimum.
        for worker, rank, clock, counts in sorted(known.workers, key=lambda entry: (not entry[3], entry[2])):
            if worker in self.departed or worker in self.ranks:
                continue
            instructions += self._join(worker, rank, clock)
            if not counts:
                instructions += self.retire(worker)
        return instructions

    def join(self, worker: int, rank: int, clock: int) -> list[clocks.Instruction]:
        return self.gate.resume(worker) + self._join(worker, rank, clock)

    def sync(self, worker: int, rank: int, clock: int, counts: bool) -> list[clocks.Instruction]:
        instructions: list[clocks.Instruction] = []
        if worker not in self.gate.clocks:
            instructions += self._join(worker, rank, clock)
        elif counts and worker not in self.counted:
            self.counted.add(worker)
            instructions += self.gate.resume(worker)
        return instructions + self.gate.tick(worker, clock)

    def retire(self, worker: int) -> list[clocks.Instruction]:
        self.counted.discard(worker)
        return self.gate.finish(worker)

    def _join(self, worker: int, rank: int, clock: int) -> list[clocks.Instruction]:
        self.ranks[worker] = rank
        self.counted.add(worker)
        return self.gate.join(worker, clock)

    def validate(self) -> None:
        self.gate.validate()
        assert self.counted <= self.ranks.keys() == self.gate.clocks.keys(), "a worker that the gate lacks"
        assert not self.departed & self.ranks.keys(), "a departed worker takes part"
