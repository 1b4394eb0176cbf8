"""Which values travel between stages: each once to every process that uses it. Pure.

The rule is that of TensorFlow's graph partition (``core/graph/graph_partition.cc``): one transfer for each value and
destination, however many users are there. Gradients go the same way back, summed at the user's process first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ValueRoute:
    """A value that more than one stage has to do with."""

    value: str
    source: int
    """The stage that computes it."""
    users: tuple[int, ...]
    """The later stages that use it, in order."""


@dataclass(frozen=True, slots=True)
class ValueRoutes:
    """All values that cross stages, and who runs which stage."""

    routes: tuple[ValueRoute, ...]
    places: tuple[int, ...]
    """By stage, its rank."""

    def inputs_of(self, stage: int) -> list[ValueRoute]:
        """Return what a stage takes from others."""
        return [route for route in self.routes if stage in route.users]

    def outputs_of(self, stage: int) -> list[ValueRoute]:
        """Return what a stage gives to others."""
        return [route for route in self.routes if route.source == stage]

    def destinations(self, route: ValueRoute) -> list[int]:
        """Return the ranks that a value is sent to: those of its users, but the one that computes it."""
        own = self.places[route.source]
        return sorted({self.places[user] for user in route.users} - {own})

    def first_user_on(self, route: ValueRoute, rank: int) -> int | None:
        """Return the earliest stage on a rank that uses a value; its backward is the last of them."""
        return min((user for user in route.users if self.places[user] == rank), default=None)

    def last_user_on(self, route: ValueRoute, rank: int) -> int | None:
        """Return the latest stage on a rank that uses a value; its forward is the last of them."""
        return max((user for user in route.users if self.places[user] == rank), default=None)

    def sources(self) -> list[list[int]]:
        """Return by stage the stages whose values it takes."""
        return [sorted({route.source for route in self.inputs_of(stage)}) for stage in range(len(self.places))]


def route_values(made_by: Mapping[str, int], used_by: Iterable[tuple[str, int]], places: Sequence[int]) -> ValueRoutes:
    """Return the routes, given the stage that makes each value and (value, stage) for each use."""
    users: dict[str, set[int]] = {}
    for value, stage in used_by:
        if stage != made_by[value]:
            users.setdefault(value, set()).add(stage)
    return ValueRoutes(
        tuple(ValueRoute(value, made_by[value], tuple(sorted(found))) for value, found in users.items()), tuple(places)
    )


def shared_parameters(used_by: Mapping[str, Iterable[int]], places: Sequence[int]) -> dict[str, list[int]]:
    """Return the parameters that stages on several ranks use, with those ranks: their gradients are summed."""
    found = {name: sorted({places[stage] for stage in stages}) for name, stages in used_by.items()}
    return {name: ranks for name, ranks in found.items() if len(ranks) > 1}
