"""Standing comparison of replicas: every server sends digests of its buckets to the servers behind it in their chains.

A CHECK frame goes the way of the pushes and behind them, so the server behind, when it takes the frame, has applied
what the sender had applied when it sent it, and nothing else: the two can be compared while pushes are under way. It
tells

- the bucket's filter: both count the same pushes as applied, or a push is lost;
- a hash of the order in which they were applied, which may differ after a change of the map, or where hyperparameters
  changed between two pushes: then the rows may differ too, and nobody is wrong;
- a digest of each table's rows with their state: in the same order the same pushes make the same bits.

What differs is logged, and stands in the server's statistics until it is the same again.
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
"""In which each bucket is compared once, where that takes no more than its share of the time."""
_SHARE = 0.02
"""Of a server's time, at most, that goes into its digests: with much data a round takes longer."""
_IDLE_S = 1.0
_LOGGED = 8
"""Differences at a time that are logged: the statistics have all."""
_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15
_STEP = 0xD1B54A32D192ED03
_logger = logging.getLogger("paceline.ps")


@functools.lru_cache(64)
def _ones(buckets: Buckets) -> npt.NDArray[np.uint64]:
    return to_flags(buckets).astype(np.uint64)


class BucketOrders:
    """Of each bucket a hash of the pushes that were applied to it, in their order."""

    def __init__(self) -> None:
        self._hashes = np.zeros(NUM_BUCKETS, np.uint64)

    def applied(self, incarnation: int, sequence: int, buckets: Buckets) -> None:
        """Note that a push was applied to some buckets."""
        push, hashes = (incarnation * _STEP + sequence + 1) * _STEP, self._hashes
        if buckets.bit_count() == 1:
            bucket = buckets.bit_length() - 1
            hashes[bucket] = int(hashes[bucket]) * _FACTOR + push & _MASK
        else:
            # A mask (where=flags) takes 50 us where every third bucket is chosen, this 2 us.
            growth = hashes * np.uint64(_FACTOR - 1)
            growth += np.uint64(push & _MASK)
            growth *= _ones(buckets)
            hashes += growth

    def of(self, bucket: int) -> int:
        """Return a bucket's hash."""
        return int(self._hashes[bucket])

    def take(self, bucket: int, value: int) -> None:
        """Take over the hash of a bucket that came, or was compared, whole."""
        self._hashes[bucket] = value

    def drop(self, buckets: Buckets) -> None:
        """Begin anew with some buckets."""
        self._hashes[to_flags(buckets)] = 0


class ReplicaChecks:
    """What one server tells of its buckets, and what it has found in comparing them with what others tell."""

    def __init__(self, tables: ServerTables) -> None:
        self._tables = tables
        self._left: list[tuple[int, int]] = []  # target, bucket: what this round has not come to
        self._num_in_round = 1
        self._differences: dict[tuple[int, int], str] = {}  # bucket, table (0: the pushes) → what it is
        self._unordered: set[int] = set()
        self.orders = BucketOrders()
        self.num_received = self.num_compared = 0

    @property
    def differences(self) -> tuple[str, ...]:
        """What differs now from the servers before this one, a line for each bucket and table."""
        return tuple(self._differences.values())

    @property
    def num_unordered(self) -> int:
        """Buckets whose rows differ because the same pushes were applied in another order."""
        return len(self._unordered)

    def load(self, bucket: int, order: int) -> None:
        """Note that a bucket came whole."""
        self.drop(1 << bucket)
        self.orders.take(bucket, order)

    def drop(self, buckets: Buckets) -> None:
        """Forget what was found in buckets that are here no more, or come anew."""
        self.orders.drop(buckets)
        self._differences = {key: line for key, line in self._differences.items() if not buckets >> key[0] & 1}
        self._unordered = {bucket for bucket in self._unordered if not buckets >> bucket & 1}

    def next(self, core: ServerCore, targets: Iterable[int]) -> tuple[int, int] | None:
        """Return a server and a bucket that is to be compared with its; None if there is nothing to compare."""
        for _ in range(2):
            while self._left:
                target, bucket = self._left.pop()
                if core.checkable(target) >> bucket & 1:
                    return target, bucket
            self._left = [(target, bucket) for target in targets for bucket in buckets_in(core.checkable(target))]
            self._num_in_round = max(1, len(self._left))
        return None

    def pause_s(self, took_s: float | None) -> float:
        """Return after how long the next bucket is to be sent; the last one took so long, None if there was none."""
        return _IDLE_S if took_s is None else max(_ROUND_S / self._num_in_round, took_s / _SHARE)

    def describe(self, core: ServerCore, bucket: int) -> CheckInfo:
        """Return what the server behind is told of a bucket."""
        tables = tuple((number, *self._rows(number, bucket)) for number in self._tables.by_number)
        return CheckInfo(bucket, self.orders.of(bucket), core.applied_to(bucket), tables)

    def compare(self, core: ServerCore, source: int, rank: int, version: int, info: CheckInfo) -> None:
        """Compare a bucket with what the server `source` of rank `rank` tells of it; log what differs."""
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
            found[bucket, 0] = f"push {odd[0][1]} of incarnation {odd[0][0]} counts as applied on one of them only"
        for number, num_rows, theirs in info.tables:
            rows, mine = self._rows(number, bucket)
            if (rows, mine) == (num_rows, theirs):
                continue
            is_same = False
            if is_ordered:
                name = self._tables.find(number).spec.name
                found[bucket, number] = f"its rows in table {name!r} differ ({rows} here, {num_rows} there)"
        if is_same and not found:
            self.orders.take(bucket, info.order)
        self._unordered -= {bucket}
        if not is_same and not is_ordered:
            self._unordered.add(bucket)
        self._note(bucket, found, rank)

    def _rows(self, number: int, bucket: int) -> tuple[int, int]:
        keys, records = self._tables.find(number).part.read_bucket(bucket)
        return len(keys), int(digest_records(keys, records.view(np.uint32)))

    def _note(self, bucket: int, found: dict[tuple[int, int], str], rank: int) -> None:
        before = self._differences
        self._differences = {key: line for key, line in before.items() if key[0] != bucket}
        for key, what in found.items():
            line = (
                f"bucket {bucket} of server {self._tables.rank} is not what it is on server {rank}, which it "
                f"replicates: {what}. One of the two is wrong: stop server {self._tables.rank}, so that another one is "
                "filled in its place, and report this"
            )
            self._differences[key] = line
            if key not in before and len(self._differences) <= _LOGGED:
                _logger.error("%s", line)
