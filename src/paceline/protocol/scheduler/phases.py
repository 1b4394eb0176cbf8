"""The phases of a scheduler: it forms or recovers a cluster, leads it, and ends when another scheduler takes over."""

from __future__ import annotations

from enum import Enum
from typing import Final

from paceline.protocol.transitions import OUTSIDE, StateTable, Transition


class Phase(Enum):
    """The phase of a scheduler."""

    FORMING = "forming"
    """It waits for the first servers of the cluster."""
    RECOVERING = "recovering"
    """It waits for the members of a cluster whose scheduler died."""
    LEADING = "leading"
    SUPERSEDED = "superseded"
    """Another scheduler has taken over from it."""

    def after(self, event: str) -> Phase:
        """Return the phase after an event of :data:`PHASE`."""
        return Phase(PHASE.target(self.value, event))


PHASE: Final = StateTable(
    "a scheduler",
    tuple(phase.value for phase in Phase),
    (
        Transition(OUTSIDE, "start", "forming"),
        Transition(OUTSIDE, "start", "recovering", when="it replaces another one"),
        Transition("forming", "Rejoin", "recovering"),
        Transition("forming", "form", "leading", when="its first servers have registered"),
        Transition("recovering", "form", "leading", when="the same, and no server has rejoined in time"),
        Transition(
            "recovering", "give up", "forming", when="no member is back, or all servers with buckets have ended"
        ),
        Transition("recovering", "take over", "leading", "TakenOver", when="a quorum is back"),
        Transition("leading", "Rejoin", "superseded", "Superseded", when="of a later term"),
    ),
)
"""Names in lower case are consequences of any event that completes a condition."""
