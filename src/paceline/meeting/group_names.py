"""Agree on the name of a new group. The name is equal on all its ranks, and differs from the names of earlier groups.

A name ends in a number. Each rank counts its attempts to create a group of these ranks. If an attempt failed because a
rank was missing, the other ranks have a higher count than the missing rank. Therefore the ranks exchange their counts
through the store, and use the highest count in the name.

A rank's count stays in the store until the rank publishes its next count. After a failed attempt, the rank deletes its
count. So a count in the store belongs to the current attempt, or to an earlier attempt that succeeded for its rank. In
the second case, all ranks took part in the earlier attempt, and now have higher counts. So all ranks find the same
maximum. A fast rank may publish its next count before slower ranks have read the previous one. Therefore each rank also
publishes the counts of its last groups.
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
    """The counts that one rank publishes in the store for the other ranks."""

    number: int
    agreed: list[int]
    """The counts of the last groups that this rank created. It has no counts of failed attempts."""

    def number_for(self, number: int) -> int:
        """Return this rank's count for the attempt for which another rank published ``number``."""
        return next((earlier for earlier in self.agreed if earlier >= number), self.number)


class GroupNames:
    """Creates the names of the groups in which one rank takes part."""

    def __init__(self, store: Store, rank: int, program: str, check_alive: RankCheck) -> None:
        """`rank` is this process's rank in the program.

        ``check_alive(ranks)`` raises EndedError if ranks have ended.
        """
        self._store, self._rank, self._program, self._check_alive = store, rank, program, check_alive
        self._counts: dict[str, int] = {}
        self._agreed: dict[str, list[int]] = {}

    @contextlib.contextmanager
    def next(self, ranks: tuple[int, ...], label: str, timeout_s: float) -> Iterator[str]:
        """Yield the name of the next group of these ranks, for a ``with`` block that creates the group.

        Raises RankLostError if ranks are missing at the timeout, and EndedError if ranks have ended.
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
            raise  # the store is lost, so the count cannot be deleted from it
        except BaseException:
            with contextlib.suppress(Exception):
                count_store.delete(f"number/rank {position}")
            raise


class EndedError(RankLostError):
    """Raised if a group cannot be created, because ranks died or left. The numbers are ranks in the whole program."""


def absent(ranks: tuple[int, ...], group: str) -> RankLostError:
    return RankLostError(
        f"{name_ranks(ranks)} did not create group {group!r} in time; every rank of a group must create it. All ranks "
        "may try again",
        ranks,
    )
