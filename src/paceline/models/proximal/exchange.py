"""How the workers of a solver know of one another: numbers that all give, and all read, through a table.

The table is that of the weights (:class:`~paceline.tables.rules.ProximalNewton`), whose rows for keys of its own hold
what was pushed last, summed over workers. It works under sequential consistency: what is read after an iteration is
what all that took part in it have pushed.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from paceline.errors import LostRowsError
from paceline.ps import Client, SparseTable, Ticket, write_records
from paceline.tables.types import Doubles, Floats, Keys

PRESENCE_KEY: Final = np.uint64(0x7072_6573_656E_7400)
"""A row that each worker pushes 1 to, in each iteration of a pass."""
_FIRST_KEY: Final = 0x7061_6365_7365_0000
WIDTH: Final = 16
"""How many numbers each worker gives."""


class SummedRows(NamedTuple):
    """What servers answer of columns (float32 [n] each)."""

    first: Floats
    second: Floats


class NumberExchange:
    """A worker's side: its rank is its place among `num_places`, of which some may be empty."""

    def __init__(self, client: Client, table: SparseTable, num_places: int) -> None:
        self._client = client
        self._table = table
        self._num_places = num_places
        self._num_workers = 0
        self._place = client.rank
        self.is_first = False
        """Whether no worker that has given numbers has a lower rank."""
        self._own_keys = self._keys_of(self._place)
        self._all_keys = np.concatenate([self._keys_of(each) for each in range(num_places)])

    def gather(self, numbers: Doubles) -> Doubles:
        """Give numbers (float64 [WIDTH], the first of them 1), return those of all workers (float64 [workers, WIDTH]).

        Ends the iteration. Raises LostRowsError if there are fewer workers than there were.
        """
        high = numbers.astype(np.float32)
        pairs = np.zeros((2 * WIDTH, 2), np.float32)
        pairs[:, 0] = np.concatenate([high, (numbers - high).astype(np.float32)])
        self.finish(self.start(self._own_keys, pairs))
        found = self._table.pull(self._all_keys, assume_unique=True)[:, 1].astype(np.float64)
        given = found.reshape(self._num_places, 2, WIDTH).sum(axis=1)
        places = np.flatnonzero(given[:, 0] == 1)
        self.is_first = bool(places[0] == self._place)
        there: Doubles = given[places]
        return there

    def write(self, keys: Keys, records: Floats) -> None:
        """Set whole rows, as other workers that have these keys do; all know of it after the next :meth:`gather`."""
        write_records(self._client, self._table.spec, keys, records)

    def start(self, keys: Keys, pairs: Floats) -> Ticket:
        """Push two numbers (float32 [n, 2]) for each column, and end the iteration; see :meth:`finish`."""
        keys = np.append(keys, PRESENCE_KEY)
        pushed = np.concatenate([pairs, np.array([[1, 0]], np.float32)])
        return self._table.push_pull_async(keys, pushed, tick=True, assume_unique=True)

    def finish(self, ticket: Ticket) -> SummedRows:
        """Return the rows after all workers' pushes of that iteration. Raises LostRowsError if one is gone."""
        rows = ticket.result()
        num_workers = int(rows[-1, 1])
        if num_workers != (self._num_workers or num_workers):
            raise LostRowsError(
                f"{self._num_workers} workers held the examples, and {num_workers} are left: what the others held is "
                "gone"
            )
        self._num_workers = num_workers
        return SummedRows(rows[:-1, 0], rows[:-1, 1])

    @staticmethod
    def _keys_of(place: int) -> Keys:
        return np.uint64(_FIRST_KEY + 2 * WIDTH * place) + np.arange(2 * WIDTH, dtype=np.uint64)
