"""Ranks that negotiate in one process. Their requests arrive at any moment of a round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from paceline.protocol.negotiation.negotiator import Negotiator
from paceline.protocol.negotiation.requests import (
    ALLREDUCE,
    EndJoin,
    FailRequest,
    NegotiationInstruction,
    RunOperation,
    TensorRequest,
)


def tensor(name: str, shape: tuple[int, ...] = (4,), **fields: object) -> TensorRequest:
    """Return a request, by default an all-reduce of float32."""
    values: dict[str, object] = {"operation": ALLREDUCE, "dtype": "float32", "num_bytes": 16, **fields}
    return TensorRequest(name=name, shape=shape, **values)  # type: ignore[arg-type]


@dataclass
class NegotiatingRanks:
    """All ranks of a program, and their instructions so far."""

    size: int
    capacity: int = 8
    threshold_bytes: int = 64
    num_reports: int = 0
    ranks: list[Negotiator] = field(default_factory=list)
    instructions: list[list[NegotiationInstruction]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranks = [
            Negotiator(rank, self.size, cache_capacity=self.capacity, fusion_threshold_bytes=self.threshold_bytes)
            for rank in range(self.size)
        ]
        self.instructions = [[] for _ in self.ranks]

    def request(self, requests: Iterable[TensorRequest], ranks: Sequence[int] | None = None) -> None:
        for request in requests:
            for rank in range(self.size) if ranks is None else ranks:
                self.ranks[rank].request({request.key: request})

    def run_round(self, between: Callable[[], None] = lambda: None) -> None:
        """Run one round. `between` is called between any two steps of any two ranks."""
        votes: list[int] = []
        for rank in self.ranks:
            votes.append(rank.vote())
            between()
        assert len({rank.num_bits for rank in self.ranks}) == 1
        bits = votes[0]
        for vote in votes:
            bits &= vote
        for number, rank in enumerate(self.ranks):
            self._carry_out(number, rank.agreed(bits))
            between()
        assert len({rank.needs_reports for rank in self.ranks}) == 1
        if self.ranks[0].needs_reports:
            self.num_reports += 1
            reports = []
            for rank in self.ranks:
                reports.append(rank.report())
                between()
            decision = self.ranks[0].decide(reports)
            for number, rank in enumerate(self.ranks):
                self._carry_out(number, rank.decided(decision))
                between()

    def run(self) -> None:
        """Run rounds until no rank needs a round."""
        for _ in range(100):
            if not any(rank.needs_round for rank in self.ranks):
                return
            self.run_round()
        raise AssertionError("the rounds do not end")

    def _carry_out(self, rank: int, instructions: Sequence[NegotiationInstruction]) -> None:
        self.instructions[rank] += instructions
        for instruction in instructions:
            match instruction:
                case RunOperation(_, _, keys):
                    self.ranks[rank].finished(keys)
                case FailRequest(key, _):
                    self.ranks[rank].finished([key])

    def operations(self, rank: int) -> list[tuple[str, ...]]:
        """Return the names of each operation that a rank was instructed to run."""
        found = self.instructions[rank]
        return [tuple(r.name for r in entry.requests) for entry in found if isinstance(entry, RunOperation)]

    def names(self, rank: int) -> list[str]:
        return [name for names in self.operations(rank) for name in names]

    def errors(self, rank: int) -> dict[str, str]:
        return {entry.key[1]: entry.error for entry in self.instructions[rank] if isinstance(entry, FailRequest)}

    def last_joined(self, rank: int) -> list[int]:
        return [entry.last for entry in self.instructions[rank] if isinstance(entry, EndJoin)]

    def clear(self) -> None:
        for instructions in self.instructions:
            instructions.clear()
