"""How a group moves bytes: what :class:`~paceline.collectives.Group` asks of shared memory or of the network.

Engines know addresses and byte counts; dtypes and shapes are checked above. Every method is called by all ranks of the
group, one call at a time, with an equal :class:`CollectiveCall` and number, and returns when this rank's part is done.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from paceline.collectives.calls import CollectiveCall


class Area(NamedTuple):
    """Bytes at an address."""

    address: int
    num_bytes: int


class Reduction(NamedTuple):
    """How items are combined."""

    combiner: int
    """The address of a function of `kernels.combine`."""
    op: int
    scale: float
    """Multiplies the result: 1/n for a mean."""
    item_bytes: int


class Order(NamedTuple):
    """One call, as it is carried out."""

    call: CollectiveCall
    signature: int
    sequence: int
    timeout_s: float
    algorithm: str = ""
    """The schedule to take; empty: the engine's own choice."""


def copy(source: Area, target: Area) -> None:
    """Copy memory, unless it is the same."""
    if source.num_bytes and source.address != target.address:
        ctypes.memmove(target.address, source.address, source.num_bytes)


class Engine(ABC):
    """Abstract: carries out the calls of one group."""

    @abstractmethod
    def barrier(self, order: Order) -> None:
        """Return when every rank has called it."""

    @abstractmethod
    def all_reduce(self, order: Order, source: Area, target: Area, reduction: Reduction) -> None:
        """Reduce `source` over all ranks into every `target`, which may be the same memory, exactly."""

    @abstractmethod
    def reduce(self, order: Order, source: Area, target: Area | None, reduction: Reduction, root: int) -> None:
        """Reduce into the root's `target`."""

    @abstractmethod
    def reduce_scatter(self, order: Order, sources: Sequence[Area], target: Area, reduction: Reduction) -> None:
        """Reduce part r of the `sources` over all ranks into rank r's `target`; the parts lie one behind the other."""

    @abstractmethod
    def broadcast(self, order: Order, area: Area, root: int) -> None:
        """Copy the root's memory to all."""

    @abstractmethod
    def all_gather(self, order: Order, source: Area, targets: Sequence[Area]) -> None:
        """Copy rank r's `source` to everybody's target r."""

    @abstractmethod
    def gather(self, order: Order, source: Area, targets: Sequence[Area], root: int) -> None:
        """Copy rank r's `source` to the root's target r; the others have no targets."""

    @abstractmethod
    def scatter(self, order: Order, sources: Sequence[Area], target: Area, root: int) -> None:
        """Copy the root's source r to rank r's `target`; the others have no sources."""

    @abstractmethod
    def all_to_all(self, order: Order, sources: Sequence[Area], targets: Sequence[Area], *, equal: bool) -> None:
        """Copy source d of rank s to target s of rank d. `equal`: all areas are of one size, on all ranks."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; the other ranks notice. Idempotent."""
