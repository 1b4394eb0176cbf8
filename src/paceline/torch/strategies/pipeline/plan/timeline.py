"""How long a pipeline's step takes: its orders played through with the times of stages and transfers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.torch.strategies.pipeline.plan.orders import Orders
from paceline.torch.strategies.pipeline.run.actions import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """What one stage takes for one microbatch, in seconds."""

    forward_s: float
    backward_s: float
    weights_s: float = 0.0
    """Of backward, what can be put off."""
    halving_s: float = 0.0
    """What putting it off takes."""
    first_s: float = 0.0
    """What the first of a step's gradients of weights take more."""
    update_s: float = 0.0
    """What the optimizer takes, once a step."""

    def of(self, action: Action) -> float:
        """Return the time of an action."""
        if action.kind == "F":
            return self.forward_s
        first_s = 0.0 if action.microbatch else self.first_s
        if action.kind == "B":
            return self.backward_s + first_s
        return self.weights_s + first_s if action.kind == "W" else self.backward_s + self.halving_s - self.weights_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A step as it is predicted."""

    step_s: float
    busy_s: tuple[float, ...]
    """By rank, the time in which it computes."""

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they wait."""
        return 1 - sum(self.busy_s) / (self.step_s * len(self.busy_s)) if self.step_s else 0.0


def play(
    orders: Orders,
    places: Sequence[int],
    times: Sequence[StageTimes],
    transfer_s: Callable[[int], float],
    sending_s: Callable[[int], float] = lambda stage: 0.0,
    sources: Sequence[Sequence[int]] | None = None,
) -> Timeline:
    """Play the orders through: an action begins when its rank is free and what it needs has come.

    `transfer_s` of a stage is what it takes to bring it its inputs, or its gradients back, and `sending_s` what of that
    the sender cannot compute in. `sources` are, by stage, the stages whose values it takes; default: the one before.
    When all have computed, each rank updates its parameters. Raises ValueError if the orders wait for one another.
    """
    if sources is None:
        sources = [[stage - 1] if stage else [] for stage in range(len(places))]
    users: list[list[int]] = [[] for _ in places]
    for stage, found in enumerate(sources):
        for source in found:
            users[source].append(stage)
    ended: dict[tuple[str, int, int], float] = {}
    free, busy, at = [0.0] * len(orders), [0.0] * len(orders), [0] * len(orders)
    waiting = sum(len(row) for row in orders)
    while waiting:
        before = waiting
        for rank, row in enumerate(orders):
            while at[rank] < len(row):
                action = row[at[rank]]
                needed = _needs(action, sources, users)
                if any(key not in ended for key in needed):
                    break
                begin = free[rank]
                for key in needed:
                    crosses = places[key[1]] != places[action.stage]
                    stage = action.stage if action.kind == "F" else key[1]
                    begin = max(begin, ended[key] + (transfer_s(stage) if crosses else 0.0))
                took = times[action.stage].of(action)
                done = "G" if action.kind in ("B", "I") else action.kind
                ended[done, action.stage, action.microbatch] = begin + took
                free[rank], busy[rank] = begin + took, busy[rank] + took
                for stage in _crossings(action, sources, users, places):
                    free[rank] += sending_s(stage)
                at[rank] += 1
                waiting -= 1
        if waiting == before:
            stuck = [row[at[rank]] for rank, row in enumerate(orders) if at[rank] < len(row)]
            raise ValueError(f"the orders wait for one another: {stuck}")
    for rank in range(len(orders)):
        update_s = sum(each.update_s for each, place in zip(times, places, strict=True) if place == rank)
        free[rank], busy[rank] = free[rank] + update_s, busy[rank] + update_s
    return Timeline(step_s=max(free, default=0.0), busy_s=tuple(busy))


def _needs(
    action: Action, sources: Sequence[Sequence[int]], users: Sequence[Sequence[int]]
) -> list[tuple[str, int, int]]:
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F":
        return [("F", source, microbatch) for source in sources[stage]]
    if action.kind == "W":
        return [("G", stage, microbatch)]
    return [("F", stage, microbatch), *(("G", user, microbatch) for user in users[stage])]


def _crossings(
    action: Action, sources: Sequence[Sequence[int]], users: Sequence[Sequence[int]], places: Sequence[int]
) -> list[int]:
    """Return the stages whose inputs, or whose inputs' gradients, an action's rank sends to another rank after it."""
    own = places[action.stage]
    if action.kind == "F":
        return [user for user in users[action.stage] if places[user] != own]
    if action.kind == "W":
        return []
    return [action.stage for source in sources[action.stage] if places[source] != own]


def bubble_bound(num_ranks: int, num_microbatches: int) -> float:
    """Return the bubble of gpipe and 1f1b with equal stages and free transfers: (p - 1) / (m + p - 1)."""
    return (num_ranks - 1) / (num_microbatches + num_ranks - 1)
