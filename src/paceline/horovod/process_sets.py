"""Process sets: subsets of the ranks, which run operations without the other ranks."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.errors import UsageError
from paceline.protocol.negotiation.requests import GLOBAL_SET


class ProcessSet:
    """A subset of the ranks. Pass it to :func:`init` or :func:`add_process_set`, and then to operations."""

    def __init__(self, ranks: Iterable[int]) -> None:
        numbers = list(ranks) if isinstance(ranks, Iterable) else None
        if numbers is None or not all(isinstance(rank, int) for rank in numbers) or len(set(numbers)) < len(numbers):
            raise UsageError(f"got {ranks!r} as a process set, expected a list of different ranks")
        self.ranks = sorted(numbers)
        """The global ranks of the set."""
        self.process_set_id: int | None = None
        """The number of the set, which is equal on all ranks. None before the set is added, and after its removal."""
        self._own_rank: int | None = None

    def register(self, number: int | None, own_rank: int | None) -> None:
        """Set the number of the set, and the global rank of this process. :func:`init` calls this method."""
        self.process_set_id, self._own_rank = number, own_rank

    def size(self) -> int | None:
        """Return the number of ranks, or None if the set was not added."""
        return None if self.process_set_id is None else len(self.ranks)

    def included(self) -> bool | None:
        """Return whether this rank is in the set, or None if the set was not added."""
        return None if self.process_set_id is None else self._own_rank in self.ranks

    def rank(self) -> int | None:
        """Return this rank's place in the set, or None if the set was not added. Raises UsageError outside the set."""
        if self.process_set_id is None:
            return None
        if self._own_rank not in self.ranks:
            raise UsageError(f"rank {self._own_rank} is not in the process set of ranks {self.ranks}")
        return self.ranks.index(self._own_rank)

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


def number_of(process_set: object) -> int:
    """Return the number of a process set. Raises UsageError if it was not added, or if it is another object."""
    if not isinstance(process_set, ProcessSet):
        raise UsageError(f"got process_set={process_set!r}, expected a ProcessSet")
    if process_set.process_set_id is None:
        raise UsageError(f"{process_set} was not added; pass it to init() or add_process_set() first")
    return process_set.process_set_id


global_process_set = ProcessSet([])
"""The process set of all ranks, which is the default of all operations."""


def register_global_set(size: int, rank: int | None) -> None:
    global_process_set.ranks = list(range(size))
    global_process_set.register(None if rank is None else GLOBAL_SET, rank)
