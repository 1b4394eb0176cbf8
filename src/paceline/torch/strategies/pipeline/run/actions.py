"""The work of one rank as actions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B", "I", "W"]
"""Forward; backward; or its two halves, gradients of the inputs and of the weights."""


@dataclass(frozen=True, slots=True)
class Action:
    """One stage's work on one microbatch."""

    kind: Kind
    stage: int
    microbatch: int


class ActionError(Exception):
    """An action failed; the cause is its exception."""

    def __init__(self, action: Action) -> None:
        super().__init__(f"{action.kind}{action.microbatch} of stage {action.stage}")
        self.action = action
