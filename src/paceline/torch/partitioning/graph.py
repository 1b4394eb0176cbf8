"""Split a graph of operations over devices. Pure: operations and values are names, without tensors.

If operations of another device use a value, one transfer sends the value to that device, for all these operations.
TensorFlow's partitioner sends values in the same way (``graph_partition.cc``; Abadi et al., OSDI 2016, section 3.3). In
backward, each transfer returns the value's gradient, summed over the operations at the destination.

A segment is a sequence of operations on one device between transfers. A segment runs as soon as its inputs have
arrived. A segment ends with an operation whose value is sent, so that the value is sent immediately.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

CALLER: Final = -1
"""The device number of the caller. The arguments come from it."""


@dataclass(frozen=True)
class Operation:
    """An operation of a graph. Each operation computes one value."""

    name: str
    inputs: tuple[str, ...] = ()
    """The operations and arguments whose values this operation uses, without repetition."""
    after: tuple[str, ...] = ()
    """Operations that must run before this operation, although it does not use their values."""


@dataclass(frozen=True)
class Transfer:
    """A value sent from one device to another; its gradient is sent back."""

    value: str
    source: int
    destination: int


@dataclass(frozen=True)
class GraphSegment:
    """A sequence of operations on one device without a transfer between them."""

    device: int
    operations: tuple[str, ...]
    inputs: tuple[str, ...]
    """The values of other segments and the arguments that this segment uses, without repetition."""
    outputs: tuple[str, ...]
    """The values of this segment that other segments use, or that the graph returns."""
    waits_for: tuple[int, ...]
    """Numbers, in :attr:`CutGraph.segments`, of the segments that must end before this segment starts."""


@dataclass(frozen=True)
class CutGraph:
    """The segments of a graph in an order of execution, and the transfers between devices."""

    segments: tuple[GraphSegment, ...]
    transfers: tuple[Transfer, ...]

    @cached_property
    def destinations(self) -> dict[str, list[int]]:
        devices: dict[str, list[int]] = {}
        for transfer in self.transfers:
            devices.setdefault(transfer.value, []).append(transfer.destination)
        return devices


def cut_graph(operations: Sequence[Operation], devices: Mapping[str, int], outputs: Collection[str]) -> CutGraph:
    """Cut a graph, given the device of each operation.

    `operations` are in a valid order of execution; `devices` has the device number of each operation. Inputs that are
    not operations are arguments. `outputs` are the values that the graph returns, which stay on their devices.
    """
    transfers: dict[Transfer, None] = {}
    for operation in operations:
        for value in operation.inputs:
            source = devices.get(value, CALLER)
            if source != devices[operation.name]:
                transfers[Transfer(value, source, devices[operation.name])] = None
    segments = _find_segments(operations, devices, {transfer.value for transfer in transfers})
    return CutGraph(_describe_segments(operations, devices, outputs, segments), tuple(transfers))


def _find_segments(
    operations: Sequence[Operation], devices: Mapping[str, int], sent: Collection[str]
) -> dict[str, str]:
    """Return for each operation the name of its segment, which is the name of an operation in the segment.

    The level of an operation is the largest number of segment ends on a path to the operation. Connected operations
    with the same device and level form a segment. No path leaves a segment and returns to it: the end of a segment
    increases the level, and levels never decrease along a path. An operation without inputs, such as a parameter, is in
    the segment of the first operation on its device that uses it.
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
        earlier = [value for value in (*operation.inputs, *operation.after) if value in levels]
        leader[name] = name
        levels[name] = max(
            (levels[value] + (devices[value] != devices[name] or value in sent) for value in earlier), default=0
        )
        for value in earlier:
            if devices[value] != devices[name]:
                waiting.discard(value)
            elif value in waiting:
                waiting.remove(value)
                levels[value] = levels[name]
            if devices[value] == devices[name] and levels[value] == levels[name]:
                leader[leader_of(value)] = name
    return {operation.name: leader_of(operation.name) for operation in operations}


def _describe_segments(
    operations: Sequence[Operation],
    devices: Mapping[str, int],
    outputs: Collection[str],
    segment_of: Mapping[str, str],
) -> tuple[GraphSegment, ...]:
    members: dict[str, list[Operation]] = {}
    used = set(outputs)
    for operation in operations:
        members.setdefault(segment_of[operation.name], []).append(operation)
        used.update(value for value in operation.inputs if segment_of.get(value) != segment_of[operation.name])
    waits = {
        leader: {
            segment_of[name]
            for operation in segment
            for name in (*operation.inputs, *operation.after)
            if segment_of.get(name, leader) != leader
        }
        for leader, segment in members.items()
    }
    order = _sorted_by_dependence(waits)
    place = {leader: number for number, leader in enumerate(order)}
    return tuple(
        GraphSegment(
            device=devices[leader],
            operations=tuple(operation.name for operation in members[leader]),
            inputs=tuple(
                dict.fromkeys(
                    value
                    for operation in members[leader]
                    for value in operation.inputs
                    if segment_of.get(value) != leader
                )
            ),
            outputs=tuple(operation.name for operation in members[leader] if operation.name in used),
            waits_for=tuple(sorted(place[earlier] for earlier in waits[leader])),
        )
        for leader in order
    )


def _sorted_by_dependence(waits: Mapping[str, set[str]]) -> list[str]:
    order: dict[str, None] = {}
    missing = dict(waits)
    while missing:
        ready = [leader for leader, earlier in missing.items() if earlier <= order.keys()]
        for leader in ready:
            order[leader] = None
            del missing[leader]
    return list(order)


class Arrivals:
    """Finds the segments that may run. A segment may run when all segments for which it waits have ended."""

    def __init__(self, segments: Sequence[GraphSegment]) -> None:
        self._missing = [len(segment.waits_for) for segment in segments]
        self._followers: list[list[int]] = [[] for _ in segments]
        for number, segment in enumerate(segments):
            for earlier in segment.waits_for:
                self._followers[earlier].append(number)
        self.num_left = len(segments)
        """Number of segments that have not ended yet."""

    def first(self) -> list[int]:
        return [number for number, missing in enumerate(self._missing) if not missing]

    def ended(self, number: int) -> list[int]:
        """Record the end of a segment; return the segments that may run now."""
        self.num_left -= 1
        ready = []
        for follower in self._followers[number]:
            self._missing[follower] -= 1
            if not self._missing[follower]:
                ready.append(follower)
        return ready
