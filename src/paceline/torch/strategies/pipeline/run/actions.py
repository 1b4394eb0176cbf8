"""Define the actions of a rank: forwards and backwards of its stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B", "I", "W"]
"""Forward (F), backward (B), or one half of a split backward: gradients of the inputs (I) or of the weights (W)."""


@dataclass(frozen=True, slots=True)
class Action:
    """One stage's work on one microbatch."""

    kind: Kind
    stage: int
    microbatch: int


class ActionError(Exception):
    """Raised if an action failed. The ``__cause__`` of this error is the exception that the action raised."""

    def __init__(self, action: Action) -> None:
        super().__init__(f"{action.kind}{action.microbatch} of stage {action.stage}")
        self.action = action
