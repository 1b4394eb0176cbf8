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
from paceline.protocol.negotiation.schedule import NO_ROUND

_TAG: Final = 0


class Wakeups:
    """Sends and receives the messages that start rounds."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._received = np.zeros(1, np.int64)
        self._ticket: CollectiveTicket | None = None
        self._started: dict[int, int] = {}
        """The last round that each rank has started with a message to this rank. In this round, the rank is awake."""
        distances = (1 << power for power in range((group.size - 1).bit_length()))
        self._targets = list(dict.fromkeys((group.rank + distance) % group.size for distance in distances))

    def wake_own_thread(self) -> None:
        """End the wait of this rank's thread. Thread-safe."""
        self._group.send(np.array([NO_ROUND], np.int64), self._group.rank, tag=_TAG)

    def wait(self, timeout: timedelta) -> int:
        """Wait until another rank starts a round or :meth:`wake_own_thread` is called. Return the number of the round.

        After the timeout, return NO_ROUND.
        """
        if self._ticket is None:
            self._ticket = self._group.recv_async(self._received, tag=_TAG)
        try:
            self._ticket.wait(timeout)
        except DeadlineError:
            return NO_ROUND
        source, number = self._ticket.result(), int(self._received[0])
        self._ticket = None
        if source != self._group.rank:
            self._started[source] = number
        return number

    def wake_other_ranks(self, round_number: int) -> None:
        """Start a round. Thread-safe."""
        for rank in self._targets:
            if self._started.get(rank, NO_ROUND) < round_number:
                self._group.send(np.array([round_number], np.int64), rank, tag=_TAG)
