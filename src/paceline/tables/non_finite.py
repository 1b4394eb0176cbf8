"""What a server does about infinities and NaN in its tables: they are refused, or counted and let in.

Gradients that are not finite are refused at both ends of a push, whatever the policy. This is about the rest: what
finite gradients overflow to when they are summed, compensated for their delay or applied, and what is written or
loaded. What another server has looked at, and sends down a chain or to fill this one, is taken as it is, so that the
two stay equal.
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
    """Return a policy; raise UsageError if it is none."""
    if policy not in (REFUSE, COUNT):
        raise UsageError(f"non_finite={policy!r}: expected {REFUSE!r} or {COUNT!r}")
    return policy


class NonFinite:
    """One server's policy, and what follows from it."""

    def __init__(self, policy: str) -> None:
        self._refuses = check_policy(policy) == REFUSE

    def try_push(self, table: ServerTable, selection: Selection, grads: Floats, top: float, what: str) -> None:
        """Try a push on copies of its rows, because :class:`Magnitudes` cannot exclude an overflow.

        `top` is the greatest magnitude of its gradients, `what` names the push in an error.

        Raises NonFiniteError if a record would not be finite.
        """
        part = table.part
        if not top < math.inf:
            self._found(table, f"{what} holds {_first_of(grads)}", "look for what makes gradients so large")
        if part.magnitudes.is_loose(part.num_values(selection) // part.dim, part.num_rows):
            part.look_at_all()
        for keys, records in part.trial(selection, grads):
            if not largest(np.ascontiguousarray(records).reshape(-1)) < math.inf:
                self._found(
                    table, f"{what} makes {_describe(keys, records)}", "lower its learning rate, or clip gradients"
                )
                part.magnitudes.widen(records)
                return
            part.magnitudes.widen(records)

    def check_records(self, table: ServerTable, keys: Keys, records: Floats, what: str) -> None:
        """Raise NonFiniteError unless records that are about to be written (float32 [n, words]) are finite."""
        if not largest(records.reshape(-1)) < math.inf:
            self._found(table, f"{what} holds {_describe(keys, records)}", "see where they come from")

    def taken(self, table: ServerTable, keys: Keys, records: Floats, what: str) -> None:
        """Count what another server has sent, and what this one must have as it is."""
        if not largest(records.reshape(-1)) < math.inf:
            table.non_finite += 1
            _logger.warning("%s holds %s of table %r", what, _describe(keys, records), table.spec.name)

    def _found(self, table: ServerTable, what: str, advice: str) -> None:
        table.non_finite += 1
        if self._refuses:
            raise NonFiniteError(
                f"{what} of table {table.spec.name!r}: it was refused, and the part of the table on that server is "
                f"unchanged; {advice} (--non-finite {COUNT} lets it in)"
            )


def _first_of(floats: Floats) -> str:
    return str(floats[~np.isfinite(floats)][0])


def _describe(keys: Keys, records: Floats) -> str:
    rows = ~np.isfinite(records).all(axis=1)
    bad = keys[rows]
    more = f" and {len(bad) - _KEYS_NAMED} more" if len(bad) > _KEYS_NAMED else ""
    named = ", ".join(map(str, bad[:_KEYS_NAMED]))
    return f"{_first_of(records[rows][0])} in the {'row' if len(bad) == 1 else 'rows'} of {named}{more}"
