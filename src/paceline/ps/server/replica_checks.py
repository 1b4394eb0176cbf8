"""Continuous comparison of replicas: every server sends digests of its buckets to its successors.

A CHECK frame follows the pushes on the same connection. When the successor receives the frame, it has applied the same
pushes as the sender had when it sent the frame. So the rows can be compared while later pushes are in flight. The frame
contains

- the bucket's duplicate filter: if the filters differ, a push was lost;
- a hash of the order in which pushes were applied. The order may differ after a view change, a change of
  hyperparameters, or while a snapshot is loaded; then the rows may differ without an error;
- a digest of each table's rows with their state: the same pushes in the same order give the same bits.

Differences are logged, and stay in the server's statistics until they disappear.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from paceline.kernels.sparse import digest_records
from paceline.protocol import NUM_BUCKETS, ServerCore
from paceline.protocol.buckets import Buckets, buckets_in
from paceline.ps.messages import CheckInfo
from paceline.tables.bucket_arrays import to_flags
from paceline.tables.server_tables import ServerTables

_ROUND_S = 50.0
"""The shortest duration of a round, in which each bucket is compared once. A round is longer if _SHARE requires this.
"""
_SHARE = 0.02
"""The maximum share of a server's time for digests."""
_IDLE_S = 1.0
_LOGGED = 8
"""The maximum number of differences in the log at one time. The statistics contain all differences."""
_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15
_STEP = 0xD1B54A32D192ED03
_logger = logging.getLogger("paceline.ps")


@functools.lru_cache(64)
def _ones(buckets: Buckets) -> npt.NDArray[np.uint64]:
    return to_flags(buckets).astype(np.uint64)


class BucketOrders:
    """A hash of the applied pushes of each bucket, in their order."""

    def __init__(self) -> None:
        self._hashes = np.zeros(NUM_BUCKETS, np.uint64)

    def applied(self, incarnation: int, sequence: int, buckets: Buckets) -> None:
        push, hashes = (incarnation * _STEP + sequence + 1) * _STEP, self._hashes
        if buckets.bit_count() == 1:
            bucket = buckets.bit_length() - 1
            hashes[bucket] = int(hashes[bucket]) * _FACTOR + push & _MASK
        else:
            # If every third bucket is selected, NumPy's `where=flags` takes 50 µs, and this computation 2 µs.
            growth = hashes * np.uint64(_FACTOR - 1)
            growth += np.uint64(push & _MASK)
            growth *= _ones(buckets)
            hashes += growth

    def of(self, bucket: int) -> int:
        return int(self._hashes[bucket])

    def take(self, bucket: int, value: int) -> None:
        """Set the hash of a bucket that this server received, or whose rows equal the predecessor's."""
        self._hashes[bucket] = value

    def drop(self, buckets: Buckets) -> None:
        self._hashes[to_flags(buckets)] = 0


class ReplicaChecks:
    """The digests of one server's buckets, and the results of comparisons with its predecessors."""

    def __init__(self, tables: ServerTables) -> None:
        self._tables = tables
        self._left: list[tuple[int, int]] = []  # (target, bucket): comparisons not yet started in this round
        self._num_in_round = 1
        self._differences: dict[tuple[int, int], str] = {}  # bucket, table (0: the pushes) → message
        self._unordered: set[int] = set()
        self.orders = BucketOrders()
        self.num_received = self.num_compared = 0

    @property
    def differences(self) -> tuple[str, ...]:
        return tuple(self._differences.values())

    @property
    def num_unordered(self) -> int:
        return len(self._unordered)

    def load(self, bucket: int, order: int) -> None:
        self.drop(1 << bucket)
        self.orders.take(bucket, order)

    def drop(self, buckets: Buckets) -> None:
        """Drop the results for buckets that were moved away or will be received again."""
        self.orders.drop(buckets)
        self._differences = {key: line for key, line in self._differences.items() if not buckets >> key[0] & 1}
        self._unordered = {bucket for bucket in self._unordered if not buckets >> bucket & 1}

    def next(self, core: ServerCore, targets: Iterable[int]) -> tuple[int, int] | None:
        """Return the next server and bucket to compare; None without such a pair."""
        for _ in range(2):
            while self._left:
                target, bucket = self._left.pop()
                if core.checkable(target) >> bucket & 1:
                    return target, bucket
            self._left = [(target, bucket) for target in targets for bucket in buckets_in(core.checkable(target))]
            self._num_in_round = max(1, len(self._left))
        return None

    def pause_s(self, took_s: float | None) -> float:
        """Return the pause before the next digest, given the duration of the last digest (None if none was sent)."""
        return _IDLE_S if took_s is None else max(_ROUND_S / self._num_in_round, took_s / _SHARE)

    def describe(self, core: ServerCore, bucket: int) -> CheckInfo:
        tables = tuple((number, *self._rows(number, bucket)) for number in self._tables.by_number)
        return CheckInfo(bucket, self.orders.of(bucket), core.applied_to(bucket), tables)

    def compare(self, core: ServerCore, source: int, rank: int, version: int, info: CheckInfo) -> None:
        """Compare a bucket with the digest from server `source` of rank `rank`; log differences."""
        bucket = info.bucket
        self.num_received += 1
        if not core.is_comparable(source, version, bucket):
            return
        self.num_compared += 1
        found: dict[tuple[int, int], str] = {}
        is_ordered = info.order == self.orders.of(bucket)
        is_same = True
        odd = sorted(set(info.applied).symmetric_difference(core.applied_to(bucket)))
        if odd:
            found[bucket, 0] = f"push {odd[0][1]} of incarnation {odd[0][0]} was applied on only one of the two servers"
        for number, num_rows, source_digest in info.tables:
            rows, digest = self._rows(number, bucket)
            if (rows, digest) == (num_rows, source_digest):
                continue
            is_same = False
            if is_ordered:
                name = self._tables.find(number).spec.name
                found[bucket, number] = (
                    f"the rows of table {name!r} differ ({rows} on server {self._tables.rank}, {num_rows} on {rank})"
                )
        if is_same and not found:
            self.orders.take(bucket, info.order)
        self._unordered -= {bucket}
        if not is_same and not is_ordered:
            self._unordered.add(bucket)
        self._record(bucket, found, rank)

    def _rows(self, number: int, bucket: int) -> tuple[int, int]:
        keys, records = self._tables.find(number).part.read_bucket(bucket)
        return len(keys), int(digest_records(keys, records.view(np.uint32)))

    def _record(self, bucket: int, found: dict[tuple[int, int], str], rank: int) -> None:
        before = self._differences
        self._differences = {key: line for key, line in before.items() if key[0] != bucket}
        for key, difference in found.items():
            line = (
                f"bucket {bucket} differs between server {rank} and its replica on server {self._tables.rank}: "
                f"{difference}. Stop server {self._tables.rank}, so that another server is filled, and report this"
            )
            self._differences[key] = line
            if key not in before and len(self._differences) <= _LOGGED:
                _logger.error("%s", line)
