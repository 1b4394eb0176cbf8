"""Sequential consistency on one server: buffer the pushes of an iteration, forward their sum, and delay reads.

The primary buffers the pushes of an iteration until the gate (:mod:`paceline.protocol.clocks`) completes the iteration.
Then the primary adds them and forwards the sum along the chain, as a push with the incarnation AGGREGATE and the number
iteration + 1. So a bucket's duplicate filter also stores the number of complete iterations, and moves with the bucket.
Reads of the next iteration wait until the whole chain has the sum.

A *takeover* begins when a server becomes primary of more buckets. The server lacks the buffered pushes of the former
primary, so workers resend their retained pushes, followed by `Synced`. Until all workers have sent `Synced`, the server
completes no iteration and answers no read. Under bounded delay (:class:`OnArrival`) a takeover delays reads too,
because a worker's tick may arrive before its resent pushes.

While a chain has fewer than `min_replicas` replicas, complete iterations are not durable: reads of the next iteration
wait, and workers retain their pushes.

Workers retain pushes only while a primary has successors. Earlier pushes may exist only on the primary, so the primary
reports its first successor as filled only when the whole chain has these pushes. Before this report, no other server
can become primary of the bucket. Comments refer to the rules in docs/explanation/protocol.md.

Source: OSDI'14 "Scaling Distributed Machine Learning with the Parameter Server", section 4.3 (replication after
aggregation).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from paceline.protocol.delivery import Delivery
from paceline.protocol.replication import AGGREGATE, Replication

_KEPT_ITERATIONS: Final = 4096
"""A server stores the workers of this many complete iterations. A replica needs these lists if its primary dies."""


@dataclass(frozen=True, slots=True)
class Sum:
    """Instruction: add the pushes of `workers` in `iteration`, in this order, and push the sum as AGGREGATE.

    The number of this push is the iteration plus one. Call :meth:`Iterations.acknowledged` when the chain has the sum.
    """

    iteration: int
    workers: tuple[int, ...]
    buckets: int


class Takeover:
    """The workers that a server waits for after it became primary of more buckets."""

    def __init__(self) -> None:
        self._led = 0
        self._synced: dict[int, int] = {}  # worker → view version of its last resync
        self._pending_workers: set[int] = set()

    @property
    def pending_workers(self) -> frozenset[int]:
        """The workers that have not resent their retained pushes; empty without a takeover."""
        return frozenset(self._pending_workers)

    @property
    def is_over(self) -> bool:
        """Whether this server has all acknowledged pushes of the former primary, and all pushes of ended iterations."""
        return not self._pending_workers

    def lead(self, version: int, buckets: int, workers: Collection[int]) -> None:
        """Record the buckets that this server leads in view `version`, and the workers of this view.

        `workers` includes workers outside this server's gate: they may have pushed to the former primary.
        """
        gained = buckets & ~self._led
        self._led = buckets
        if gained or self._pending_workers:
            self._pending_workers = {worker for worker in workers if self._synced.get(worker, -1) < version}

    def synced(self, worker: int, version: int, current: int) -> None:
        """Record that a worker has resent its retained pushes in view `version`; this server's view is `current`."""
        self._synced[worker] = max(version, self._synced.get(worker, -1))
        if version >= current:
            self._pending_workers.discard(worker)

    def left(self, worker: int) -> None:
        self._synced.pop(worker, None)
        self._pending_workers.discard(worker)


class OnArrival:
    """Replaces :class:`Iterations` if servers apply pushes on arrival. Under bounded delay, a takeover delays reads."""

    first_clock = 0

    def __init__(self, replication: Replication, is_eventual: bool) -> None:
        self._replication = replication
        self._is_eventual = is_eventual
        self._takeover = Takeover()

    @property
    def pending_workers(self) -> frozenset[int]:
        return self._takeover.pending_workers

    def may_read(self, clock: int) -> bool:
        return self._is_eventual or self._takeover.is_over

    def may_report(self, buckets: int) -> bool:
        return True

    def lead(self, version: int, buckets: int, workers: Collection[int], followers: Collection[int] = ()) -> list[Sum]:
        self._takeover.lead(version, buckets, workers)
        return []

    def synced(self, worker: int, version: int) -> list[Sum]:
        self._takeover.synced(worker, version, self._replication.version)
        return []

    def left(self, worker: int) -> list[Sum]:
        self._takeover.left(worker)
        return []


