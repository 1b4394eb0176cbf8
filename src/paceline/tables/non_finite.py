"""A server's policy for infinities and NaN in its tables: reject them, or accept and count them.

Clients and servers always reject gradients that are not finite. The policy applies if finite gradients overflow in a
sum, in compensation or in an update, and if records (values and state) are written or loaded. Records from another
server (the primary of a replica, or the former server of a bucket) were already checked there. They are stored
unchanged, so that the servers have equal records.
"""

from __future__ import annotations

import logging
import math
from typing import Final

import numpy as np

from paceline.errors import NonFiniteError, UsageError
from paceline.kernels.sparse import largest
from paceline.tables.part import Selection
from paceline.tables.server_tables import ServerTable
from paceline.tables.types import Floats, Keys

REFUSE: Final = "refuse"
COUNT: Final = "count"
_KEYS_NAMED = 5

_logger = logging.getLogger("paceline.ps")


def check_policy(policy: str) -> str:
    if policy not in (REFUSE, COUNT):
        raise UsageError(f"non_finite={policy!r}: expected {REFUSE!r} or {COUNT!r}")
    return policy


class NonFinite:
    """Checks the tables of one server according to its policy."""

    def __init__(self, policy: str) -> None:
        self._refuses = check_policy(policy) == REFUSE

    def try_push(self, table: ServerTable, selection: Selection, grads: Floats, top: float, source: str) -> None:
        """Try a push on copies of its rows. Raises NonFiniteError if a record would not be finite.

        `top` is the largest magnitude of the gradients. `source` describes the push in the text of an error.
        """
        part = table.part
        if not top < math.inf:
            self._found(table, f"{source} holds {_first_of(grads)}", "Find out why gradients are so large")
        if part.magnitudes.is_loose(part.num_values(selection) // part.dim, part.num_rows):
            part.measure_all()
        for keys, records in part.trial(selection, grads):
            if not largest(np.ascontiguousarray(records).reshape(-1)) < math.inf:
                self._found(
                    table, f"{source} makes {_describe(keys, records)}", "Lower the learning rate, or clip gradients"
                )
                part.magnitudes.widen(records)
                return
            part.magnitudes.widen(records)

    def check_records(self, table: ServerTable, keys: Keys, records: Floats, source: str) -> None:
        if not largest(records.reshape(-1)) < math.inf:
            self._found(table, f"{source} holds {_describe(keys, records)}", "Check their source")

    def count_received(self, table: ServerTable, keys: Keys, records: Floats, source: str) -> None:
        """Count non-finite records from another server. They are stored unchanged."""
        if not largest(records.reshape(-1)) < math.inf:
            table.non_finite += 1
            _logger.warning("%s holds %s of table %r", source, _describe(keys, records), table.spec.name)

    def _found(self, table: ServerTable, problem: str, advice: str) -> None:
        table.non_finite += 1
        if self._refuses:
            raise NonFiniteError(
                f"{problem} of table {table.spec.name!r}. It was rejected, and this server's part of the table is "
                f"unchanged. {advice} (--non-finite {COUNT} accepts it)"
            )


def _first_of(floats: Floats) -> str:
    return str(floats[~np.isfinite(floats)][0])


def _describe(keys: Keys, records: Floats) -> str:
    rows = ~np.isfinite(records).all(axis=1)
    bad = keys[rows]
    more = f" and {len(bad) - _KEYS_NAMED} more" if len(bad) > _KEYS_NAMED else ""
    named = ", ".join(map(str, bad[:_KEYS_NAMED]))
    return f"{_first_of(records[rows][0])} in the {'row' if len(bad) == 1 else 'rows'} of {named}{more}"
