"""Sequential consistency on a server: it buffers an iteration's pushes, sums them by rank, and applies the sum.

Every run has the same results. Except for rounding, they are the results of one process that trains on the concatenated
batches of all workers.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from paceline.errors import NonFiniteError
from paceline.kernels.dedup import dedup, scratch_size, sum_rows
from paceline.kernels.sparse import largest
from paceline.protocol.buckets import Buckets
from paceline.tables.non_finite import NonFinite
from paceline.tables.part import Selection, TablePart, sum_of
from paceline.tables.server_tables import Piece, ServerTables
from paceline.tables.types import Floats

Push = tuple[Selection, Floats]
_LARGE_BYTES = 1 << 16
_SAFE_SUM = 1e38  # the limit of a sum of gradients, before the factor (such as 1 / workers) multiplies it
_logger = logging.getLogger("paceline.ps")


class IterationPushes(NamedTuple):
    """The pushes of an iteration, after all workers have sent theirs."""

    tables: dict[int, list[Push]]
    tops: dict[int, float]
    """For each table, an upper bound of the magnitudes in the sum of its pushes."""
    factor: float


class IterationBuffer:
    """The live workers' pushes for incomplete iterations. Incarnation numbers identify the workers.

    The pushes are summed in the order of the workers' ranks. The rank is stored with the pushes, because a worker may
    leave before the iteration is complete.
    """

    def __init__(self, mean: bool) -> None:
        self._mean = mean
        # For each iteration and worker: the worker's rank, and its pushes as (table number, push, largest magnitude).
        self._pushes: dict[int, dict[int, tuple[int, list[tuple[int, Push, float]]]]] = {}
        self._free: dict[int, list[Floats]] = {}  # the last iteration's arrays by length, to be reused

    @property
    def num_bytes(self) -> int:
        workers = (pushes for by_worker in self._pushes.values() for _, pushes in by_worker.values())
        return sum(push[1].nbytes for pushes in workers for _, push, _ in pushes)

    def copy(self, selection: Selection, grads: Floats) -> Push:
        free = self._free.get(len(grads))
        if not free:
            return selection.copy(), grads.copy()
        copied = free.pop()
        copied[:] = grads
        return selection.copy(), copied

    def add(self, iteration: int, worker: int, rank: int, table: int, push: Push, top: float) -> None:
        """Store a push, whose arrays must not change. `top` is the largest magnitude of its gradients."""
        self._pushes.setdefault(iteration, {}).setdefault(worker, (rank, []))[1].append((table, push, top))

    def clear(self) -> None:
        self._pushes, self._free = {}, {}

    def recycle(self, tables: Mapping[int, Sequence[Push]]) -> None:
        """Keep the arrays of applied pushes, so that :meth:`copy` can reuse them in the next iteration."""
        # The first write to a page of new memory costs more than a copy, so memory is reused. Arrays that one iteration
        # does not use are freed.
        self._free = {}
        for pushes in tables.values():
            for _, grads in pushes:
                if grads.nbytes >= _LARGE_BYTES:
                    self._free.setdefault(len(grads), []).append(grads)

    def restrict(self, parts: Mapping[int, TablePart], buckets: Buckets) -> None:
        for by_worker in self._pushes.values():
            for _, pushes in by_worker.values():
                cut = [(table, parts[table].restrict(*push, buckets), top) for table, push, top in pushes]
                pushes[:] = [push for push in cut if len(push[1][1])]

    def forget(self, worker: int, from_iteration: int) -> None:
        for iteration, pushes in self._pushes.items():
            if iteration >= from_iteration:
                pushes.pop(worker, None)

    def complete(self, iteration: int, workers: Collection[int]) -> IterationPushes:
        pushes = self._pushes.pop(iteration, {})
        found = IterationPushes({}, {}, 1.0 / len(workers) if self._mean and workers else 1.0)
        for worker in sorted(pushes.keys() & workers, key=lambda worker: (pushes[worker][0], worker)):
            for table, push, top in pushes[worker][1]:
                found.tables.setdefault(table, []).append(push)
                found.tops[table] = found.tops.get(table, 0.0) + top
        return found


def apply_sum(part: TablePart, pushes: Sequence[Push], factor: float) -> None:
    """Sum pushes in the given order, with one gradient per key, and apply the update rule once to each key."""
    for selection, grads in _by_selection(part, pushes):
        part.push_sum(selection, grads, factor)


def sum_up(part: TablePart, pushes: Sequence[Push], factor: float) -> list[Push]:
    """Return the sums that :func:`apply_sum` would apply, as pushes that have no key or element in common."""
    with np.errstate(over="ignore", invalid="ignore"):  # the caller checks the result for overflow
        return [(selection, sum_of(grads, factor)) for selection, grads in _by_selection(part, pushes)]


def _by_selection(part: TablePart, pushes: Sequence[Push]) -> list[tuple[Selection, list[Floats]]]:
    """Return selections that have no key in common, each with the gradients to sum, in the order of `pushes`."""
    ranges = _disjoint_ranges(pushes)
    if ranges is not None:
        return [(same[0][0], [grads for _, grads in same]) for same in ranges]
    if len(pushes) == 1:
        return [(pushes[0][0], [pushes[0][1]])]
    keys = np.concatenate([part.keys_of(selection) for selection, _ in pushes])
    rows = np.concatenate([grads for _, grads in pushes])
    unique, inverse = np.empty(len(keys), np.uint64), np.empty(len(keys), np.int32)
    count = dedup(keys, np.empty(scratch_size(len(keys)), np.int32), unique, inverse)
    grads = np.empty(count * part.dim, np.float32)
    sum_rows(inverse, rows, part.dim, grads)
    return [(Selection(unique[:count]), [grads])]


def _disjoint_ranges(pushes: Sequence[Push]) -> list[list[Push]] | None:
    """Return the pushes grouped by their range of elements. Return None if two ranges overlap but are not equal."""
    found: dict[tuple[int, int, int], list[Push]] = {}
    for push in pushes:
        if push[0].keys is not None:
            return None
        found.setdefault((push[0].start, push[0].stop, push[0].buckets or 0), []).append(push)
    bounds = sorted(found, key=lambda key: key[:2])
    if any(after[0] < before[1] for before, after in pairwise(bounds)):
        return None
    return [found[key] for key in bounds]


class IterationSums:
    """The buffered pushes of one server, and their sums. If `mean`, sums are divided by the number of workers."""

    def __init__(self, tables: ServerTables, non_finite: NonFinite, mean: bool) -> None:
        self._tables = tables
        self._non_finite = non_finite
        self.buffer = IterationBuffer(mean)

    def restrict(self, buckets: Buckets) -> None:
        self.buffer.restrict({number: table.part for number, table in self._tables.by_number.items()}, buckets)

    def apply(self, iteration: int, workers: Sequence[int], buckets: Buckets) -> None:
        """Sum the pushes of an iteration, and apply the sums. All pushes must be for keys in `buckets`."""
        complete = self._complete(iteration, workers, buckets)
        for number, pushes in sorted(complete.tables.items()):
            table = self._tables.by_number[number]
            table.staleness.histogram[0] += len(pushes)  # 0: no other push was applied in this iteration
            apply_sum(table.part, pushes, complete.factor)
        self.buffer.recycle(complete.tables)

    def pieces(self, iteration: int, workers: Sequence[int], buckets: Buckets) -> list[Piece]:
        complete = self._complete(iteration, workers, buckets)
        pieces: list[Piece] = []
        for number, pushes in sorted(complete.tables.items()):
            self._tables.by_number[number].staleness.histogram[0] += len(pushes)
            pieces += self._sum_up(number, pushes, complete.factor, buckets)
        return pieces

    def _complete(self, iteration: int, workers: Sequence[int], buckets: Buckets) -> IterationPushes:
        complete = self.buffer.complete(iteration, workers)
        source = f"the sum of the gradients of iteration {iteration} on server {self._tables.rank}"
        for number, pushes in list(complete.tables.items()):
            table = self._tables.by_number[number]
            top = complete.tops[number]
            if top < _SAFE_SUM and table.part.magnitudes.take(top * complete.factor):
                continue
            try:
                for piece in self._sum_up(number, pushes, complete.factor, buckets):
                    top = float(largest(piece.floats))
                    if not table.part.magnitudes.take(top):
                        self._non_finite.try_push(table, piece.selection, piece.floats, top, source)
            except NonFiniteError as error:  # the sum is not applied; replies report the error to each worker
                _logger.warning("%s", error)
                table.refused.update(dict.fromkeys(workers, str(error)))
                del complete.tables[number]
        return complete

    def _sum_up(self, number: int, pushes: Sequence[Push], factor: float, buckets: Buckets) -> Iterator[Piece]:
        """Yield the sums of a table's pushes. This server must be the primary of all their buckets."""
        part = self._tables.by_number[number].part
        for selection, grads in sum_up(part, pushes, factor):
            whole = Piece(number, selection, grads)
            piece = self._tables.restrict(whole, buckets) if part.primary & ~buckets else whole
            if piece is not None:
                yield piece