class Iterations:
    """The iterations of one server that are not yet durable. The server's gate starts at clock `first_clock`."""

    def __init__(self, replication: Replication, first_clock: int = 0) -> None:
        self._replication = replication
        self._takeover = Takeover()
        self._parts = Delivery(0)  # the duplicate filter of the buffered pushes; it does not move with a bucket
        self._pushed: dict[int, set[int]] = {}  # iteration → living workers with a buffered push
        self._complete: dict[int, tuple[int, ...]] = {}  # iteration → workers that ticked it at this server, ascending
        self._next = first_clock  # the gate's lowest iteration that is not complete
        self._unsafe: dict[int, int] = {}  # iteration → number of its sums that a server of the chain may lack
        self._safe = 0  # the number of durable iterations when the chains last had enough replicas
        self._version = 0
        self._unaware: set[int] = set()  # workers that may lack a view in which this server has a successor
        # Pushes of iterations below this number may exist only on this server. None until `_unaware` is empty.
        self._unretained_below: int | None = None
        self._orphaned_below = 0  # iterations below this number may have pushes of workers that left

    def follow(self, former: Iterations) -> None:
        """Replace `former`: this object now receives the acknowledgements of the sums that `former` sent."""
        self._unsafe = former._unsafe

    @property
    def pending_workers(self) -> frozenset[int]:
        return self._takeover.pending_workers

    @property
    def durable(self) -> int:
        """The number of iterations that are complete in a chain with enough replicas; 0 during a takeover."""
        in_chain = self._in_chain
        return min(in_chain, self._safe) if self._replication.place.short else in_chain

    @property
    def _in_chain(self) -> int:
        """The number of iterations whose sums the whole chain has, even if the chain has too few replicas."""
        if not self._takeover.is_over:
            return 0
        durable = min(self._unsafe, default=self._next)
        inherited = self._replication.pushes.inherited
        return durable if inherited is None else min(durable, inherited - 1)

    @property
    def first_clock(self) -> int:
        """The lowest iteration at which a worker may join or rejoin the gate.

        A former primary's gate may have completed more iterations than this server's gate, without the worker. The
        worker's pushes for these iterations would be dropped.
        """
        return self._replication.num_complete

    def may_read(self, clock: int) -> bool:
        """Whether values of iteration `clock` may be read; the gate must be open too."""
        if not self._takeover.is_over:
            return False
        if self.durable >= clock:
            return True
        # A chain with too few replicas stays short until a fill is reported (:meth:`may_report`). The report waits for
        # iterations below `_unretained_below`, so their reads must not wait for the report.
        return self._unretained_below is not None and clock < self._unretained_below and self._in_chain >= clock

    def may_report(self, buckets: int) -> bool:
        """Return whether this server may report to the scheduler that a successor has received all these `buckets`.

        After the report the successor may become primary, and workers must be able to resend this server's buffered
        pushes. So before the report, the whole chain must have all pushes that their senders did not retain.
        Source: rule 5 of section "Sequential consistency" in docs/explanation/protocol.md.
        """
        if not buckets & self._replication.primary:
            return True
        return self._unretained_below is not None and self._in_chain >= self._unretained_below

    def missing(self, worker: int, sequence: int, iteration: int, buckets: int) -> int:
        """Return the buckets for which a worker's push is new; this server leads all `buckets`.

        A push is not new if its bucket has completed the iteration of the push.
        """
        # A push of a complete iteration is either already in the iteration's sum, or too late.
        left = self._replication.delivery.missing(AGGREGATE, iteration + 1, buckets)
        return self._parts.missing(worker, sequence, left)

    def admit(self, worker: int, sequence: int, iteration: int, buckets: int) -> None:
        """Record that a push is buffered for `buckets`, the result of :meth:`missing`."""
        self._parts.admit(worker, sequence, buckets)
        self._pushed.setdefault(iteration, set()).add(worker)

    def complete(self, iteration: int, workers: tuple[int, ...]) -> list[Sum]:
        """Record that the gate has completed the next iteration; return the sums to push."""
        self._next = iteration + 1
        self._complete[iteration] = workers
        if len(self._complete) > _KEPT_ITERATIONS:
            del self._complete[next(iter(self._complete))]
        sums = self._sum(iteration) if self._takeover.is_over else []
        self._record_safe()
        return sums

    def acknowledged(self, iteration: int) -> None:
        """Record that the whole chain has the sum of an iteration. Call this once for each Sum."""
        self._unsafe[iteration] -= 1
        if not self._unsafe[iteration]:
            del self._unsafe[iteration]
        self._record_safe()

    def lead(self, version: int, buckets: int, workers: Collection[int], followers: Collection[int] = ()) -> list[Sum]:
        """Record the buckets that this server leads in view `version`; return the sums to push, except during a
        takeover.

        Call this for each view. A takeover waits for Synced from the `workers` of the view, and for Ready from the
        `followers` (the replicas in the chains of `buckets`).
        """
        follows, self._version = version == self._version + 1, version
        if not self._replication.has_successors or not follows:  # workers may not retain their pushes yet
            self._unaware, self._unretained_below = set(workers), None
        elif self._unretained_below is None:
            self._unaware = set(workers)
        self._check_retention()
        before = self._parts.buckets
        if before & ~buckets:
            self._parts.release(before & ~buckets)
        if buckets & ~before:
            self._parts.adopt(buckets & ~before, ())
        if buckets & ~before & self._replication.place.short:  # the former primary's durable iterations are unknown
            self._safe = 0
        self._record_safe()
        was_over = self._takeover.is_over
        self._takeover.lead(version, buckets, {*workers, *followers})
        return self._complete_known() if buckets & ~before or not was_over else []

    def synced(self, worker: int, version: int) -> list[Sum]:
        was_over = self._takeover.is_over
        self._takeover.synced(worker, version, self._replication.version)
        if version >= self._replication.version:
            self._unaware.discard(worker)
            self._check_retention()
        return [] if was_over else self._complete_known()

    def _record_safe(self) -> None:
        if not self._replication.place.short:
            self._safe = max(self._safe, self._in_chain)

    def forget(self, worker: int, clock: int) -> None:
        """Drop a worker's pushes for iterations from `clock` on, because the worker retires or leaves at `clock`."""
        for iteration in [iteration for iteration in self._pushed if iteration >= clock]:
            self._pushed[iteration].discard(worker)
            if not self._pushed[iteration]:
                del self._pushed[iteration]
        if self._unretained_below is not None:  # do not wait for dropped pushes
            self._unretained_below = min(self._unretained_below, self._end_of_parts())

    def left(self, worker: int) -> list[Sum]:
        """Record that a worker left or died. Its pushes of ended iterations remain in the sums. Return the sums to
        push."""
        was_over = self._takeover.is_over
        for iteration, workers in self._pushed.items():
            if worker in workers:
                workers.discard(worker)
                self._orphaned_below = max(self._orphaned_below, iteration + 1)
        self._takeover.left(worker)
        self._unaware.discard(worker)
        self._check_retention()
        return [] if was_over else self._complete_known()

    def _check_retention(self) -> None:
        if self._unretained_below is None and not self._unaware and self._replication.has_successors:
            self._unretained_below = self._end_of_parts()

    def _end_of_parts(self) -> int:
        return max([self._next, self._orphaned_below, *(iteration + 1 for iteration in self._pushed)])

    def _complete_known(self) -> list[Sum]:
        if not self._takeover.is_over:
            return []
        # After a takeover, iterations that are not complete in every bucket are completed in order.
        known = sorted({*self._complete, *self._pushed})
        return [item for iteration in known if iteration < self._next for item in self._sum(iteration)]

    def _sum(self, iteration: int) -> list[Sum]:
        # A push counts if its sender ticked the iteration. A live worker with a push in a complete iteration
        # has ticked this iteration, even if the worker joined this server's gate at a later clock.
        workers = tuple(sorted({*self._complete.get(iteration, ()), *self._pushed.pop(iteration, ())}))
        buckets = self._replication.delivery.missing(AGGREGATE, iteration + 1, self._replication.primary)
        if not buckets:
            return []
        self._unsafe[iteration] = self._unsafe.get(iteration, 0) + 1
        return [Sum(iteration, workers, buckets)]
