"""Rules of the protocol that tests break. The keys are the guarantees that are violated then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

from paceline.protocol.clocks import Gate
from paceline.protocol.delivery import Delivery
from paceline.protocol.iterations import Iterations
from paceline.protocol.replication import Acknowledge, Forget, Forward, Forwarded, Instruction, RefusePush, Replication
from paceline.protocol.replication.events import Event


def repeat_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apply repeated pushes again."""
    missing, admit = Delivery.missing, Delivery.admit

    def extent(delivery: Delivery, buckets: int | None) -> int:
        return delivery.buckets if buckets is None else buckets

    def find_all(delivery: Delivery, incarnation: int, sequence: int, buckets: int | None = None) -> int:
        missing(delivery, incarnation, sequence, buckets)
        return extent(delivery, buckets)

    def admit_all(delivery: Delivery, incarnation: int, sequence: int, buckets: int | None = None) -> int:
        admit(delivery, incarnation, sequence, buckets)
        return extent(delivery, buckets)

    monkeypatch.setattr(Delivery, "missing", find_all)
    monkeypatch.setattr(Delivery, "admit", admit_all)


def acknowledge_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acknowledge a push before the successors have it."""
    handle, push = Replication.handle, Replication.push
    acknowledged: set[int] = set()
    tokens: list[object] = []  # stored, so that ids stay unique

    def acknowledge(token: object, instructions: list[Instruction]) -> list[Instruction]:
        if any(isinstance(instruction, Forward) for instruction in instructions):
            acknowledged.add(id(token))
            tokens.append(token)
            instructions.append(Acknowledge(token))
        return instructions

    def push_early(
        core: Replication, token: object, incarnation: int, sequence: int, buckets: int
    ) -> list[Instruction]:
        return acknowledge(token, push(core, token, incarnation, sequence, buckets))

    def handle_early(core: Replication, event: Event) -> list[Instruction]:
        done = (Acknowledge, RefusePush, Forget)
        instructions = [
            action
            for action in handle(core, event)
            if not (isinstance(action, done) and id(action.token) in acknowledged)
        ]
        return acknowledge(event.token, instructions) if isinstance(event, Forwarded) else instructions

    monkeypatch.setattr(Replication, "push", push_early)
    monkeypatch.setattr(Replication, "handle", handle_early)


def open_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open the gate an iteration too early."""
    may_read, is_open = Iterations.may_read, Gate.is_open
    monkeypatch.setattr(Iterations, "may_read", lambda iterations, clock: may_read(iterations, clock - 1))
    monkeypatch.setattr(Gate, "is_open", lambda gate, clock: is_open(gate, clock - 1))


BREAK: Final[dict[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "no acknowledged push is lost": acknowledge_early,
    "exactly once": repeat_all,
    "gate": open_early,
}
