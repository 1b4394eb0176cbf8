"""Exchange numbers among the workers of a solver, through a table.

The table is the one with the weights (:class:`~paceline.tables.rules.ProximalNewton`). Rows with special keys hold the
sums of all workers' last pushes. Consistency is sequential, so a read after an iteration includes all pushes of the
iteration.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from paceline.errors import LostRowsError
from paceline.ps import Client, SparseTable, Ticket, write_records
from paceline.tables.types import Doubles, Floats, Keys

PRESENCE_KEY: Final = np.uint64(0x7072_6573_656E_7400)
"""The key of a row to which each worker pushes 1 in each iteration of a pass."""
_FIRST_KEY: Final = 0x7061_6365_7365_0000
WIDTH: Final = 16
"""The number of values from each worker."""


class SummedRows(NamedTuple):
    """The two numbers that the servers return for each column, float32 [n] each."""

    first: Floats
    second: Floats


class NumberExchange:
    """The exchange on one worker. Each rank below `num_places` has rows in the table, even if it has no worker."""

    def __init__(self, client: Client, table: SparseTable, num_places: int) -> None:
        self._client = client
        self._table = table
        self._num_places = num_places
        self._num_workers = 0
        self._place = client.rank
        self.is_first = False
        """Whether this worker has the lowest rank of all workers in the exchange."""
        self._own_keys = self._keys_of(self._place)
        self._all_keys = np.concatenate([self._keys_of(place) for place in range(num_places)])

    def gather(self, numbers: Doubles) -> Doubles:
        """Send this worker's numbers (float64 [WIDTH]) and return all workers' numbers (float64 [workers, WIDTH]).

        The first number must be 1. This ends the iteration. Raises LostRowsError if a worker was lost.
        """
        high = numbers.astype(np.float32)
        pairs = np.zeros((2 * WIDTH, 2), np.float32)
        pairs[:, 0] = np.concatenate([high, (numbers - high).astype(np.float32)])
        self.finish(self.start(self._own_keys, pairs))
        found = self._table.pull(self._all_keys, assume_unique=True)[:, 1].astype(np.float64)
        given = found.reshape(self._num_places, 2, WIDTH).sum(axis=1)
        places = np.flatnonzero(given[:, 0] == 1)
        self.is_first = bool(places[0] == self._place)
        present: Doubles = given[places]
        return present

    def write(self, keys: Keys, records: Floats) -> None:
        """Overwrite rows. All workers write the same rows, which pulls return after the next :meth:`gather`."""
        write_records(self._client, self._table.spec, keys, records)

    def start(self, keys: Keys, pairs: Floats) -> Ticket:
        """Push two numbers (float32 [n, 2]) for each column and end the iteration; :meth:`finish` reads the result."""
        keys = np.append(keys, PRESENCE_KEY)
        pushed = np.concatenate([pairs, np.array([[1, 0]], np.float32)])
        return self._table.push_pull_async(keys, pushed, tick=True, assume_unique=True)

    def finish(self, ticket: Ticket) -> SummedRows:
        """Return the rows after the iteration's pushes of all workers. Raises LostRowsError if a worker was lost."""
        rows = ticket.result()
        num_workers = int(rows[-1, 1])
        if num_workers != (self._num_workers or num_workers):
            raise LostRowsError(
                f"{self._num_workers} workers held the examples, and {num_workers} remain: the examples of the lost "
                "workers are missing"
            )
        self._num_workers = num_workers
        return SummedRows(rows[:-1, 0], rows[:-1, 1])

    @staticmethod
    def _keys_of(place: int) -> Keys:
        return np.uint64(_FIRST_KEY + 2 * WIDTH * place) + np.arange(2 * WIDTH, dtype=np.uint64)
