"""The values between stages: each value is sent once to every process that uses it. Pure.

Source: TensorFlow's graph partition (``core/graph/graph_partition.cc``). Gradients return the same way, summed over the
users on a process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ValueRoute:
    """A value that one stage computes and later stages use."""

    value: str
    source: int
    users: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ValueRoutes:
    """All values that cross stages, and the rank of each stage."""

    routes: tuple[ValueRoute, ...]
    places: tuple[int, ...]

    def inputs_of(self, stage: int) -> list[ValueRoute]:
        return [route for route in self.routes if stage in route.users]

    def outputs_of(self, stage: int) -> list[ValueRoute]:
        return [route for route in self.routes if route.source == stage]

    def destinations(self, route: ValueRoute) -> list[int]:
        """Return the ranks of a value's users, without the rank that computes the value."""
        own = self.places[route.source]
        return sorted({self.places[user] for user in route.users} - {own})

    def first_user_on(self, route: ValueRoute, rank: int) -> int | None:
        """Return the first stage on a rank that uses a value. This stage goes backward last."""
        return min((user for user in route.users if self.places[user] == rank), default=None)

    def last_user_on(self, route: ValueRoute, rank: int) -> int | None:
        """Return the last stage on a rank that uses a value. This stage goes forward last."""
        return max((user for user in route.users if self.places[user] == rank), default=None)

    def sources(self) -> list[list[int]]:
        return [sorted({route.source for route in self.inputs_of(stage)}) for stage in range(len(self.places))]


def route_values(made_by: Mapping[str, int], used_by: Iterable[tuple[str, int]], places: Sequence[int]) -> ValueRoutes:
    """Return the routes, given the stage that computes each value, and (value, stage) of each use."""
    users: dict[str, set[int]] = {}
    for value, stage in used_by:
        if stage != made_by[value]:
            users.setdefault(value, set()).add(stage)
    routes = (ValueRoute(value, made_by[value], tuple(sorted(stages))) for value, stages in users.items())
    return ValueRoutes(tuple(routes), tuple(places))


def shared_parameters(used_by: Mapping[str, Iterable[int]], places: Sequence[int]) -> dict[str, list[int]]:
    """Return the parameters that stages on several ranks use, with these ranks: their gradients are summed."""
    all_ranks = {name: sorted({places[stage] for stage in stages}) for name, stages in used_by.items()}
    return {name: ranks for name, ranks in all_ranks.items() if len(ranks) > 1}
