"""Measure the staleness of gradients for each table, and compensate stale gradients.

The staleness of a push is the number of pushes that this server applied to the table between the worker's last pull for
an iteration and its push for this iteration. The worker's own pushes of the iteration do not count.
"""

from __future__ import annotations

import numpy as np

from paceline.kernels.dedup import dedup, scratch_size
from paceline.tables.part import Selection, TablePart
from paceline.tables.types import Floats, Keys

HISTOGRAM_SIZE = 129
"""The length of a histogram: a count for each staleness from 0 to 127, and one count for all larger values."""
_KEPT_PULLS = 16
_KEPT_VALUES = 4


class StalenessRecord:
    """The staleness of one table's gradients, measured on one server."""

    def __init__(self) -> None:
        self.histogram = [0] * HISTOGRAM_SIZE
        self._applied = 0
        self._own: dict[int, tuple[int, int]] = {}  # by worker: last iteration with pushes, and their number
        self._seen: dict[int, dict[int, int]] = {}

    def pulled(self, worker: int, clock: int) -> None:
        seen = self._seen.setdefault(worker, {})
        if len(seen) >= _KEPT_PULLS and clock not in seen:
            del seen[next(iter(seen))]
        seen[clock] = self._count_applied(worker, clock)

    def observe(self, worker: int, clock: int) -> int:
        """Return the staleness of a push for iteration `clock`, and add it to the histogram. Without a pull it is 0."""
        applied = self._count_applied(worker, clock)
        staleness = applied - self._seen.get(worker, {}).get(clock, applied)
        self.histogram[min(staleness, HISTOGRAM_SIZE - 1)] += 1
        return staleness

    def applied(self, worker: int, clock: int) -> None:
        self._applied += 1
        last, count = self._own.get(worker, (clock, 0))
        self._own[worker] = (clock, count + 1 if last == clock else 1)

    def _count_applied(self, worker: int, clock: int) -> int:
        """Return the number of applied pushes, without those of `worker` in its iteration `clock`."""
        last, count = self._own.get(worker, (clock, 0))
        return self._applied - (count if last == clock else 0)

    def forget(self, worker: int) -> None:
        self._seen.pop(worker, None)
        self._own.pop(worker, None)


class DelayCompensation:
    """A first-order correction of a stale gradient g (Zheng et al., ICML 2017, eq. 10): g + λ·g²·(w_now − w_pulled).

    This class stores the values of each worker's last pulls in recent iterations. The gradients of keys that the worker
    has not pulled are not corrected.
    """

    def __init__(self, strength: float) -> None:
        self._strength = np.float32(strength)
        self._pulled: dict[tuple[int, int], dict[int, tuple[Selection, Floats]]] = {}

    def pulled(self, worker: int, table: int, clock: int, selection: Selection, values: Floats) -> None:
        pulls = self._pulled.setdefault((worker, table), {})
        if len(pulls) >= _KEPT_VALUES and clock not in pulls:
            del pulls[next(iter(pulls))]
        pulls[clock] = (selection.copy(), values.copy())

    def compensate(
        self, worker: int, table: int, clock: int, part: TablePart, selection: Selection, grads: Floats
    ) -> Floats:
        """Return the compensated gradients (float32 [num_values]) of a push for iteration `clock`."""
        pulls = self._pulled.get((worker, table), {})
        for past in [iteration for iteration in pulls if iteration < clock]:
            del pulls[past]
        if clock not in pulls:
            return grads
        before = _values_then(part, *pulls[clock], selection)
        values = np.empty(len(grads), np.float32)
        part.pull(selection, values)
        change = np.where(np.isnan(before), np.float32(0), values - before)
        with np.errstate(over="ignore", invalid="ignore"):  # the caller checks the result for overflow
            return grads + self._strength * grads * grads * change

    def forget(self, worker: int) -> None:
        for key in [key for key in self._pulled if key[0] == worker]:
            del self._pulled[key]


def _values_then(part: TablePart, pulled: Selection, values: Floats, pushed: Selection) -> Floats:
    """Return the values that the worker pulled for the keys of its push. They are NaN for keys without a pull."""
    are_ranges = pulled.keys is None and pushed.keys is None and pulled.buckets == pushed.buckets
    if are_ranges and pulled.start <= pushed.start <= pushed.stop <= pulled.stop:
        before = part.num_values(Selection(None, pulled.start, pushed.start, pulled.buckets))
        return values[before : before + part.num_values(pushed)]
    pulled_keys, pushed_keys = part.keys_of(pulled), part.keys_of(pushed)
    if np.array_equal(pulled_keys, pushed_keys):
        return values
    both: Keys = np.concatenate([pulled_keys, pushed_keys])
    unique, inverse = np.empty(len(both), np.uint64), np.empty(len(both), np.int32)
    count = dedup(both, np.empty(scratch_size(len(both)), np.int32), unique, inverse)
    known = np.full((count, part.dim), np.nan, np.float32)
    known[inverse[: len(pulled_keys)]] = values.reshape(-1, part.dim)
    return np.ascontiguousarray(known[inverse[len(pulled_keys) :]]).reshape(-1)
