"""A graph of operations cut over devices: pure rules on names, tested without tensors.

An edge between two devices becomes a transfer, one for each value and destination, however many operations of that
device take the value: as TensorFlow's partitioner inserts one pair of send and receive for each source, output and
destination (``graph_partition.cc``; Abadi et al., OSDI 2016, section 3.3). Backward, the same transfers carry the
gradients the other way, and the sum over a destination's operations travels, once.

What lies between transfers is a segment: operations of one device that run one after the other once all that they take
from elsewhere has arrived. A value that is sent ends its segment, so that it leaves at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

CALLER: Final = -1
"""Stands for a device: where the arguments are."""


@dataclass(frozen=True)
class Operation:
    """An operation of a graph, which has one value."""

    name: str
    inputs: tuple[str, ...] = ()
    """The operations and arguments whose values it takes, each once."""
    after: tuple[str, ...] = ()
    """Operations that must have run before, though it takes no value of theirs."""


@dataclass(frozen=True)
class Transfer:
    """A value that goes from one device to another, and whose gradient comes back."""

    value: str
    source: int
    destination: int


@dataclass(frozen=True)
class GraphSegment:
    """Operations of one device between two transfers, in the order in which they run."""

    device: int
    operations: tuple[str, ...]
    inputs: tuple[str, ...]
    """Values of other segments and arguments that it takes, each once."""
    outputs: tuple[str, ...]
    """Its values that others take, or that are the graph's."""
    waits_for: tuple[int, ...]
    """The segments, by place in :attr:`CutGraph.segments`, that must have ended before."""


@dataclass(frozen=True)
class CutGraph:
    """The segments of a graph, each behind those that it waits for, and the transfers between devices."""

    segments: tuple[GraphSegment, ...]
    transfers: tuple[Transfer, ...]

    @cached_property
    def destinations(self) -> dict[str, list[int]]:
        """The devices that values are sent to, by value."""
        found: dict[str, list[int]] = {}
        for each in self.transfers:
            found.setdefault(each.value, []).append(each.destination)
        return found


def cut_graph(operations: Sequence[Operation], devices: Mapping[str, int], outputs: Collection[str]) -> CutGraph:
    """Cut a graph whose operations are placed on devices.

    `operations` in an order in which they may run; `devices` has the number of each one's device; inputs that are no
    operations are arguments. `outputs` are the values of the graph: they stay where they are.
    """
    transfers: dict[Transfer, None] = {}
    for operation in operations:
        for value in operation.inputs:
            source = devices.get(value, CALLER)
            if source != devices[operation.name]:
                transfers[Transfer(value, source, devices[operation.name])] = None
    segments = _find_segments(operations, devices, {each.value for each in transfers})
    return CutGraph(_describe_segments(operations, devices, outputs, segments), tuple(transfers))


def _find_segments(
    operations: Sequence[Operation], devices: Mapping[str, int], sent: Collection[str]
) -> dict[str, str]:
    """Return the segment of each operation, by the name of an operation in it.

    The level of an operation is the greatest number of segments' ends on a way to it. Operations of one device and
    level, one of which takes another's value, are a segment: a way that leaves it cannot come back, since it would end
    a segment, and levels never fall. What takes nothing, such as a parameter, runs with the first that takes it there.
    """
    levels: dict[str, int] = {}
    leader: dict[str, str] = {}

    def leader_of(name: str) -> str:
        while leader[name] != name:
            leader[name] = leader[leader[name]]
            name = leader[name]
        return name

    waiting = {
        operation.name
        for operation in operations
        if not (operation.inputs or operation.after or operation.name in sent)
    }
    for operation in operations:
        name = operation.name
        before = [each for each in (*operation.inputs, *operation.after) if each in levels]
        leader[name] = name
        levels[name] = max(
            (levels[each] + (devices[each] != devices[name] or each in sent) for each in before), default=0
        )
        for each in before:
            if devices[each] != devices[name]:
                waiting.discard(each)
            elif each in waiting:
                waiting.remove(each)
                levels[each] = levels[name]
            if devices[each] == devices[name] and levels[each] == levels[name]:
                leader[leader_of(each)] = name
    return {operation.name: leader_of(operation.name) for operation in operations}


def _describe_segments(
    operations: Sequence[Operation],
    devices: Mapping[str, int],
    outputs: Collection[str],
    segment_of: Mapping[str, str],
) -> tuple[GraphSegment, ...]:
    members: dict[str, list[Operation]] = {}
    taken = set(outputs)
    for operation in operations:
        members.setdefault(segment_of[operation.name], []).append(operation)
        taken.update(each for each in operation.inputs if segment_of.get(each) != segment_of[operation.name])
    waits = {
        leader: {
            segment_of[each]
            for operation in its
            for each in (*operation.inputs, *operation.after)
            if segment_of.get(each, leader) != leader
        }
        for leader, its in members.items()
    }
    order = _sorted_by_dependence(waits)
    place = {leader: number for number, leader in enumerate(order)}
    return tuple(
        GraphSegment(
            device=devices[leader],
            operations=tuple(each.name for each in members[leader]),
            inputs=tuple(
                dict.fromkeys(
                    value
                    for operation in members[leader]
                    for value in operation.inputs
                    if segment_of.get(value) != leader
                )
            ),
            outputs=tuple(each.name for each in members[leader] if each.name in taken),
            waits_for=tuple(sorted(place[each] for each in waits[leader])),
        )
        for leader in order
    )


def _sorted_by_dependence(waits: Mapping[str, set[str]]) -> list[str]:
    order: dict[str, None] = {}
    missing = dict(waits)
    while missing:
        ready = [leader for leader, its in missing.items() if its <= order.keys()]
        for leader in ready:
            order[leader] = None
            del missing[leader]
    return list(order)


class Arrivals:
    """Which segments may run: those for which all that they wait for has ended."""

    def __init__(self, segments: Sequence[GraphSegment]) -> None:
        self._missing = [len(segment.waits_for) for segment in segments]
        self._followers: list[list[int]] = [[] for _ in segments]
        for number, segment in enumerate(segments):
            for each in segment.waits_for:
                self._followers[each].append(number)
        self.num_left = len(segments)
        """How many have not ended."""

    def first(self) -> list[int]:
        """Return the segments that wait for none."""
        return [number for number, missing in enumerate(self._missing) if not missing]

    def ended(self, number: int) -> list[int]:
        """Note that a segment has ended; return those that may run now."""
        self.num_left -= 1
        ready = []
        for follower in self._followers[number]:
            self._missing[follower] -= 1
            if not self._missing[follower]:
                ready.append(follower)
        return ready
