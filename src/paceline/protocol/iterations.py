"""Sequential consistency on one server of a chain: which pushes an iteration consists of, when its sum goes out, and
which reads must wait.

A server holds one :class:`Iterations` beside its :class:`~paceline.protocol.clocks.Gate` and its
:class:`~paceline.protocol.replication.Replication`. The pushes of an iteration are kept until the gate says that it is
complete; then their sum is one push in the name of AGGREGATE down the chain, so a bucket's filter says how many of its
iterations are complete, wherever the bucket goes. Reads of the next iteration wait until the chain has the sum.

A server that becomes primary of more buckets (a *takeover*) does not know what the one before it had in memory. Workers
keep their pushes until they are safe, and send them again; each says `Synced` behind the last. Until all have, nothing
is completed or read. Under bounded delay too nothing may be read until then, for a worker's tick may have come before
the pushes that it stands for: there a server holds :class:`OnArrival` instead.

While a chain is shorter than the cluster's `min_replicas` asks for, what it completes counts as in the chain, but not
as safe: reads of the next iteration wait, and workers keep their pushes, until it is long enough again.

Workers keep pushes only while some server is behind a primary. So the first server that is filled behind this one is
reported to have a bucket only when all that is here alone is kept: until then nobody else may come to lead the bucket.

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
"""How far a primary may be behind the servers that take over from it."""


@dataclass(frozen=True, slots=True)
class Sum:
    """Push what `workers` pushed in `iteration`, summed in this order, in the name of AGGREGATE, for these buckets.

    Its sequence is the iteration plus one; tell :meth:`Iterations.acknowledged` when the chain has it.
    """

    iteration: int
    workers: tuple[int, ...]
    buckets: int


class Takeover:
    """The workers that a server waits for since it became primary of more buckets."""

    def __init__(self) -> None:
        self._led = 0
        self._synced: dict[int, int] = {}  # worker → version up to which it has sent again what it kept
        self._awaited: set[int] = set()

    @property
    def awaited(self) -> frozenset[int]:
        """The workers that have not sent again what they kept; empty if there is no takeover."""
        return frozenset(self._awaited)

    @property
    def is_over(self) -> bool:
        """Whether nobody is waited for: whatever was acknowledged or ticked before is here."""
        return not self._awaited

    def lead(self, version: int, buckets: int, workers: Collection[int]) -> None:
        """Note which buckets this server leads from `version` on, and what workers there are.

        Those are all who are members of the cluster as of the map of this version, not only those that this server's
        gate knows: one that it does not know yet may have pushed to the primary before.
        """
        gained = buckets & ~self._led
        self._led = buckets
        if gained or self._awaited:
            self._awaited = {worker for worker in workers if self._synced.get(worker, -1) < version}

    def synced(self, worker: int, version: int, current: int) -> None:
        """Note that a worker has sent again what it kept, by the map of `version`; this server's is `current`."""
        self._synced[worker] = max(version, self._synced.get(worker, -1))
        if version >= current:
            self._awaited.discard(worker)

    def left(self, worker: int) -> None:
        """Note that a worker is gone."""
        self._synced.pop(worker, None)
        self._awaited.discard(worker)


class OnArrival:
    """What takes the place of :class:`Iterations` where pushes are applied as they come: a takeover, and no more."""

    first_clock = 0

    def __init__(self, replication: Replication, is_eventual: bool) -> None:
        self._replication = replication
        self._is_eventual = is_eventual
        self._takeover = Takeover()

    @property
    def awaited(self) -> frozenset[int]:
        """The workers that a takeover waits for; empty if there is none."""
        return self._takeover.awaited

    def may_read(self, clock: int) -> bool:
        """Whether values of iteration `clock` may be read, as far as it depends on this: its gate must be open too."""
        return self._is_eventual or self._takeover.is_over

    def may_report(self, buckets: int) -> bool:
        """Whether the scheduler may be told that the server behind this one has these buckets."""
        return True

    def lead(self, version: int, buckets: int, workers: Collection[int], behind: Collection[int] = ()) -> list[Sum]:
        """Note which buckets this server leads from `version` on, and what workers there are: see :class:`Takeover`."""
        self._takeover.lead(version, buckets, workers)
        return []

    def synced(self, worker: int, version: int) -> list[Sum]:
        """Note that a worker has sent again what it kept, by the map of `version`."""
        self._takeover.synced(worker, version, self._replication.version)
        return []

    def left(self, worker: int) -> list[Sum]:
        """Note that a worker is gone."""
        self._takeover.left(worker)
        return []


