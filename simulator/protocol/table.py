"""The toy table of a simulated server: the sum of the pushes to each bucket, and pushes of incomplete iterations."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.protocol.buckets import buckets_in
from simulator.oracle import Data, Value
from simulator.protocol.messages import Part


class ToyTable:
    """The buckets of one server, whose name is `where`."""

    def __init__(self, where: str) -> None:
        self._where = where
        self.data: dict[int, Data] = {}
        # Sequential: bucket → iteration → worker → values
        self._kept: dict[int, dict[int, dict[int, list[Value]]]] = {}

    def apply(self, parts: Iterable[Part], buckets: int) -> None:
        for worker, values in parts:
            for bucket, index, value in values:
                if buckets >> bucket & 1:
                    self.data[bucket].apply(worker, index, value, self._where)

    def hold(self, buckets: int) -> None:
        self.data.update((bucket, Data()) for bucket in buckets_in(buckets))

    def drop(self, buckets: int) -> None:
        for bucket in buckets_in(buckets):
            del self.data[bucket]

    def copy_of(self, bucket: int) -> tuple[int, dict[int, int]]:
        data = self.data[bucket]
        return data.value, dict(data.marks)

    # Pushes of incomplete iterations.

    def keep(self, worker: int, iteration: int, values: Iterable[Value], buckets: int) -> None:
        for value in values:
            if buckets >> value[0] & 1:
                self._kept.setdefault(value[0], {}).setdefault(iteration, {}).setdefault(worker, []).append(value)

    def keep_only(self, buckets: int) -> None:
        self._kept = {bucket: kept for bucket, kept in self._kept.items() if buckets >> bucket & 1}

    def drop_buffered(self, worker: int, from_iteration: int) -> None:
        for by_iteration in self._kept.values():
            for iteration, by_worker in by_iteration.items():
                if iteration >= from_iteration:
                    by_worker.pop(worker, None)

    def take_sum(self, iteration: int, workers: Iterable[int], buckets: int) -> tuple[Part, ...]:
        """Remove and return the workers' pushes to these buckets in an iteration, in the order of `workers`."""
        parts: dict[int, list[Value]] = {}
        for bucket in buckets_in(buckets):
            by_worker = self._kept.get(bucket, {}).pop(iteration, {})
            for worker in workers:
                parts.setdefault(worker, []).extend(by_worker.get(worker, ()))
        return tuple((worker, tuple(values)) for worker, values in parts.items())
