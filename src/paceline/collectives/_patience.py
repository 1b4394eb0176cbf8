"""How long one call waits: when it asks where the others are, and when it gives up, early enough to say so in time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from paceline.collectives._culprits import Ask, Search, find_culprits
from paceline.collectives._rounds import Round
from paceline.collectives.links import Links

GIVE_UP_S: Final = 1.0
"""How long a failed rank stays, at most, to tell the others."""
_MIN_ASKING_S: Final = 0.3
_MAX_ASKING_S: Final = 1.5


class TooLate(Exception):  # noqa: N818  (a signal to the executor, which raises the error)
    """Time is up for these ranks, which were waited for."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__(ranks)
        self.ranks = ranks


class Patience:
    """The waits of one call."""

    def __init__(
        self, timeout_s: float, ask: Ask | None, links: Links, tell: Callable[[tuple[int, ...]], None]
    ) -> None:
        """``tell`` is told, before each wait, which ranks are waited for."""
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        self._gives_up_at = self.deadline - min(GIVE_UP_S, 0.1 * timeout_s)
        self._asks_at = self._gives_up_at - min(max(_MIN_ASKING_S, 0.2 * timeout_s), _MAX_ASKING_S)
        self._ask = ask
        self._links = links
        self._tell = tell
        self._search: Search | None = None

    def wake(self, open_: Round) -> float:
        """See :meth:`RoundLoop.finish`."""
        peers = [*open_.sending, *(peer for peer in open_.receiving if peer.wants_bytes)]
        return self.wait_for(tuple(sorted({peer.rank for peer in peers})))

    def wait_for(self, ranks: tuple[int, ...]) -> float:
        """Return until when (``time.monotonic``) these ranks may be waited for; raise TooLate when time is up."""
        self._tell(ranks)
        now = time.monotonic()
        if now >= self._gives_up_at:
            raise TooLate(ranks)
        if self._ask is None or self._search is not None:
            return self._gives_up_at
        if now < self._asks_at:
            return self._asks_at
        others = [rank for rank in range(self._links.size) if rank != self._links.rank]
        self._search = Search(self._ask, others)
        return self._gives_up_at

    def culprits(self, sequence: int, waiting_for: Sequence[int]) -> dict[int, str]:
        """Return who is to blame, with what is said of each."""
        if self._search is None:
            return dict.fromkeys(waiting_for, "was waited for in vain (nobody could be asked where it is)")
        return find_culprits(self._search.answers(), sequence, waiting_for)
