"""Agree on names of groups: equal on all ranks of a group, different from their earlier groups.

A name ends in a number, and every rank has its own count. A rank that failed to create a group because another rank was
missing has a higher count than that rank. Therefore the ranks exchange their counts and take the highest one.

A count stays in the store until its rank publishes the next one; a rank whose attempt failed deletes its count. A
stored count is therefore from the present attempt, or from an earlier one that succeeded for its rank. In the second
case all ranks took part and have higher counts themselves. Hence all ranks find the same maximum. A rank may also be
ahead of ranks that still wait for its count. For them it publishes the counts of its last groups as well.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Final

import msgspec

from paceline.errors import ConnectionLostError, DeadlineError, RankLostError, name_ranks
from paceline.meeting.store import Look, PrefixStore, Store, exchange
from paceline.transport import read_meta

_NUM_AGREED: Final = 64


class _Told(msgspec.Struct, frozen=True, array_like=True):
    """A rank's count, for the other ranks."""

    number: int
    agreed: list[int]
    """Counts of the last groups that were created; failed attempts are left out."""

    def number_for(self, number: int) -> int:
        """Return this rank's count in the attempt in which another rank has ``number``."""
        return next((before for before in self.agreed if before >= number), self.number)


class GroupNames:
    """Generator of the names of one rank's groups."""

    def __init__(self, store: Store, rank: int, program: str, look: Look) -> None:
        """`rank` is the rank in the program; `look` raises :class:`EndedError` for ranks that have ended."""
        self._store, self._rank, self._program, self._look = store, rank, program, look
        self._counts: dict[str, int] = {}
        self._agreed: dict[str, list[int]] = {}

    @contextlib.contextmanager
    def next(self, ranks: tuple[int, ...], label: str, timeout_s: float) -> Iterator[str]:
        """Yield the name of the next group of these ranks; the block must create the group.

        Raises RankLostError with the missing ranks, and EndedError for ranks that have ended.
        """
        plain = f"{self._program}/{label}{','.join(map(str, ranks))}"
        number = self._counts[plain] = self._counts.get(plain, 0) + 1
        if len(ranks) == 1:
            yield f"{plain}#{number}"
            return
        told = PrefixStore(self._store, f"number of {plain}")
        place = ranks.index(self._rank)
        agreed = self._agreed.setdefault(plain, [])
        own = msgspec.msgpack.encode(_Told(number, agreed[-_NUM_AGREED:]))
        try:
            told.delete(f"number/rank {place}")
            deadline = time.monotonic() + timeout_s
            try:
                numbers = exchange(
                    told,
                    place,
                    len(ranks),
                    own,
                    deadline,
                    what="number",
                    look=lambda missing: self._look([ranks[other] for other in missing]),
                )
            except EndedError:
                raise
            except RankLostError as error:
                raise absent(tuple(ranks[missing] for missing in error.ranks), plain) from None
            others = [read_meta(value, _Told, "a count of groups") for value in numbers]
            number = self._counts[plain] = max(other.number_for(number) for other in others)
            yield f"{plain}#{number}"
            agreed.append(number)
        except (ConnectionLostError, DeadlineError):
            raise  # the store is lost
        except BaseException:
            with contextlib.suppress(Exception):
                told.delete(f"number/rank {place}")
            raise


class EndedError(RankLostError):
    """A group cannot be created, because some of its ranks (world ranks) died or left."""


def absent(ranks: tuple[int, ...], group: str) -> RankLostError:
    """Return the error for ranks (world ranks) that did not take part in creating a group."""
    return RankLostError(
        f"{name_ranks(ranks)} did not come to create group {group!r}; every rank of a group must create it, "
        "and all may try again",
        ranks,
    )