class Iterations:
    """The iterations of one server that are not complete, or not safe.

    `first_clock` is the minimum at which the server's gate began.
    """

    def __init__(self, replication: Replication, first_clock: int = 0) -> None:
        self._replication = replication
        self._takeover = Takeover()
        self._parts = Delivery(0)  # the pushes that are in memory; never exported: they are no part of a bucket
        self._pushed: dict[int, set[int]] = {}  # iteration → living workers with a push in memory
        self._complete: dict[int, tuple[int, ...]] = {}  # iteration → who ticked it here, in order
        self._next = first_clock  # the first iteration that the gate has not completed
        self._unsafe: dict[int, int] = {}  # iteration → how many of its sums the chain does not have
        self._safe = 0  # all below this were in the chains when these had replicas enough last
        self._version = 0
        self._careless: set[int] = set()  # workers that may not have heard that somebody is behind this server
        self._unkept: int | None = None  # when all have: iterations below this may be in nobody's memory but this one
        self._bequeathed = 0  # iterations below this may have pushes in memory of workers that ticked them and are gone

    def follow(self, former: Iterations) -> None:
        """Begin where another server is: the sums of `former` that are on their way are acknowledged here."""
        self._unsafe = former._unsafe

    @property
    def awaited(self) -> frozenset[int]:
        """The workers that a takeover waits for; empty if there is none."""
        return self._takeover.awaited

    @property
    def durable(self) -> int:
        """All iterations below this one are complete and a chain with replicas enough has them; 0 during a takeover."""
        in_chain = self._in_chain
        return min(in_chain, self._safe) if self._replication.place.short else in_chain

    @property
    def _in_chain(self) -> int:
        """The same, however short the chain."""
        if not self._takeover.is_over:
            return 0
        durable = min(self._unsafe, default=self._next)
        inherited = self._replication.pushes.inherited
        return durable if inherited is None else min(durable, inherited - 1)

    @property
    def first_clock(self) -> int:
        """Where a worker that joins the gate (again) has to begin at least.

        A bucket may have iterations complete that this server's gate has not: another primary's gate had, at a time
        when this worker did not count there. What it pushed for them would be dropped.
        """
        return self._replication.num_complete

    def may_read(self, clock: int) -> bool:
        """Whether values of iteration `clock` may be read, as far as it depends on this: its gate must be open too."""
        if not self._takeover.is_over:
            return False
        if self.durable >= clock:
            return True
        # Rule 7: a chain is short until a fill is reported, and that may have to wait for iterations: they go on.
        return self._unkept is not None and clock < self._unkept and self._in_chain >= clock

    def may_report(self, buckets: int) -> bool:
        """Whether the scheduler may be told that the server behind this one has these buckets.

        It may come to lead them at once then, and what was pushed to them here has to come again.
        """
        if not buckets & self._replication.primary:
            return True
        # Rule 5: what was pushed before its sender knew that it had to keep it is in the chain first.
        return self._unkept is not None and self._in_chain >= self._unkept

    def missing(self, worker: int, sequence: int, iteration: int, buckets: int) -> int:
        """Return those of `buckets` (all led here) for which a worker's push is new.

        A repeat for an iteration that its bucket has complete is not new.
        """
        # Rule 1: a part of a complete iteration was in its sum, or came too late to be.
        left = self._replication.delivery.missing(AGGREGATE, iteration + 1, buckets)
        return self._parts.missing(worker, sequence, left)

    def admit(self, worker: int, sequence: int, iteration: int, buckets: int) -> None:
        """Count a push that is :meth:`missing` in `buckets` as kept in memory."""
        self._parts.admit(worker, sequence, buckets)
        self._pushed.setdefault(iteration, set()).add(worker)

    def complete(self, iteration: int, workers: tuple[int, ...]) -> list[Sum]:
        """Note that the gate has completed an iteration; they come in order. Return the sums that are to go out."""
        self._next = iteration + 1
        self._complete[iteration] = workers
        if len(self._complete) > _KEPT_ITERATIONS:
            del self._complete[next(iter(self._complete))]
        sums = self._sum(iteration) if self._takeover.is_over else []
        self._note_safe()
        return sums

    def acknowledged(self, iteration: int) -> None:
        """Note that the whole chain has a sum of an iteration; for each Sum it comes once."""
        self._unsafe[iteration] -= 1
        if not self._unsafe[iteration]:
            del self._unsafe[iteration]
        self._note_safe()

    def lead(self, version: int, buckets: int, workers: Collection[int], behind: Collection[int] = ()) -> list[Sum]:
        """Note which buckets this server leads from `version` on, and what workers there are: see :class:`Takeover`.

        A takeover also waits for the servers `behind` to be ready (:class:`~paceline.protocol.replication.Lead`).
        Returns the sums that are to go out, if nobody has to be waited for. Tell it of every new map.
        """
        follows, self._version = version == self._version + 1, version
        if not self._replication.has_successors or not follows:  # workers may have seen a map by which none keeps
            self._careless, self._unkept = set(workers), None
        elif self._unkept is None:
            self._careless = set(workers)
        self._look_at_workers()
        before = self._parts.buckets
        if before & ~buckets:
            self._parts.release(before & ~buckets)
        if buckets & ~before:
            self._parts.adopt(buckets & ~before, ())
        if buckets & ~before & self._replication.place.short:  # what the one before had withheld is not known here
            self._safe = 0
        self._note_safe()
        was_over = self._takeover.is_over
        # Rule 2: what was on its way to the primary before comes again, before anything here is completed or read.
        self._takeover.lead(version, buckets, {*workers, *behind})
        return self._settle() if buckets & ~before or not was_over else []

    def synced(self, worker: int, version: int) -> list[Sum]:
        """Note that a worker has sent again what it kept, by the map of `version`. Return the sums to go out."""
        was_over = self._takeover.is_over
        self._takeover.synced(worker, version, self._replication.version)
        if version >= self._replication.version:
            self._careless.discard(worker)
            self._look_at_workers()
        return [] if was_over else self._settle()

    def _note_safe(self) -> None:
        if not self._replication.place.short:
            self._safe = max(self._safe, self._in_chain)

    def forget(self, worker: int, clock: int) -> None:
        """Note that a worker finishes, or leaves, at `clock`: what it pushed for iterations from then on is dropped."""
        for iteration in [iteration for iteration in self._pushed if iteration >= clock]:
            self._pushed[iteration].discard(worker)
            if not self._pushed[iteration]:
                del self._pushed[iteration]
        if self._unkept is not None:  # nobody may ever complete what was dropped: it is not waited for
            self._unkept = min(self._unkept, self._end_of_parts())

    def left(self, worker: int) -> list[Sum]:
        """Note that a worker is gone: what it pushed counts where it ticked. Return the sums to go out."""
        was_over = self._takeover.is_over
        for iteration, workers in self._pushed.items():
            if worker in workers:
                workers.discard(worker)
                self._bequeathed = max(self._bequeathed, iteration + 1)
        self._takeover.left(worker)
        self._careless.discard(worker)
        self._look_at_workers()
        return [] if was_over else self._settle()

    def _look_at_workers(self) -> None:
        if self._unkept is None and not self._careless and self._replication.has_successors:
            self._unkept = self._end_of_parts()

    def _end_of_parts(self) -> int:
        """Return the iteration from which on no push is in memory."""
        return max([self._next, self._bequeathed, *(iteration + 1 for iteration in self._pushed)])

    def _settle(self) -> list[Sum]:
        if not self._takeover.is_over:
            return []
        # Rule 3: after a takeover all that some bucket lacks is completed, in the order of the iterations.
        known = sorted({*self._complete, *self._pushed})
        return [each for iteration in known if iteration < self._next for each in self._sum(iteration)]

    def _sum(self, iteration: int) -> list[Sum]:
        # Rule 4: a part counts if its sender ticked the iteration. Of one who lives and has a part of an iteration that
        # is complete that is sure, though this server's gate may have learned of it when it stood higher already.
        workers = tuple(sorted({*self._complete.get(iteration, ()), *self._pushed.pop(iteration, ())}))
        buckets = self._replication.delivery.missing(AGGREGATE, iteration + 1, self._replication.primary)
        if not buckets:
            return []
        self._unsafe[iteration] = self._unsafe.get(iteration, 0) + 1
        return [Sum(iteration, workers, buckets)]
