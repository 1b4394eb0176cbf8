"""Predict the time of a pipeline's step: simulate its actions with the times of stages and transfers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.torch.strategies.pipeline.plan.orders import Orders
from paceline.torch.strategies.pipeline.run.actions import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """The times of one stage or layer for one microbatch, in seconds."""

    forward_s: float
    backward_s: float
    weights_s: float = 0.0
    """The part of the backward's time that zero-bubble schedules can defer."""
    halving_s: float = 0.0
    """The additional time of forward and backward if the backward is split into two actions."""
    first_s: float = 0.0
    """The additional time of a step's first backward, which allocates the gradients."""
    update_s: float = 0.0

    def of(self, action: Action) -> float:
        if action.kind == "F":
            return self.forward_s
        first_s = 0.0 if action.microbatch else self.first_s
        if action.kind == "B":
            return self.backward_s + first_s
        return self.weights_s + first_s if action.kind == "W" else self.backward_s + self.halving_s - self.weights_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The predicted times of a step."""

    step_s: float
    busy_s: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The fraction of the ranks' time that they spend waiting."""
        return 1 - sum(self.busy_s) / (self.step_s * len(self.busy_s)) if self.step_s else 0.0


def play(
    orders: Orders,
    places: Sequence[int],
    times: Sequence[StageTimes],
    transfer_s: Callable[[int], float],
    sending_s: Callable[[int], float] = lambda stage: 0.0,
) -> Timeline:
    """Simulate a step: an action begins when its rank is free and its inputs have arrived.

    ``transfer_s(stage)`` is the time of a message with a stage's inputs or their gradients. ``sending_s(stage)`` is the
    part of this time in which the sender is busy. Each rank updates its parameters after its actions. Raises ValueError
    for a deadlock.
    """
    ended: dict[tuple[str, int, int], float] = {}
    free, busy, at = [0.0] * len(orders), [0.0] * len(orders), [0] * len(orders)
    num_left = sum(len(row) for row in orders)
    while num_left:
        before = num_left
        for rank, row in enumerate(orders):
            while at[rank] < len(row):
                action = row[at[rank]]
                needed = _needs(action, len(places))
                if any(key not in ended for key in needed):
                    break
                begin = free[rank]
                for key in needed:
                    crosses = places[key[1]] != places[action.stage]
                    stage = action.stage if action.kind == "F" else key[1]
                    begin = max(begin, ended[key] + (transfer_s(stage) if crosses else 0.0))
                duration = times[action.stage].of(action)
                done = "G" if action.kind in ("B", "I") else action.kind
                ended[done, action.stage, action.microbatch] = begin + duration
                free[rank], busy[rank] = begin + duration, busy[rank] + duration
                sent_to = _next_stage(action)
                if 0 <= sent_to < len(places) and places[sent_to] != rank:
                    free[rank] += sending_s(max(sent_to, action.stage))
                at[rank] += 1
                num_left -= 1
        if num_left == before:
            stuck = [row[at[rank]] for rank, row in enumerate(orders) if at[rank] < len(row)]
            raise ValueError(
                "deadlock in the schedule: each of these next actions of the ranks needs a result that is not "
                f"computed: {stuck}"
            )
    for rank in range(len(orders)):
        update_s = sum(stage.update_s for stage, place in zip(times, places, strict=True) if place == rank)
        free[rank], busy[rank] = free[rank] + update_s, busy[rank] + update_s
    return Timeline(step_s=max(free, default=0.0), busy_s=tuple(busy))


def _needs(action: Action, num_stages: int) -> list[tuple[str, int, int]]:
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F":
        return [("F", stage - 1, microbatch)] if stage else []
    if action.kind == "W":
        return [("G", stage, microbatch)]
    gradients = [("G", stage + 1, microbatch)] if stage + 1 < num_stages else []
    return [("F", stage, microbatch), *gradients]


def _next_stage(action: Action) -> int:
    """Return the stage that uses an action's values or gradients; -1 if no stage uses them."""
    if action.kind == "W":
        return -1
    return action.stage + 1 if action.kind == "F" else action.stage - 1


def bubble_bound(num_ranks: int, num_microbatches: int) -> float:
    """Return the bubble of gpipe and 1f1b for equal stages and transfers without cost: (p - 1) / (m + p - 1)."""
    return (num_ranks - 1) / (num_microbatches + num_ranks - 1)
