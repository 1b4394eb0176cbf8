"""Events that stand for pushes, for tests of replication."""

from __future__ import annotations

from typing import NamedTuple

from paceline.protocol.replication import Instruction, Replication
from paceline.protocol.replication.events import Event


class Pushed(NamedTuple):
    """A client's push, or this server's sum, in the current version."""

    token: object
    incarnation: int
    sequence: int
    buckets: int


def handle(replication: Replication, event: Event | Pushed) -> list[Instruction]:
    """Apply an event or a push, and check the invariants."""
    out = replication.push(*event) if isinstance(event, Pushed) else replication.handle(event)
    replication.validate()
    return out
