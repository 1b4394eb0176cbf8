"""The interface of engines, which run the collectives of a :class:`~paceline.collectives.Group`.

There is an engine for shared memory and an engine for networks. The caller of an engine must check dtypes and shapes.
All ranks of the group call the same methods in the same order, with an equal :class:`CollectiveCall` and sequence
number. A method returns when this rank's part of the call is done.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from paceline.collectives.calls import CollectiveCall


class Area(NamedTuple):
    """A range of bytes in memory."""

    address: int
    num_bytes: int


class Reduction(NamedTuple):
    """The parameters of a reduction: the compiled function, the operation, the final scale and the item size."""

    combiner: int
    """The memory address of a compiled function in `kernels.combine` that reduces arrays."""
    op: int
    scale: float
    item_bytes: int


class Order(NamedTuple):
    """One collective call, which :class:`Group` passes to an engine."""

    call: CollectiveCall
    signature: int
    sequence: int
    timeout_s: float
    algorithm: str = ""
    """The name of the algorithm to use; empty if the engine chooses the algorithm."""


def copy(source: Area, target: Area) -> None:
    if source.num_bytes and source.address != target.address:
        ctypes.memmove(target.address, source.address, source.num_bytes)


class Engine(ABC):
    """Runs the collective calls of one rank in one group."""

    @abstractmethod
    def barrier(self, order: Order) -> None: ...

    @abstractmethod
    def all_reduce(self, order: Order, source: Area, target: Area, reduction: Reduction) -> None:
        """Reduce `source` over all ranks into every rank's `target`, which may be the same area as `source`."""

    @abstractmethod
    def reduce(self, order: Order, source: Area, target: Area | None, reduction: Reduction, root: int) -> None:
        """Reduce `source` over all ranks into the root's `target`."""

    @abstractmethod
    def reduce_scatter(self, order: Order, sources: Sequence[Area], target: Area, reduction: Reduction) -> None:
        """For each rank r, reduce ``sources[r]`` over all ranks into the `target` of rank r.

        `sources` are contiguous.
        """

    @abstractmethod
    def broadcast(self, order: Order, area: Area, root: int) -> None:
        """Copy the root's `area` to the `area` of all other ranks."""

    @abstractmethod
    def all_gather(self, order: Order, source: Area, targets: Sequence[Area]) -> None:
        """Copy the `source` of each rank r to ``targets[r]`` of all ranks."""

    @abstractmethod
    def gather(self, order: Order, source: Area, targets: Sequence[Area], root: int) -> None:
        """Copy the `source` of each rank r to the root's ``targets[r]``. Ranks other than the root pass no targets."""

    @abstractmethod
    def scatter(self, order: Order, sources: Sequence[Area], target: Area, root: int) -> None:
        """Copy the root's ``sources[r]`` to the `target` of each rank r. Ranks other than the root pass no sources."""

    @abstractmethod
    def all_to_all(self, order: Order, sources: Sequence[Area], targets: Sequence[Area], *, equal: bool) -> None:
        """For all ranks s and d, copy ``sources[d]`` of rank s to ``targets[s]`` of rank d.

        `equal` states that all areas on all ranks have the same size.
        """

    @abstractmethod
    def close(self) -> None: ...
