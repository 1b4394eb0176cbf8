"""Deliberate defects, by which a test shows that the simulation finds what it is there to find."""

from __future__ import annotations

from enum import Enum
from typing import Final

from paceline.protocol.clocks import Gate
from paceline.protocol.delivery import Delivery
from paceline.protocol.iterations import Iterations
from paceline.protocol.replication import (
    Acknowledge,
    Event,
    Forget,
    Forward,
    Forwarded,
    Instruction,
    PushReceived,
    RefusePush,
    Replication,
)
from paceline.protocol.server import ServerCore


class Defect(Enum):
    """A rule that is broken on purpose."""

    ACKNOWLEDGE_EARLY = "acknowledge-early"
    """A push is acknowledged before the servers behind have it."""
    NO_FILTER = "no-filter"
    """A push that comes twice is applied twice."""
    GATE_OFF_BY_ONE = "gate-off-by-one"
    """An iteration may begin one iteration too early."""


class _EarlyReplication(Replication):
    def __init__(self, me: int, min_replicas: int = 0) -> None:
        super().__init__(me, min_replicas)
        self._over: set[int] = set()

    def handle(self, event: Event) -> list[Instruction]:
        instructions: list[Instruction] = []
        for instruction in super().handle(event):
            if isinstance(instruction, Acknowledge | RefusePush | Forget) and id(instruction.token) in self._over:
                continue
            instructions.append(instruction)
        if isinstance(event, PushReceived | Forwarded) and any(isinstance(each, Forward) for each in instructions):
            self._over.add(id(event.token))
            instructions.append(Acknowledge(event.token))
        return instructions


class _OpenDelivery(Delivery):
    def admit(self, incarnation: int, sequence: int, buckets: int | None = None) -> int:
        super().admit(incarnation, sequence, buckets)
        return self.buckets if buckets is None else buckets


class _OpenReplication(Replication):
    def __init__(self, me: int, min_replicas: int = 0) -> None:
        super().__init__(me, min_replicas)
        self._filter = _OpenDelivery(0)


class _OpenIterations(Iterations):
    def __init__(self, replication: Replication, first_clock: int = 0) -> None:
        super().__init__(replication, first_clock)
        self._parts = _OpenDelivery(0)


class _HastyIterations(Iterations):
    def may_read(self, clock: int) -> bool:
        return super().may_read(clock - 1)


class _HastyGate(Gate):
    def is_open(self, clock: int) -> bool:
        return super().is_open(clock - 1)


class _EarlyCore(ServerCore):
    replication_type = _EarlyReplication


class _OpenCore(ServerCore):
    replication_type = _OpenReplication
    iterations_type = _OpenIterations


class _HastyCore(ServerCore):
    gate_type = _HastyGate
    iterations_type = _HastyIterations


_CORES: Final[dict[Defect | None, type[ServerCore]]] = {
    None: ServerCore,
    Defect.ACKNOWLEDGE_EARLY: _EarlyCore,
    Defect.NO_FILTER: _OpenCore,
    Defect.GATE_OFF_BY_ONE: _HastyCore,
}


def server_core(defect: Defect | None) -> type[ServerCore]:
    """The class of servers' cores."""
    return _CORES[defect]
