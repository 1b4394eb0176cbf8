"""What a scheduler is doing: it forms a cluster or recovers one, leads it, and ends when another one has taken over."""

from __future__ import annotations

from enum import Enum
from typing import Final

from paceline.protocol.transitions import OUTSIDE, StateTable, Transition


class Phase(Enum):
    """What a scheduler is doing."""

    FORMING = "forming"
    """It waits for the servers that the cluster begins with."""
    RECOVERING = "recovering"
    """It waits for the members of a cluster whose scheduler died."""
    LEADING = "leading"
    SUPERSEDED = "superseded"
    """Another scheduler has taken over from it."""

    def after(self, event: str) -> Phase:
        """Return the phase that follows by an event of :data:`PHASE`."""
        return Phase(PHASE.target(self.value, event))


PHASE: Final = StateTable(
    "a scheduler",
    tuple(phase.value for phase in Phase),
    (
        Transition(OUTSIDE, "start", "forming"),
        Transition(OUTSIDE, "start", "recovering", when="it replaces another one"),
        Transition("forming", "Rejoin", "recovering"),
        Transition("forming", "form", "leading", when="the servers are there that it begins with"),
        Transition("recovering", "form", "leading", when="the same, and no server of another cluster came in time"),
        Transition("recovering", "give up", "forming", when="nobody has come, or all servers that had buckets ended"),
        Transition("recovering", "take over", "leading", "TakenOver", when="a quorum is back"),
        Transition("leading", "Rejoin", "superseded", "Superseded", when="of a later term"),
    ),
)
"""What becomes of a scheduler. In lower case: what any event may bring about."""
