"""Lease the items of an epoch to ranks that join and leave, so that each item is in exactly one committed step.

All ranks have equal :class:`EpochLeases`, because they make the same calls in the same order. These are the rules:

1. A *step* has a fixed number of items, or the rest of the epoch. A step consists of *rounds*; each rank has one batch
   in a round. Each rank has a share of the step: the shares are equal, or in proportion to the ranks' speeds. A rank
   divides its share equally among the rounds. The items of a round are dealt to the ranks in turn, in proportion to the
   ranks' numbers of items in this round.
2. The items of a round are leased when it begins. A committed step uses the items of the ranks that contribute to it.
   The other leases end, and their items are leased again before all later items.
3. A step may also have several rounds that ranks apply one after another, before they exchange anything. Then the items
   that a rank had applied before its death are in the committed step too.
4. If every step must have the same number of items, a step is committed only when the contributing ranks hold all its
   items. Until then these ranks keep their leases, and more rounds replace the missing items.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from paceline.protocol.balance import divide_step

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Remaining:
    """The remaining items of an epoch: all items from number `first` on, and the items `returned`."""

    first: int = 0
    returned: tuple[int, ...] = ()
    """Numbers below `first`, ascending: items of ranks that died before their step was committed. They are next."""

    def __contains__(self, number: int) -> bool:
        return number >= self.first or number in self.returned

    def count(self, length: int) -> int:
        """Return the number of items that remain of an epoch with `length` items."""
        return len(self.returned) + max(length - self.first, 0)

    def numbers(self, count: int) -> list[int]:
        """Return the numbers of the next items."""
        returned = self.returned[:count]
        return [*returned, *range(self.first, self.first + count - len(returned))]

    def after(self, count: int) -> Remaining:
        """Return the items that remain after the next `count` items."""
        num_returned = min(count, len(self.returned))
        return Remaining(self.first + count - num_returned, self.returned[num_returned:])

    def with_returned(self, numbers: Collection[int]) -> Remaining:
        """Return the remaining items after the items `numbers` were given back."""
        return Remaining(self.first, tuple(sorted({*self.returned, *numbers})))


@dataclass(frozen=True, slots=True)
class StepRound(Generic[_Item]):
    """One round of a step, for one rank."""

    items: list[_Item]
    """This rank's items. A rank without items gets items of another rank, so that every rank has a batch."""
    num_own: int
    """Number of this rank's own items."""
    parts: tuple[int, ...]
    """Each rank's number of own items."""
    is_last: bool
    """Whether the step ends with this round."""


@functools.lru_cache
def _order(parts: tuple[int, ...]) -> tuple[int, ...]:
    """Return the rank of each item in a round, given each rank's number of items."""
    turns = (((turn + 0.5) / count, rank) for rank, count in enumerate(parts) for turn in range(count))
    return tuple(rank for _, rank in sorted(turns))


def count_rounds(shares: Iterable[int], per_rank: int) -> int:
    """Return the number of rounds in a step with these shares of the ranks."""
    return -(-max(shares) // per_rank)


def split_rounds(
    items: Iterable[_Item],
    rank: int,
    size: int,
    *,
    per_rank: int,
    per_step: int | None = None,
    num_missing: int | None = None,
    drop_last: bool = False,
    shares: Sequence[int] | None = None,
) -> Iterator[StepRound[_Item]]:
    """Yield the rounds of `rank`, given the remaining items of an epoch for all ranks.

    `per_rank` is the largest number of items of a rank in a round, `per_step` the number of items in a step (default: a
    step is one round), `num_missing` the number of items that an incomplete first step still needs. `drop_last` drops
    an incomplete last step. The ranks divide a step in proportion to `shares`, by default equally. With ``rank=size``,
    yield whole batches without own items.
    """
    per_round = per_rank * size
    wanted = num_missing or per_step or per_round
    source = iter(items)
    while step := list(itertools.islice(source, wanted)):
        if drop_last and len(step) < wanted:
            return
        divided = divide_step(len(step), size, shares)
        num_rounds = count_rounds(divided, per_rank)
        for number in range(num_rounds):
            parts = tuple(share // num_rounds + (number < share % num_rounds) for share in divided)
            group, step = step[: sum(parts)], step[sum(parts) :]
            own = [item for item, place in zip(group, _order(parts), strict=True) if place == rank]
            yield StepRound(own or group[: per_rank if rank == size else 1], len(own), parts, number == num_rounds - 1)
        wanted = per_step or per_round


@dataclass(slots=True)
class _Lease:
    before: Remaining
    parts: tuple[int, ...]
    members: list[int | None]
    """The incarnations of the ranks of the round; None for a rank whose items were returned."""
    number: int
    """The number of the round since the last committed step."""

    def numbers(self, places: Collection[int]) -> list[int]:
        """Return the numbers of the items that were leased to the ranks `places`."""
        if not places:
            return []
        numbers = self.before.numbers(sum(self.parts))
        return [number for number, place in zip(numbers, _order(self.parts), strict=True) if place in places]


class EpochLeases:
    """The leases of one epoch's items, since the last committed step."""

    def __init__(self, remaining: Remaining) -> None:
        self.remaining = remaining
        """The items that are neither leased nor in a committed step."""
        self._leases: list[_Lease] = []

    @property
    def num_held(self) -> int:
        """Number of leased items."""
        return sum(len(lease.numbers(_held(lease.members))) for lease in self._leases)

    @property
    def is_idle(self) -> bool:
        """Whether no step has begun."""
        return not self._leases

    @property
    def members(self) -> set[int]:
        """The members that hold items."""
        return {member for lease in self._leases for member in lease.members if member is not None}

    def lease(self, parts: tuple[int, ...], members: Iterable[int], number: int = 0) -> None:
        """Lease the next items to the ranks of a round; `parts` has each rank's number of items.

        `number` is the number of the round since the last committed step, for :meth:`keep`.
        """
        self._leases.append(_Lease(self.remaining, parts, list(members), number))
        self.remaining = self.remaining.after(sum(parts))

    def lacks(self, contributors: Collection[int]) -> bool:
        """Return whether a member that is not a contributor holds items."""
        return any(lease.numbers(_other(lease.members, contributors)) for lease in self._leases)

    def keep(self, contributors: Collection[int], applied: Mapping[int, int] | None = None) -> None:
        """Return the leased items of all members except the contributors to :attr:`remaining`.

        `applied` has the number of rounds that other members had applied since the last committed step.
        """
        for lease in self._leases:
            kept = {member for member, count in (applied or {}).items() if lease.number < count}
            lost = _other(lease.members, kept.union(contributors))
            if lost:
                self.remaining = self.remaining.with_returned(lease.numbers(lost))
            for place in lost:
                lease.members[place] = None

    def commit(self, contributors: Collection[int], applied: Mapping[int, int] | None = None) -> None:
        """End all leases; the contributors' items, and the `applied` items, are in the committed step."""
        self.keep(contributors, applied)
        self._leases = []

    def without_step(self) -> Remaining:
        """Return the items that remain if the step is not committed."""
        numbers = [number for lease in self._leases for number in lease.numbers(_held(lease.members))]
        return self.remaining.with_returned(numbers)


def _held(members: list[int | None]) -> set[int]:
    return {place for place, member in enumerate(members) if member is not None}


def _other(members: list[int | None], contributors: Collection[int]) -> set[int]:
    return {place for place, member in enumerate(members) if member is not None and member not in contributors}
