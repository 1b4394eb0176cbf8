"""Agree on the name of a group: equal on all its ranks, different from the names of their earlier groups.

A name ends in a number, which every rank counts. The ranks exchange their counts and use the highest count, because a
rank that failed to create a group is ahead of a missing rank.

A count stays in the store until its rank publishes the next count; a rank with a failed attempt deletes its count. So a
stored count is from the current attempt, or from an earlier attempt that succeeded for its rank. In the second case all
ranks took part in the earlier attempt, and now have higher counts. Hence all ranks find the same maximum. A rank may
also be ahead of ranks that still wait for its count, so it also publishes the counts of its last groups.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Final

import msgspec

from paceline.errors import ConnectionLostError, DeadlineError, RankLostError, name_ranks
from paceline.meeting.store import PrefixStore, RankCheck, Store, exchange
from paceline.transport import read_meta

_NUM_AGREED: Final = 64


class _Count(msgspec.Struct, frozen=True, array_like=True):
    """A rank's count, for the other ranks."""

    number: int
    agreed: list[int]
    """The counts of the groups that were created last. Counts of failed attempts are not included."""

    def number_for(self, number: int) -> int:
        """Return this rank's count of the attempt to which another rank gave the count ``number``."""
        return next((earlier for earlier in self.agreed if earlier >= number), self.number)


class GroupNames:
    """Creates the names of one rank's groups."""

    def __init__(self, store: Store, rank: int, program: str, check_alive: RankCheck) -> None:
        """`rank` is the rank in the program; `check_alive` raises :class:`EndedError` for ranks that have ended."""
        self._store, self._rank, self._program, self._check_alive = store, rank, program, check_alive
        self._counts: dict[str, int] = {}
        self._agreed: dict[str, list[int]] = {}

    @contextlib.contextmanager
    def next(self, ranks: tuple[int, ...], label: str, timeout_s: float) -> Iterator[str]:
        """Yield the name of the next group of these ranks; the block must create the group.

        Raises RankLostError with the missing ranks, and EndedError for ranks that have ended.
        """
        base_name = f"{self._program}/{label}{','.join(map(str, ranks))}"
        number = self._counts[base_name] = self._counts.get(base_name, 0) + 1
        if len(ranks) == 1:
            yield f"{base_name}#{number}"
            return
        count_store = PrefixStore(self._store, f"number of {base_name}")
        position = ranks.index(self._rank)
        agreed = self._agreed.setdefault(base_name, [])
        own = msgspec.msgpack.encode(_Count(number, agreed[-_NUM_AGREED:]))
        try:
            count_store.delete(f"number/rank {position}")
            deadline = time.monotonic() + timeout_s
            try:
                numbers = exchange(
                    count_store,
                    position,
                    len(ranks),
                    own,
                    deadline,
                    description="number",
                    check=lambda missing: self._check_alive([ranks[other] for other in missing]),
                )
            except EndedError:
                raise
            except RankLostError as error:
                raise absent(tuple(ranks[missing] for missing in error.ranks), base_name) from None
            counts = [read_meta(value, _Count, "a count of groups") for value in numbers]
            number = self._counts[base_name] = max(other.number_for(number) for other in counts)
            yield f"{base_name}#{number}"
            agreed.append(number)
        except (ConnectionLostError, DeadlineError):
            raise  # keep the count, because the store is lost and nothing can be deleted
        except BaseException:
            with contextlib.suppress(Exception):
                count_store.delete(f"number/rank {position}")
            raise


class EndedError(RankLostError):
    """A group cannot be created, because ranks (world ranks) died or left."""


def absent(ranks: tuple[int, ...], group: str) -> RankLostError:
    return RankLostError(
        f"{name_ranks(ranks)} did not create group {group!r} in time; every rank of a group must create it. All ranks "
        "may try again",
        ranks,
    )
