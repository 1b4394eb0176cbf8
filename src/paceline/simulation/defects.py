"""Deliberate defects, by which a test shows that the simulation finds what it is there to find."""

from __future__ import annotations

from enum import Enum

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
    Push,
    Refuse,
    Replication,
)


class Defect(Enum):
    """A rule that is broken on purpose."""

    ACKNOWLEDGE_EARLY = "acknowledge-early"
    """A push is acknowledged before the servers behind have it."""
    NO_FILTER = "no-filter"
    """A push that comes twice is applied twice."""
    GATE_OFF_BY_ONE = "gate-off-by-one"
    """An iteration may begin one iteration too early."""


def replication_type(defect: Defect | None) -> type[Replication]:
    """The class of servers' Replication."""
    if defect is Defect.ACKNOWLEDGE_EARLY:
        return _EarlyReplication
    return _OpenReplication if defect is Defect.NO_FILTER else Replication


def iterations_type(defect: Defect | None) -> type[Iterations]:
    """The class of servers' Iterations."""
    if defect is Defect.GATE_OFF_BY_ONE:
        return _HastyIterations
    return _OpenIterations if defect is Defect.NO_FILTER else Iterations


def gate_type(defect: Defect | None) -> type[Gate]:
    """The class of servers' gates."""
    return _HastyGate if defect is Defect.GATE_OFF_BY_ONE else Gate


class _EarlyReplication(Replication):
    def __init__(self, me: int, min_replicas: int = 0) -> None:
        super().__init__(me, min_replicas)
        self._over: set[int] = set()

    def handle(self, event: Event) -> list[Instruction]:
        instructions: list[Instruction] = []
        for instruction in super().handle(event):
            if isinstance(instruction, Acknowledge | Refuse | Forget) and id(instruction.token) in self._over:
                continue
            instructions.append(instruction)
        if isinstance(event, Push | Forwarded) and any(isinstance(each, Forward) for each in instructions):
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
