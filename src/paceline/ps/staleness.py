"""How old the values were that a gradient was computed from: observed per table, and what follows from it.

The staleness of a push is the number of other workers' pushes that this server applied to the table between the pull
that the gradient was computed from (the worker's last of the same iteration) and now. It is counted, never guessed.
"""

from __future__ import annotations

import numpy as np

from ..kernels.dedup import dedup, scratch_size
from .sparse_store import Floats, Keys
from .tables import Selection, TablePart

HISTOGRAM_SIZE = 129
"""Staleness 0 to 127 one by one, then all above."""
_KEPT_PULLS = 16


class StalenessRecord:
    """The staleness of one table's gradients on one server."""

    def __init__(self) -> None:
        self.histogram = [0] * HISTOGRAM_SIZE
        self._applied = 0
        self._own: dict[int, int] = {}
        self._seen: dict[int, dict[int, int]] = {}

    def pulled(self, worker: int, clock: int) -> None:
        """Note that a worker has read the table in iteration `clock`."""
        seen = self._seen.setdefault(worker, {})
        if len(seen) >= _KEPT_PULLS and clock not in seen:
            del seen[next(iter(seen))]
        seen[clock] = self._applied - self._own.get(worker, 0)

    def observe(self, worker: int, clock: int) -> int:
        """Return the staleness of a push of iteration `clock`, and count it. Without a pull before it, it is 0."""
        others = self._applied - self._own.get(worker, 0)
        staleness = others - self._seen.get(worker, {}).get(clock, others)
        self.histogram[min(staleness, HISTOGRAM_SIZE - 1)] += 1
        return staleness

    def applied(self, worker: int) -> None:
        """Note that a push of a worker was applied."""
        self._applied += 1
        self._own[worker] = self._own.get(worker, 0) + 1

    def forget(self, worker: int) -> None:
        """Forget a worker that is gone."""
        self._seen.pop(worker, None)


class DelayCompensation:
    """g + λ·g²·(w_now − w_pulled): a first-order correction of a stale gradient (Zheng et al., ICML 2017, eq. 10).

    Keeps a copy of the values that each worker pulled last; keys that it did not pull are left uncompensated.
    """

    def __init__(self, strength: float) -> None:
        self._strength = np.float32(strength)
        self._pulled: dict[tuple[int, int], tuple[Selection, Floats]] = {}

    def pulled(self, worker: int, table: int, selection: Selection, values: Floats) -> None:
        """Keep what a worker has read."""
        self._pulled[worker, table] = (selection.copy(), values.copy())

    def compensate(self, worker: int, table: int, part: TablePart, selection: Selection, grads: Floats) -> Floats:
        """Return the compensated gradients (float32 [num_values])."""
        kept = self._pulled.get((worker, table))
        if kept is None:
            return grads
        then = _values_then(kept[0], kept[1], selection, part.dim)
        if then is None:
            return grads
        now = np.empty(len(grads), np.float32)
        part.pull(selection, now)
        change = np.where(np.isnan(then), np.float32(0), now - then)
        return grads + self._strength * grads * grads * change

    def forget(self, worker: int) -> None:
        """Forget a worker that is gone."""
        for key in [key for key in self._pulled if key[0] == worker]:
            del self._pulled[key]


def _values_then(pulled: Selection, values: Floats, pushed: Selection, dim: int) -> Floats | None:
    """Return the pulled values for the pushed keys, NaN for keys not pulled; None if nothing can be matched."""
    if pulled.keys is None or pushed.keys is None:
        same = pulled.keys is pushed.keys and (pulled.start, pulled.stop) == (pushed.start, pushed.stop)
        return values if same else None
    if np.array_equal(pulled.keys, pushed.keys):
        return values
    both: Keys = np.concatenate([pulled.keys, pushed.keys])
    unique, inverse = np.empty(len(both), np.uint64), np.empty(len(both), np.int32)
    count = dedup(both, np.empty(scratch_size(len(both)), np.int32), unique, inverse)
    known = np.full((count, dim), np.nan, np.float32)
    known[inverse[: len(pulled.keys)]] = values.reshape(-1, dim)
    return np.ascontiguousarray(known[inverse[len(pulled.keys) :]]).reshape(-1)
