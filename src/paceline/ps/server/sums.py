"""The buffered pushes of incomplete iterations, and their sums."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from paceline.errors import NonFiniteError
from paceline.kernels.sparse import largest
from paceline.protocol.buckets import Buckets
from paceline.ps.server.pushes import Piece, restrict
from paceline.tables.aggregation import IterationBuffer, IterationPushes, Push, apply_sum, sum_up
from paceline.tables.non_finite import NonFinite
from paceline.tables.server_tables import ServerTables

_SAFE_SUM = 1e38  # of gradients, before the factor
_logger = logging.getLogger("paceline.ps")


class IterationSums:
    """The buffered pushes of one server. With `mean`, sums are divided by the number of workers."""

    def __init__(self, tables: ServerTables, non_finite: NonFinite, mean: bool) -> None:
        self._tables = tables
        self._non_finite = non_finite
        self.buffer = IterationBuffer(mean)

    def restrict(self, buckets: Buckets) -> None:
        """Drop the pushes outside `buckets`."""
        self.buffer.restrict({number: table.part for number, table in self._tables.by_number.items()}, buckets)

    def apply(self, iteration: int, workers: Sequence[int], buckets: Buckets) -> None:
        """Sum and apply the pushes of `workers` in an iteration, which are all to `buckets`."""
        complete = self._complete(iteration, workers, buckets)
        for number, pushes in sorted(complete.tables.items()):
            table = self._tables.by_number[number]
            table.staleness.histogram[0] += len(pushes)  # nothing else was applied since the iteration began
            apply_sum(table.part, pushes, complete.factor)
        self.buffer.recycle(complete.tables)

    def pieces(self, iteration: int, workers: Sequence[int], buckets: Buckets) -> list[Piece]:
        """Return the sum of the pushes of `workers` in an iteration, restricted to `buckets`."""
        complete = self._complete(iteration, workers, buckets)
        return self._sum_up(complete.tables, complete.factor, buckets)

    def _complete(self, iteration: int, workers: Sequence[int], buckets: Buckets) -> IterationPushes:
        complete = self.buffer.complete(iteration, workers)
        source = f"the sum of the gradients of iteration {iteration} on server {self._tables.rank}"
        for number, pushes in list(complete.tables.items()):
            table = self._tables.by_number[number]
            top = complete.tops[number]
            if top < _SAFE_SUM and table.part.magnitudes.take(top * complete.factor):
                continue
            try:
                for selection, grads in sum_up(table.part, pushes, complete.factor):
                    piece = restrict(self._tables, Piece(number, selection, grads), buckets)
                    if piece is not None:
                        top = float(largest(piece.floats))
                        if not table.part.magnitudes.take(top):
                            self._non_finite.try_push(table, piece.selection, piece.floats, top, source)
            except NonFiniteError as error:  # the table's sum is not applied; the workers receive the error
                _logger.warning("%s", error)
                table.refused.update(dict.fromkeys(workers, str(error)))
                del complete.tables[number]
        return complete

    def _sum_up(self, tables: Mapping[int, Sequence[Push]], factor: float, buckets: Buckets) -> list[Piece]:
        pieces = []
        for number, pushes in sorted(tables.items()):
            table = self._tables.by_number[number]
            table.staleness.histogram[0] += len(pushes)
            for selection, grads in sum_up(table.part, pushes, factor):
                piece = restrict(self._tables, Piece(number, selection, grads), buckets)
                if piece is not None:
                    pieces.append(piece)
        return pieces
