"""The table of all collective algorithms, with a common interface.

To add an algorithm, write its module and add a line to the table ``ALGORITHMS``. ``tests/reference/schedules.py``
checks all algorithms of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.collectives.schedules import (
    binomial_tree,
    bruck,
    central,
    dissemination,
    double_binary_tree,
    halving_doubling,
    hierarchical,
    pairwise,
    recursive_doubling,
    ring,
)
from paceline.collectives.schedules.base import Schedule
from paceline.errors import UsageError

COLLECTIVES: Final = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
)

ROOTED: Final = frozenset({"broadcast", "gather", "reduce", "scatter"})


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One algorithm for one collective."""

    name: str
    collective: str
    build: Callable[..., Schedule]
    """The function that returns one rank's schedule. Its parameters are the rank, the size and the options it uses."""
    pipelined: bool = False
    """Whether the algorithm divides the vector into ``pieces`` blocks and sends one after another.

    The double binary tree divides the vector into ``2 * pieces`` blocks.
    """
    hierarchical: bool = False
    powers_of_two_only: bool = False
    equal_blocks_only: bool = False
    """Whether all blocks must have the same size, because ranks forward blocks whose sizes they do not know."""

    @property
    def rooted(self) -> bool:
        return self.collective in ROOTED

    def supports(self, size: int) -> bool:
        return size >= 1 and not (self.powers_of_two_only and size & (size - 1))

    def schedule(
        self, rank: int, size: int, *, root: int = 0, pieces: int = 1, hosts: Sequence[int] | None = None
    ) -> Schedule:
        """Return the schedule of ``rank``. Options that the algorithm does not use are ignored.

        Raises UsageError if a rank, the number of pieces or the number of ranks is invalid for the algorithm.
        """
        if not (0 <= rank < size and 0 <= root < size and pieces >= 1):
            raise UsageError(
                f"{self.name} {self.collective}: rank {rank}, root {root} of {size} ranks, {pieces} pieces: "
                "expected ranks from 0 to size - 1, and at least one piece."
            )
        options: dict[str, Any] = {}
        if self.rooted:
            options["root"] = root
        if self.pipelined:
            options["pieces"] = pieces
        if self.hierarchical:
            if hosts is None:
                raise UsageError(f"{self.name} {self.collective} needs the host of each rank: pass hosts.")
            options["hosts"] = hosts
        return self.build(rank, size, **options)

    def schedules(
        self, size: int, *, root: int = 0, pieces: int = 1, hosts: Sequence[int] | None = None
    ) -> tuple[Schedule, ...]:
        return tuple(self.schedule(rank, size, root=root, pieces=pieces, hosts=hosts) for rank in range(size))


_ALGORITHMS: Final = (
    Algorithm("binomial-tree", "all_reduce", binomial_tree.all_reduce, pipelined=True),
    Algorithm("binomial-tree", "broadcast", binomial_tree.broadcast, pipelined=True),
    Algorithm("binomial-tree", "gather", binomial_tree.gather),
    Algorithm("binomial-tree", "reduce", binomial_tree.reduce, pipelined=True),
    Algorithm("binomial-tree", "scatter", binomial_tree.scatter),
    Algorithm("bruck", "all_gather", bruck.all_gather),
    Algorithm("bruck", "all_to_all", bruck.all_to_all, equal_blocks_only=True),
    Algorithm("central", "all_gather", central.all_gather),
    Algorithm("central", "all_reduce", central.all_reduce, pipelined=True),
    Algorithm("central", "broadcast", central.broadcast, pipelined=True),
    Algorithm("central", "gather", central.gather),
    Algorithm("central", "reduce", central.reduce, pipelined=True),
    Algorithm("central", "reduce_scatter", central.reduce_scatter),
    Algorithm("central", "scatter", central.scatter),
    Algorithm("dissemination", "barrier", dissemination.barrier),
    Algorithm("double-binary-tree", "all_reduce", double_binary_tree.all_reduce, pipelined=True),
    Algorithm("double-binary-tree", "broadcast", double_binary_tree.broadcast, pipelined=True),
    Algorithm("double-binary-tree", "reduce", double_binary_tree.reduce, pipelined=True),
    Algorithm("halving-doubling", "all_reduce", halving_doubling.all_reduce),
    Algorithm("hierarchical", "all_reduce", hierarchical.all_reduce, hierarchical=True),
    Algorithm("pairwise", "all_gather", pairwise.all_gather),
    Algorithm("pairwise", "all_to_all", pairwise.all_to_all),
    Algorithm("pairwise", "reduce_scatter", pairwise.reduce_scatter),
    Algorithm("recursive-doubling", "all_gather", recursive_doubling.all_gather, powers_of_two_only=True),
    Algorithm("recursive-doubling", "all_reduce", recursive_doubling.all_reduce),
    Algorithm("ring", "all_gather", ring.all_gather),
    Algorithm("ring", "all_reduce", ring.all_reduce),
    Algorithm("ring", "reduce_scatter", ring.reduce_scatter),
)

ALGORITHMS: Final[dict[str, dict[str, Algorithm]]] = {
    collective: {algorithm.name: algorithm for algorithm in _ALGORITHMS if algorithm.collective == collective}
    for collective in COLLECTIVES
}
