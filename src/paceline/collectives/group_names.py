"""Names of groups: the ranks of one must call it alike, and otherwise than the groups that they made before.

A name ends in a number, of which every rank has its own count. A rank that has failed to make a group, since another
did not come, is further on than that one. So the ranks tell one another their numbers and take the highest.

What a rank has told stays in the store until it tells the next number; only a rank that has failed takes it back. So
what others find is of the present attempt, or of an earlier one that succeeded for that rank: then they were all in
it, and are further on themselves. Hence all find the same highest number. A rank may also be further on than those
that still look for its number: so it tells with which ones it has made groups before, and they take theirs of these.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Final

import msgspec

from paceline.collectives.calls import name_ranks
from paceline.collectives.rendezvous.store import Look, PrefixStore, Store, exchange
from paceline.errors import ConnectionLostError, DeadlineError, RankLostError
from paceline.transport import read_meta

_NUM_AGREED: Final = 64


class _Told(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells the others."""

    number: int
    agreed: list[int]
    """The last of the numbers that it has made groups with: not of those that it tried in vain to make."""

    def number_for(self, number: int) -> int:
        """Return its number in the attempt in which another rank's is ``number``."""
        return next((before for before in self.agreed if before >= number), self.number)


class GroupNames:
    """The names of one rank's groups."""

    def __init__(self, store: Store, rank: int, program: str, look: Look) -> None:
        """`rank`: of all of the program; `look` raises :class:`EndedError` for those who have ended."""
        self._store, self._rank, self._program, self._look = store, rank, program, look
        self._counts: dict[str, int] = {}
        self._agreed: dict[str, list[int]] = {}

    @contextlib.contextmanager
    def next(self, ranks: tuple[int, ...], label: str, timeout_s: float) -> Iterator[str]:
        """Give the name of the next group of these ranks, which is to be made in the block.

        Raises RankLostError that names those that do not come, and EndedError for those that never will.
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
            others = [read_meta(value, _Told, "the number of a group") for value in numbers]
            number = self._counts[plain] = max(other.number_for(number) for other in others)
            yield f"{plain}#{number}"
            agreed.append(number)
        except (ConnectionLostError, DeadlineError):
            raise  # the store has gone
        except BaseException:
            with contextlib.suppress(Exception):
                told.delete(f"number/rank {place}")
            raise


class EndedError(RankLostError):
    """Ranks, by their numbers in the world, have died or left, so that a group cannot be made."""


def absent(ranks: tuple[int, ...], group: str) -> RankLostError:
    """Return the error for ranks that did not come to make a group; they are called by their numbers in the world."""
    return RankLostError(
        f"{name_ranks(ranks)} did not come to make group {group!r}; every rank of a group must make it, "
        "and all may try again",
        ranks,
    )
