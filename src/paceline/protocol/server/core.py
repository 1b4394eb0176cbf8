"""A parameter server's protocol: which request is handled when, what becomes of a push, when a read is answered.

A server holds one :class:`ServerCore`, and so does each simulated one. Its runtime feeds it the scheduler's views, what
workers and other servers send, and what becomes of its links, and does as the instructions bid, in their order. The
core composes the leaves: the gate (:class:`~paceline.protocol.server.workers.Workers`), replication
(:class:`~paceline.protocol.replication.Replication`) and iterations
(:class:`~paceline.protocol.iterations.Iterations`); :class:`~paceline.protocol.server.progress.Progress` has how these
act together. Parameters and gradients never come here: a token stands for each request.

A request is first timed (:meth:`ServerCore.time`), and kept if it is early. A push or read that need not wait costs a
few look-ups, see :meth:`ServerCore.route` and :meth:`ServerCore.is_readable`; all else goes by
:meth:`ServerCore.handle`.

Source: OSDI'14 "Scaling Distributed Machine Learning with the Parameter Server", section 4; views as in Viewstamped
Replication Revisited (Liskov and Cowling 2012).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from paceline.protocol import clocks, replication
from paceline.protocol.clocks import Gate
from paceline.protocol.consistency import Consistency
from paceline.protocol.iterations import Iterations
from paceline.protocol.replication import Replication
from paceline.protocol.server import events
from paceline.protocol.server.events import Event, Instruction, Route, Timing, TimingClass
from paceline.protocol.server.progress import Progress
from paceline.protocol.server.waiting import EarlyRequests

_KEEP, _CHAIN, _ALONE = Route.KEEP, Route.CHAIN, Route.ALONE
_WORDS = frozenset((TimingClass.TICK, TimingClass.SYNCED, TimingClass.CALL))


class ServerCore:
    """One server's state.

    Arguments: the cluster's `consistency`; `expected_workers`, how many must have joined before the first iteration can
    complete; `replicas`, how many servers the cluster has behind each primary; `min_replicas`, how many of them must
    have a push before it is acknowledged.
    """

    gate_type: ClassVar[type[Gate]] = Gate
    replication_type: ClassVar[type[Replication]] = Replication
    iterations_type: ClassVar[type[Iterations]] = Iterations

    def __init__(
        self, consistency: Consistency, *, expected_workers: int = 1, replicas: int = 0, min_replicas: int = 0
    ) -> None:
        self._replicas = replicas
        self._min_replicas = min_replicas
        self._out: list[Instruction] = []
        self.progress = Progress(consistency, expected_workers, self.gate_type, self.iterations_type, self._out)
        self.replication = self.progress.replication
        self.workers = self.progress.workers
        self.reads = self.progress.reads
        self.early = EarlyRequests()
        self.epoch = -1
        self._me = 0
        self._view_before: events.ViewChanged | None = None  # one that came before the welcome

    def joined(self, me: int) -> list[Instruction]:
        """Be the member of incarnation `me`; return what to do."""
        self._me = me
        self.replication = self.replication_type(me, self._min_replicas)
        self.progress.become(self.replication)
        before, self._view_before = self._view_before, None
        return [] if before is None else self.handle(before)

    # Requests.

    def time(self, kind: TimingClass, sender: int, version: int) -> Timing:
        """Say when a request is to be handled that a process sent by the view of `version`."""
        if not self._me:
            return Timing.EARLY
        if kind in _WORDS:
            # Rule 1: nobody takes part whom no view names.
            if self.workers.is_unnamed(sender):
                return Timing.UNNAMED
            # Rule 2: a server that does not know where the workers are waits for another one that does.
            if not self.progress.has_clocks:
                return Timing.BEFORE_CLOCKS
        # Rule 3: of two words of a worker the one that came first is taken first.
        if kind is TimingClass.CALL and self.early.has_of(sender):
            return Timing.EARLY
        current = self.replication.version
        if version == current or kind in (TimingClass.CALL, TimingClass.OTHER):
            return Timing.NOW
        # Rule 4: sender and receiver have the same view, or the one that is behind takes the newer one first.
        if version > current:
            return Timing.EARLY
        if kind is TimingClass.CHAIN:
            return Timing.NOW
        return Timing.REPEATED if kind is TimingClass.SYNCED else Timing.STALE

    def disconnected(self, is_of_it: Callable[[object], bool]) -> None:
        """Forget the requests that came on a connection: nobody hears an answer."""
        self.early.drop(is_of_it)
        self.progress.drop(is_of_it)

    def withhold(self, token: object, deadline_s: float) -> None:
        """Wait no longer than this until a push may be acknowledged: see :class:`replication.Withhold`."""
        self.progress.withhold(token, deadline_s)

    def route(self, worker: int, iteration: int) -> Route:
        """Say what becomes of a push."""
        if self.progress.iterations is not None and self.workers.has_begun(worker, iteration):
            return _KEEP
        chains = self.replication
        return _CHAIN if chains.has_successors or chains.place.short else _ALONE

    def keep(self, worker: int, sequence: int, iteration: int, buckets: int) -> int:
        """Take note of a push that is kept until its iteration is complete; return for which buckets it is new."""
        iterations = self.progress.iterations
        assert iterations is not None
        # Where there is one copy nobody looks for the buckets of the keys: it counts as a push to all.
        extent = buckets if self._replicas else self.replication.primary
        return iterations.admit(worker, sequence, iteration, extent)

    def missing(self, worker: int, sequence: int, buckets: int) -> int:
        """Return for which of these buckets, all held, a push would be new."""
        return self.replication.missing(worker, sequence, buckets)

    def admit(self, worker: int, sequence: int) -> int:
        """Take a push where there is one copy, as one to all buckets that this server leads: O(1).

        Returns those for which it is new.
        """
        return self.replication.admit(worker, sequence)

    @property
    def durable(self) -> int:
        """How many iterations are complete and safe: 0 unless consistency is sequential."""
        iterations = self.progress.iterations
        return 0 if iterations is None else iterations.durable

    def is_readable(self, clock: int) -> bool:
        """Whether values of iteration `clock` may be read now."""
        return self.workers.gate.is_open(clock) and self.progress.updates.may_read(clock)

    # Events.

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event; return what to do, in order.

        Raises:
            ProtocolError: a worker, or another server, says what cannot be; nothing has changed.
        """
        match event:
            case events.Push():  # first what every push goes by
                self._push(event)
            case replication.Forwarded() | replication.Acknowledged():
                self.progress.replicate(event)
            case events.WorkerTicked(worker, clock):
                return self.tick(worker, clock)
            case events.Read():
                self._read(event)
            case events.WorkerJoining() | events.Synced() | events.WorkerRetired():
                self._take_word(event)
            case events.ViewChanged():
                self._take_view(event)
            case events.ReadyReceived(source, version):
                self.progress.sum_up(self.progress.updates.synced(source, version))
            case events.ClocksReceived(known):
                self.progress.take_clocks(known)
                if self.progress.has_clocks:
                    self._receive(Timing.BEFORE_CLOCKS)
            case events.Time(now_s):
                self.progress.expire(now_s)
            case replication.LinkUp(target):
                self._out.append(events.SendClocks(target))
                self.progress.replicate(event)
            case _:
                self.progress.replicate(event)
        return self._take_out()

    def tick(self, worker: int, clock: int) -> list[Instruction]:
        """Do as :meth:`handle` does with a WorkerTicked. O(1) if it completes nothing."""
        instructions = self.workers.tick(worker, clock)
        if not instructions:
            return []
        self.progress.follow_gate(instructions)
        return self._take_out()

    def _take_out(self) -> list[Instruction]:
        self.progress.answer()
        out = self._out[:]
        self._out.clear()
        return out

    def _push(self, event: events.Push) -> None:
        token, buckets = event.token, event.buckets
        if self.workers.is_gone(event.worker & ~replication.CALLS):
            self._out.append(events.TellExpelled(token))
        elif event.buckets & ~self.replication.primary:
            self._out.append(replication.RefusePush(token))
        elif (route := self.route(event.worker, event.iteration)) is _CHAIN:
            self.progress.replicate(
                replication.PushReceived(token, event.worker, event.sequence, event.version, buckets)
            )
        elif route is _KEEP:
            fresh = self.keep(event.worker, event.sequence, event.iteration, buckets)
            self._out += [events.Keep(token, fresh & buckets), replication.Acknowledge(token)]
        else:
            # A call may have been cut by another view: it counts only for the buckets that its keys are of.
            is_call = event.worker >= replication.CALLS
            fresh = self.replication.admit(event.worker, event.sequence, buckets if is_call else None)
            self._out += [replication.Apply(token, fresh & buckets), replication.Acknowledge(token)]

    def _read(self, event: events.Read) -> None:
        if self.workers.is_gone(event.worker):
            self._out.append(events.TellExpelled(event.token))
        elif event.buckets & ~self.replication.primary:
            self._out.append(events.Stale(event.token))
        else:
            self.reads.block(event)
            self.progress.follow_gate(self.workers.gate.handle(clocks.Ask(event.worker, event.clock, event.token)))

    # Workers.

    def _take_word(self, event: events.WorkerJoining | events.Synced | events.WorkerRetired) -> None:
        worker = event.worker
        if isinstance(event, events.WorkerRetired):
            self.progress.retire(worker)
            return
        is_known = worker in self.workers.gate.clocks
        is_joining = isinstance(event, events.WorkerJoining) or (event.has_joined and not is_known)
        if self.workers.is_gone(worker) or (is_joining and not self.workers.may_join(worker)):
            self._out.append(events.TellExpelled(event.token))
            return
        self.workers.check_leap(worker, event.clock, self.progress.updates)
        if isinstance(event, events.WorkerJoining):
            clock = max(event.clock, self.progress.updates.first_clock)
            self.progress.follow_gate(self.workers.join(worker, event.rank, clock))
            self._out.append(events.TellJoined(event.token, self.workers.gate.clocks[worker]))
            return
        if event.has_joined or is_known:
            self.progress.follow_gate(self.workers.sync(worker, event.rank, event.clock, event.counts))
            if not event.counts:
                self.progress.retire(worker)
        self.progress.sum_up(self.progress.updates.synced(worker, event.version))

    # Views.

    def _take_view(self, view: events.ViewChanged) -> None:
        if not self._me:
            self._view_before = view
            return
        if view.epoch < self.epoch:
            return  # overtaken by a newer one: a newcomer that is not in it has not left
        self.epoch = view.epoch
        for worker in self.workers.excluded_by(view):
            self.progress.leave(worker)
        if view.version > self.replication.version:
            self.progress.change(view)
            if not self.replication.is_in_chain:
                self.progress.forget_workers()
                self.early.take(Timing.BEFORE_CLOCKS)
            self._receive(Timing.EARLY)
        self._receive(Timing.UNNAMED)

    def _receive(self, timing: Timing) -> None:
        self._out += [events.ResumeRequest(token) for token in self.early.take(timing)]

    def validate(self) -> None:
        """Assert the invariants."""
        self.progress.validate()
