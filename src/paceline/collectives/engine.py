"""Interface between :class:`~paceline.collectives.Group` and the engines for shared memory and networks.

The caller has already checked dtypes and shapes. All ranks of the group call the same methods in the same order, with
an equal :class:`CollectiveCall` and sequence number. A method returns when this rank's part is done.
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
    """Parameters of a reduction."""

    combiner: int
    """The address of a compiled function of `kernels.combine`."""
    op: int
    scale: float
    item_bytes: int


class Order(NamedTuple):
    """One call of a collective, in the form that an engine receives."""

    call: CollectiveCall
    signature: int
    sequence: int
    timeout_s: float
    algorithm: str = ""
    """Name of the algorithm; empty if the engine chooses the algorithm."""


def copy(source: Area, target: Area) -> None:
    if source.num_bytes and source.address != target.address:
        ctypes.memmove(target.address, source.address, source.num_bytes)


class Engine(ABC):
    """Abstract: run the calls of one group."""

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
        """Reduce part r of the contiguous `sources` over all ranks into rank r's `target`."""

    @abstractmethod
    def broadcast(self, order: Order, area: Area, root: int) -> None:
        """Copy the root's `area` to the `area` of all other ranks."""

    @abstractmethod
    def all_gather(self, order: Order, source: Area, targets: Sequence[Area]) -> None:
        """Copy rank r's `source` to target r of every rank."""

    @abstractmethod
    def gather(self, order: Order, source: Area, targets: Sequence[Area], root: int) -> None:
        """Copy rank r's `source` to the root's target r; other ranks have no targets."""

    @abstractmethod
    def scatter(self, order: Order, sources: Sequence[Area], target: Area, root: int) -> None:
        """Copy the root's source r to rank r's `target`; other ranks have no sources."""

    @abstractmethod
    def all_to_all(self, order: Order, sources: Sequence[Area], targets: Sequence[Area], *, equal: bool) -> None:
        """Copy source d of rank s to target s of rank d. `equal`: all areas on all ranks have the same size."""

    @abstractmethod
    def close(self) -> None: ...
