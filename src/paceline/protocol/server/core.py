"""A parameter server's protocol: the timing of requests, the route of a push, and the answers to reads.

The core consists of the gate (:class:`~paceline.protocol.server.workers.Workers`), replication
(:class:`~paceline.protocol.replication.Replication`) and iterations
(:class:`~paceline.protocol.iterations.Iterations`). A token represents each request; the core has no parameters or
gradients.

A request is first timed (:meth:`ServerCore.time`), and postponed if it is early. A push gets a verdict
(:meth:`ServerCore.push`) and is then accepted (:meth:`ServerCore.admit`). A read that does not have to wait
(:meth:`ServerCore.is_readable`) is answered directly. Everything else goes through :meth:`ServerCore.handle`.

Source: OSDI'14 "Scaling Distributed Machine Learning with the Parameter Server", section 4; views as in Viewstamped
Replication Revisited (Liskov and Cowling 2012).
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.errors import ProtocolError
from paceline.protocol import replication
from paceline.protocol.buckets import Buckets
from paceline.protocol.consistency import Consistency
from paceline.protocol.scheduler.views import View
from paceline.protocol.server import events
from paceline.protocol.server.events import (
    Clocks,
    Event,
    Instruction,
    Route,
    Timing,
    TimingClass,
    Verdict,
    WaitReasons,
)
from paceline.protocol.server.progress import EarlyRequests, Progress

_CALLS = replication.CALLS
# the largest step of a worker's clock in one frame, far more than the number of frames in flight
_MAX_LEAP = 1 << 16
# Read once, because looking up a member of an Enum takes ten times as long as a global name.
_DATA, _IMMEDIATE = TimingClass.DATA, Timing.IMMEDIATE
_BUFFER, _CHAIN, _ALONE = Route.BUFFER, Route.CHAIN, Route.ALONE
_STALE, _EXPELLED = Route.STALE, Route.EXPELLED
_MEMBERS_ONLY = frozenset((TimingClass.TICK, TimingClass.SYNCED, TimingClass.CALL))


class ServerCore:
    """One server's state.

    `expected_workers` must join before the first iteration can complete. `min_replicas` is the number of replicas that
    must have a push before it is acknowledged. A runtime uses only the properties and methods of this class.
    """

    def __init__(
        self, consistency: Consistency, *, expected_workers: int = 1, replicas: int = 0, min_replicas: int = 0
    ) -> None:
        self._replicas = replicas
        self._min_replicas = min_replicas
        self._out: list[Instruction] = []
        self.progress = Progress(consistency, expected_workers, self._out)
        self.replication = self.progress.replication
        self.workers = self.progress.workers
        self.reads = self.progress.reads
        self.early = EarlyRequests()
        self.epoch = -1
        self.has_copies = replicas > 0
        """Whether other servers have or receive replicas.

        If not, a push counts as delivered to all buckets of this server.
        """
        self._me = 0
        self._view_before: View | None = None  # the view that arrived before the welcome, if any

    @property
    def consistency(self) -> Consistency:
        return self.workers.gate.consistency

    @property
    def version(self) -> int:
        return self.replication.version

    @property
    def primary(self) -> Buckets:
        """The buckets that this server leads."""
        return self.replication.primary

    @property
    def held(self) -> Buckets:
        """The buckets that this server has completely."""
        return self.replication.held

    @property
    def filling(self) -> frozenset[int]:
        return self.replication.filling

    @property
    def durable(self) -> int:
        """The number of iterations that are complete and durable; 0 unless consistency is sequential."""
        iterations = self.progress.iterations
        return 0 if iterations is None else iterations.durable

    @property
    def latest_clock(self) -> int:
        return max(self.workers.gate.clocks.values(), default=0)

    @property
    def num_waiting(self) -> int:
        """The number of blocked reads, and of pushes with too few replicas."""
        return self.progress.num_waiting

    @property
    def early_requests(self) -> list[object]:
        return list(self.early)

    @property
    def pending_pushes(self) -> set[object]:
        return self.replication.pushes.waiting

    def forwarded(self, worker: int, sequence: int) -> list[tuple[object, Buckets]]:
        """Return the parts of one push that a successor may lack, as (token, buckets), the latest part first."""
        return self.replication.pushes.forwarded(worker, sequence)

    def shortage(self, buckets: Buckets) -> tuple[int, int] | None:
        """Return a bucket with too few replicas to acknowledge a push, and its number of replicas; else None."""
        return self.replication.place.shortage(buckets)

    def is_readable(self, clock: int) -> bool:
        return self.workers.gate.is_open(clock) and self.progress.updates.may_read(clock)

    def wait_reasons(self, clock: int) -> WaitReasons:
        gate, updates, ranks = self.workers.gate, self.progress.updates, self.workers.ranks
        late = [ranks.get(worker, worker) for worker in gate.lagging(clock)]
        late += [ranks[worker] for worker in updates.pending_workers if worker in ranks]
        return WaitReasons(late, gate.num_missing, not late and gate.is_open(clock) and not updates.may_read(clock))

    def takes_part(self, worker: int) -> bool:
        return worker in self.workers.counted

    def is_excluded(self, incarnation: int) -> bool:
        return self.workers.is_excluded(incarnation)

    def is_ahead(self, worker: int) -> bool:
        gate = self.workers.gate
        return gate.clocks.get(worker, 0) > gate.minimum

    def rank_of(self, worker: int) -> int:
        return self.workers.ranks[worker]

    def known_clocks(self) -> Clocks:
        return self.workers.known_clocks()

    def next_fill(self, target: int) -> tuple[int, int, replication.FilterState] | None:
        return self.replication.next_fill(target)

    def checkable(self, target: int) -> Buckets:
        return self.replication.checkable(target)

    def is_comparable(self, source: int, version: int, bucket: int) -> bool:
        return self.replication.is_comparable(source, version, bucket)

    def applied_to(self, bucket: int) -> tuple[tuple[int, int], ...]:
        return self.replication.applied_to(bucket)

    def validate(self) -> None:
        self.progress.validate()

    def joined(self, me: int) -> list[Instruction]:
        """Set this server's incarnation; return the instructions."""
        self._me = me
        self.replication = replication.Replication(me, self._min_replicas)
        self.progress.become(self.replication)
        before, self._view_before = self._view_before, None
        return [] if before is None else self.handle(before)

    def time(self, kind: TimingClass, sender: int, version: int) -> Timing:
        """Return the timing of a request that was sent in the view of `version`."""
        current = self.replication.version
        if kind is _DATA and version == current and self._me:
            return _IMMEDIATE
        if not self._me:
            return Timing.EARLY
        if kind in _MEMBERS_ONLY:
            # A worker takes part only if the current view lists it.
            if self.workers.is_unnamed(sender):
                return Timing.UNNAMED
            # A server without the workers' clocks waits until another server sends them.
            if not self.progress.has_clocks:
                return Timing.BEFORE_CLOCKS
        # Messages of one worker are handled in order of arrival, so a call waits for earlier postponed messages.
        if kind is TimingClass.CALL and self.early.has_of(sender):
            return Timing.EARLY
        if version == current or kind in (TimingClass.CALL, TimingClass.OTHER):
            return _IMMEDIATE
        # A request is handled in the view in which it was sent. If this server's view is older, the request waits.
        if version > current:
            return Timing.EARLY
        if kind is TimingClass.CHAIN:
            return _IMMEDIATE
        return Timing.REPEATED if kind is TimingClass.SYNCED else Timing.STALE

    def postpone(self, timing: Timing, sender: int, token: object) -> None:
        """Store a request until a later event returns a ResumeRequest for its token."""
        self.early.postpone(timing, sender, token)

    def disconnected(self, is_of_it: Callable[[object], bool]) -> None:
        self.early.drop(is_of_it)
        self.progress.drop(is_of_it)

    def withhold(self, token: object, deadline_s: float) -> None:
        self.progress.withhold(token, deadline_s)

    def push(self, worker: int, sequence: int, iteration: int, buckets: Buckets | None = None) -> Verdict:
        """Return the verdict on a push without recording it. The caller checks the content, then calls :meth:`admit`.

        `buckets` are the buckets of the push's keys; None unless :attr:`has_copies`. Raises ProtocolError if the worker
        cannot have begun this iteration.
        """
        workers, place, iterations = self.workers, self.replication.place, self.progress.iterations
        takes_part = worker in workers.counted
        if takes_part:
            self._check_leap(worker, iteration)
        elif worker < 1 or worker & ~_CALLS in workers.departed:
            return Verdict(_EXPELLED, worker, sequence, iteration)
        primary = place.primary
        counted = primary if buckets is None else buckets
        if counted & ~primary:
            return Verdict(_STALE, worker, sequence, iteration)
        if iterations is not None and (takes_part or workers.has_started(worker, iteration)):
            if not self._replicas:
                counted = primary
            fresh = iterations.missing(worker, sequence, iteration, counted)
            return Verdict(_BUFFER, worker, sequence, iteration, counted, fresh, takes_part)
        route = _CHAIN if place.successors or place.short else _ALONE
        # A client may have split a call by the chains of another view, so record this part only for the buckets of its
        # keys.
        if route is _ALONE and worker < _CALLS:
            counted = primary
        fresh = self.replication.delivery.missing(worker, sequence, counted)
        return Verdict(route, worker, sequence, iteration, counted, fresh, takes_part)

    def admit(self, verdict: Verdict, token: object = None) -> list[Instruction]:
        """Accept and record the push of the last call of :meth:`push`; return the instructions for `token`.

        Without a token, the caller applies or buffers the push and answers it; the route is not CHAIN then. O(1) if the
        push is newer than all earlier pushes of its worker.
        """
        route, worker, sequence, fresh = verdict.route, verdict.worker, verdict.sequence, verdict.fresh
        if route is _CHAIN:
            self.progress.replicate(self.replication.push(token, worker, sequence, verdict.buckets))
            return self._take_out()
        if route is _BUFFER:
            assert self.progress.iterations is not None
            if fresh:
                self.progress.iterations.admit(worker, sequence, verdict.iteration, fresh)
            return [] if token is None else [replication.Acknowledge(token)]
        self.replication.delivery.admit(worker, sequence, verdict.buckets)
        return [] if token is None else [replication.Apply(token, fresh), replication.Acknowledge(token)]

    def handle(self, event: Event) -> list[Instruction]:
        """Apply one event; return the instructions, in order.

        Raises ProtocolError if a message contains impossible clocks; nothing is changed.
        """
        match event:
            case replication.Forwarded() | replication.Acknowledged():
                self.progress.replicate(self.replication.handle(event))
            case events.WorkerTicked(worker, clock):
                return self.tick(worker, clock)
            case events.Read():
                self._read(event)
            case events.WorkerJoining() | events.Synced() | events.WorkerRetired():
                self._handle_worker(event)
            case View():
                self._take_view(event)
            case events.ReadyReceived(source, version):
                self.progress.sum_up(self.progress.updates.synced(source, version))
            case events.ClocksReceived(known):
                self.progress.take_clocks(known)
                if self.progress.has_clocks:
                    self._receive(Timing.BEFORE_CLOCKS)
            case events.Time(time_s):
                self.progress.expire(time_s)
            case replication.LinkUp(target):
                self._out.append(events.SendClocks(target))
                self.progress.replicate(self.replication.handle(event))
            case _:
                self.progress.replicate(self.replication.handle(event))
        return self._take_out()

    def tick(self, worker: int, clock: int) -> list[Instruction]:
        """Apply a WorkerTicked, as :meth:`handle` does. O(1) if no iteration is completed."""
        workers = self.workers
        if worker not in workers.counted:
            return []
        self._check_leap(worker, clock - 1)
        instructions = workers.gate.tick(worker, clock)
        if not instructions:
            return []
        self.progress.follow_gate(instructions)
        return self._take_out()

    def _check_leap(self, worker: int, clock: int) -> None:
        """Raise ProtocolError if a worker reports iterations that it cannot have begun.

        Under sequential consistency each iteration is completed separately, so a huge leap would block the server.
        """
        if self.progress.iterations is None:
            return
        gate = self.workers.gate
        known = max(gate.clocks.get(worker, 0), gate.minimum)
        if clock > known + _MAX_LEAP and clock > (known := max(known, self.progress.updates.first_clock)) + _MAX_LEAP:
            raise ProtocolError(
                f"a worker (incarnation {worker}) went from iteration {known} to {clock}: expected a step of at most "
                f"{_MAX_LEAP}"
            )

    def _take_out(self) -> list[Instruction]:
        self.progress.answer()
        out = self._out[:]
        self._out.clear()
        return out

    def _read(self, event: events.Read) -> None:
        if self.workers.is_excluded(event.worker):
            self._out.append(events.RejectExpelled(event.token))
        elif event.buckets & ~self.replication.primary:
            self._out.append(events.Stale(event.token))
        else:
            self.reads.block(event)
            self.progress.follow_gate(self.workers.gate.begin(event.worker, event.clock, event.token))

    def _handle_worker(self, event: events.WorkerJoining | events.Synced | events.WorkerRetired) -> None:
        worker = event.worker
        if isinstance(event, events.WorkerRetired):
            self.progress.retire(worker)
            return
        is_known = worker in self.workers.gate.clocks
        is_joining = isinstance(event, events.WorkerJoining) or (event.has_joined and not is_known)
        if self.workers.is_excluded(worker) or (is_joining and not self.workers.may_join(worker)):
            self._out.append(events.RejectExpelled(event.token))
            return
        self._check_leap(worker, event.clock)
        if isinstance(event, events.WorkerJoining):
            clock = max(event.clock, self.progress.updates.first_clock)
            self.progress.follow_gate(self.workers.join(worker, event.rank, clock))
            self._out.append(events.ConfirmJoin(event.token, self.workers.gate.clocks[worker]))
            return
        if event.has_joined or is_known:
            self.progress.follow_gate(self.workers.sync(worker, event.rank, event.clock, event.counts))
            if not event.counts:
                self.progress.retire(worker)
        self.progress.sum_up(self.progress.updates.synced(worker, event.version))

    def _take_view(self, view: View) -> None:
        if not self._me:
            self._view_before = view
            return
        if view.epoch < self.epoch:
            return  # a worker that is not in this older view may have joined later
        self.epoch = view.epoch
        for worker in self.workers.excluded_by(view):
            self.progress.leave(worker)
        if view.version > self.replication.version:
            self.progress.change(view)
            place = self.replication.place
            self.has_copies = bool(self._replicas or place.successors or place.short)
            if not self.replication.is_in_chain:
                self.progress.forget_workers()
                self.early.take(Timing.BEFORE_CLOCKS)
            self._receive(Timing.EARLY)
        self._receive(Timing.UNNAMED)

    def _receive(self, timing: Timing) -> None:
        self._out += [events.ResumeRequest(token) for token in self.early.take(timing)]
