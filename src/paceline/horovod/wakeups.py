"""Wake the background threads of all ranks for a round of the negotiation.

A round needs all ranks, but only a rank with a new request starts it. This rank sends the number of the round to the
ranks at the distances 1, 2, 4, ... from it, and each woken rank does the same. So all ranks wake after a logarithmic
number of steps. A waiting thread uses no processor time.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import numpy as np

from paceline.collectives import CollectiveTicket, Group
from paceline.errors import DeadlineError

_TAG: Final = 0
_LOCAL: Final = -1
"""The number in a message of this rank to itself, in place of the number of a round."""


class Wakeups:
    """Sends and receives the messages that start rounds."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._received = np.zeros(1, np.int64)
        self._ticket: CollectiveTicket | None = None
        self._awake: set[int] = set()
        """Ranks that are awake for the current round, because this rank has received their messages."""
        distances = (1 << power for power in range((group.size - 1).bit_length()))
        self._targets = list(dict.fromkeys((group.rank + distance) % group.size for distance in distances))

    def wake_own_thread(self) -> None:
        """End the wait of this rank's thread. Thread-safe."""
        self._group.send(np.array([_LOCAL], np.int64), self._group.rank, tag=_TAG)

    def wait(self, round_number: int, timeout: timedelta) -> bool:
        """Wait until another rank starts the round or :meth:`wake_own_thread` is called.

        Return whether another rank starts the round. After the timeout, return True too.
        """
        while True:
            if self._ticket is None:
                self._ticket = self._group.recv_async(self._received, tag=_TAG)
            try:
                self._ticket.wait(timeout)
            except DeadlineError:
                return True
            source, number = self._ticket.result(), int(self._received[0])
            self._ticket = None
            if number == _LOCAL:
                return False
            if number == round_number:
                self._awake.add(source)
                return True

    def wake_other_ranks(self, round_number: int) -> None:
        for rank in self._targets:
            if rank not in self._awake:
                self._group.send(np.array([round_number], np.int64), rank, tag=_TAG)
        self._awake.clear()
