"""A parameter server's protocol: which request is handled when, what becomes of a push, when a read is answered.

A server holds one :class:`ServerCore`, and so does each simulated one. Its runtime feeds it the scheduler's views, what
workers and other servers send, and what becomes of its links, and does as the instructions bid, in their order. The
core composes the leaves: the gate (:class:`~paceline.protocol.server.workers.Workers`), replication
(:class:`~paceline.protocol.replication.Replication`) and iterations
(:class:`~paceline.protocol.iterations.Iterations`). Parameters and gradients never come here: a token stands for each
request.

A request is first timed (:meth:`ServerCore.time`), and kept if it is early. A push or read that need not wait costs a
few look-ups, see :meth:`ServerCore.route` and :meth:`ServerCore.may_read`; all else goes by :meth:`ServerCore.handle`.

Source: OSDI'14 "Scaling Distributed Machine Learning with the Parameter Server", section 4; views as in Viewstamped
Replication Revisited (Liskov and Cowling 2012).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar

from paceline.protocol import clocks, replication
from paceline.protocol.clocks import Gate
from paceline.protocol.consistency import Consistency, Sequential
from paceline.protocol.iterations import Iterations, OnArrival, Sum
from paceline.protocol.replication import AGGREGATE, Replication
from paceline.protocol.server import events
from paceline.protocol.server.events import Clocks, Event, Instruction, Kind, Route, Timing
from paceline.protocol.server.waiting import BlockedReads, EarlyRequests
from paceline.protocol.server.workers import Workers

_WORDS = frozenset((Kind.TICK, Kind.SYNCED, Kind.CALL))


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
        self._consistency = consistency
        self._replicas = replicas
        self._min_replicas = min_replicas
        self.workers = Workers(self.gate_type, consistency, expected_workers)
        self.early = EarlyRequests()
        self.reads = BlockedReads()
        self.is_settled = False
        """Whether it is a member of the cluster, and knows where the workers are."""
        self._has_clocks = False
        self.epoch = -1
        self._view_before: events.ViewChanged | None = None  # one that came before the welcome
        self._reports: dict[int, replication.Report] = {}  # by target: those that wait
        self._withheld: dict[object, float] = {}  # pushes → until when
        self._out: list[Instruction] = []
        self._become(0)

    def _become(self, me: int) -> None:
        self._me = me
        self.replication = self.replication_type(me, self._min_replicas)
        self._begin_updates(0)

    def _begin_updates(self, first_clock: int) -> None:
        self.iterations: Iterations | None = None
        if isinstance(self._consistency, Sequential):
            self.updates: Iterations | OnArrival = self.iterations_type(self.replication, first_clock)
            self.iterations = self.updates
        else:
            self.updates = OnArrival(self.replication, self._consistency.tau is None)

    def joined(self, me: int) -> list[Instruction]:
        """Be the member of incarnation `me`; return what to do."""
        self._become(me)
        before, self._view_before = self._view_before, None
        return [] if before is None else self.handle(before)

    # Requests.

    def time(self, kind: Kind, sender: int, version: int) -> Timing:
        """Say when a request is to be handled that a process sent by the view of `version`."""
        if not self._me:
            return Timing.EARLY
        if kind in _WORDS:
            # Rule 1: nobody takes part whom no view names.
            if self.workers.is_unnamed(sender):
                return Timing.UNNAMED
            # Rule 2: a server that does not know where the workers are waits for another one that does.
            if not self._has_clocks:
                return Timing.BEFORE_CLOCKS
        # Rule 3: of two words of a worker the one that came first is taken first.
        if kind is Kind.CALL and self.early.has_of(sender):
            return Timing.EARLY
        current = self.replication.version
        if version == current or kind in (Kind.CALL, Kind.OTHER):
            return Timing.NOW
        # Rule 4: sender and receiver have the same view, or the one that is behind takes the newer one first.
        if version > current:
            return Timing.EARLY
        if kind is Kind.CHAIN:
            return Timing.NOW
        return Timing.REPEATED if kind is Kind.SYNCED else Timing.STALE

    def disconnected(self, is_of_it: Callable[[object], bool]) -> None:
        """Forget the requests that came on a connection: nobody hears an answer."""
        self.early.drop(is_of_it)
        self.reads.drop_all(is_of_it)
        for token in [token for token in self._withheld if is_of_it(token)]:
            self._give_up(token)

    @property
    def num_waiting(self) -> int:
        """How many reads wait, and pushes that too few replicas have."""
        return len(self.reads) + len(self._withheld)

    def withhold(self, token: object, deadline_s: float) -> None:
        """Wait no longer than this until a push may be acknowledged: see :class:`replication.Withhold`."""
        self._withheld[token] = deadline_s

    def _give_up(self, token: object) -> None:
        del self._withheld[token]
        self.replication.give_up(token)

    def route(self, worker: int, iteration: int) -> Route:
        """Say what becomes of a push."""
        if self.iterations is not None and self.workers.has_begun(worker, iteration):
            return Route.KEEP
        if self.replication.has_successors or self.replication.short:
            return Route.CHAIN
        return Route.ALONE

    def keep(self, worker: int, sequence: int, iteration: int, buckets: int) -> int:
        """Take note of a push that is kept until its iteration is complete; return for which buckets it is new."""
        assert self.iterations is not None
        return self.iterations.admit(worker, sequence, iteration, self.extent(buckets))

    def extent(self, buckets: int) -> int:
        """The buckets that a push with keys in `buckets` counts as one to."""
        # Where there is one copy nobody looks for the buckets of the keys.
        return buckets if self._replicas else self.replication.primary

    def is_readable(self, clock: int) -> bool:
        """Whether values of iteration `clock` may be read now."""
        return self.workers.gate.is_open(clock) and self.updates.may_read(clock)

    def known_clocks(self) -> Clocks:
        """Return where the workers are, for a server that is to begin there."""
        return self.workers.known_clocks()

    # Events.

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event; return what to do, in order.

        Raises:
            ProtocolError: a worker, or another server, says what cannot be; nothing has changed.
        """
        match event:
            case events.Tick(worker, clock):
                self._follow_gate(self.workers.tick(worker, clock))
            case events.Push():
                self._push(event)
            case events.Read():
                self._read(event)
            case events.Join() | events.Synced() | events.Retire():
                self._take_word(event)
            case events.ViewChanged():
                self._take_view(event)
            case events.ReadyReceived(source, version):
                self._sum_up(self.updates.synced(source, version))
            case events.ClocksReceived(known):
                self._take_clocks(known)
            case events.Time(now_s):
                self._out += [events.Late(token) for token in self.reads.take_late(now_s)]
                for token in [token for token, deadline_s in self._withheld.items() if deadline_s <= now_s]:
                    self._give_up(token)
                    self._out.append(events.Late(token))
            case replication.LinkUp(target):
                self._out.append(events.SendClocks(target))
                self._replicate(event)
            case _:
                self._replicate(event)
        self._answer()
        out, self._out = self._out, []
        return out

    def _answer(self) -> None:
        """Answer the reads, and report the fills, that need not wait any more."""
        self._out += [events.Serve(token) for token in self.reads.take_readable(self.updates.may_read)]
        for target, report in list(self._reports.items()):
            if self.updates.may_report(report.buckets):
                self._out.append(self._reports.pop(target))

    def _push(self, event: events.Push) -> None:
        token, buckets = event.token, event.buckets
        if self.workers.is_gone(event.worker):
            self._out.append(events.Expelled(token))
        elif event.buckets & ~self.replication.primary:
            self._out.append(replication.Refuse(token))
        elif (route := self.route(event.worker, event.iteration)) is Route.CHAIN:
            self._replicate(replication.Push(token, event.worker, event.sequence, event.version, buckets))
        elif route is Route.KEEP:
            fresh = self.keep(event.worker, event.sequence, event.iteration, buckets)
            self._out += [events.Keep(token, fresh & buckets), replication.Acknowledge(token)]
        else:
            fresh = self.replication.admit(event.worker, event.sequence)
            self._out += [replication.Apply(token, fresh & buckets), replication.Acknowledge(token)]

    def _read(self, event: events.Read) -> None:
        if self.workers.is_gone(event.worker):
            self._out.append(events.Expelled(event.token))
        elif event.buckets & ~self.replication.primary:
            self._out.append(events.Stale(event.token))
        else:
            self.reads.block(event)
            self._follow_gate(self.workers.gate.handle(clocks.Ask(event.worker, event.clock, event.token)))

    # The gate.

    def _follow_gate(self, instructions: Iterable[clocks.Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case clocks.Complete(iteration, workers):
                    assert self.iterations is not None
                    sums = self.iterations.complete(iteration, workers)
                    self._sum_up(sums)
                    if not sums and not self.iterations.awaited:  # else it is not applied yet
                        self._out.append(events.Completed(iteration))
                case clocks.Release(token):
                    self.reads.pass_gate(token)

    def _take_word(self, event: events.Join | events.Synced | events.Retire) -> None:
        worker = event.worker
        if isinstance(event, events.Retire):
            self._retire(worker)
            return
        is_known = worker in self.workers.gate.clocks
        is_joining = isinstance(event, events.Join) or (event.has_joined and not is_known)
        if self.workers.is_gone(worker) or (is_joining and not self.workers.may_join(worker)):
            self._out.append(events.Expelled(event.token))
            return
        self.workers.check_leap(worker, event.clock, self.updates.first_clock)
        if isinstance(event, events.Join):
            clock = max(event.clock, self.updates.first_clock)
            self._follow_gate(self.workers.join(worker, event.rank, clock))
            self._out.append(events.Joined(event.token, self.workers.gate.clocks[worker]))
            return
        if event.has_joined or is_known:
            self._follow_gate(self.workers.sync(worker, event.rank, event.clock, event.counts))
            if not event.counts:
                self._retire(worker)
        self._sum_up(self.updates.synced(worker, event.version))

    def _retire(self, worker: int) -> None:
        if worker in self.workers.counted:
            self._drop_unfinished(worker)
            self._follow_gate(self.workers.retire(worker))

    def _drop_unfinished(self, worker: int) -> None:
        """Drop what a worker has pushed for iterations that it does not finish."""
        if self.iterations is not None:
            clock = self.workers.gate.clocks[worker]
            self._out.append(events.DropKept(worker, clock))
            self.iterations.forget(worker, clock)

    def _leave(self, worker: int) -> None:
        has_joined = worker in self.workers.ranks
        if has_joined:
            self._drop_unfinished(worker)
        self._out += [events.Expelled(token) for token in self.reads.take_of(worker)]
        self._follow_gate(self.workers.leave(worker))
        self._sum_up(self.updates.left(worker))
        if has_joined:
            self._out.append(events.ForgetWorker(worker))

    def _take_clocks(self, known: Clocks) -> None:
        if self.replication.primary:
            return
        self.workers.check_clocks(known)
        if not self.workers.ranks:
            self.workers.begin(known.num_missing, known.minimum)
            self._begin_updates(known.minimum)
            self._has_clocks = self.is_settled = True
        self._follow_gate(self.workers.take_clocks(known))
        self._receive(Timing.BEFORE_CLOCKS)

    # Views.

    def _take_view(self, view: events.ViewChanged) -> None:
        if not self._me:
            self._view_before = view
            return
        if view.epoch < self.epoch:
            return  # overtaken by a newer one: a newcomer that is not in it has not left
        self.epoch = view.epoch
        for worker in self.workers.excluded_by(view):
            self._leave(worker)
        if view.version > self.replication.version:
            # First of all: a sum that nobody is left to have counts as safe, and what was read may be here no more.
            self._out += [events.Stale(token) for token in self.reads.take_all()]
            self._reports = {}
            self._replicate(replication.Change(view.version, view.groups))
            for target in self.replication.filling:  # it may have been in no chain by a view that this server missed
                self._out.append(events.SendClocks(target))
            if not self.replication.is_in_chain:
                self._forget_workers()
            self._receive(Timing.EARLY)
        self._receive(Timing.UNNAMED)

    def _forget_workers(self) -> None:
        """Forget where the workers are, and what they pushed: they do not come here while this server is in no chain.

        When it is filled again it hears where they are by then.
        """
        self._out += [events.ForgetWorker(worker) for worker in self.workers.ranks]
        self._out.append(events.ForgetKept())
        self.workers.begin(0, 0)
        self._begin_updates(0)
        self._has_clocks = self.is_settled = False
        self.early.take(Timing.BEFORE_CLOCKS)

    def _receive(self, timing: Timing) -> None:
        self._out += [events.Receive(token) for token in self.early.take(timing)]

    # Replication.

    def _replicate(self, event: replication.Event) -> None:
        for instruction in self.replication.handle(event):
            match instruction:
                case replication.Acknowledge(events.SumUp(iteration)):
                    assert self.iterations is not None
                    self.iterations.acknowledged(iteration)
                case replication.Acknowledge(token) | replication.Refuse(token):
                    self._withheld.pop(token, None)
                    self._out.append(instruction)
                case replication.Report():
                    self._reports[instruction.target] = instruction
                case replication.Hold():
                    self._out.append(instruction)
                    self._has_clocks = self.is_settled = True  # nobody was anywhere before
                case replication.Lead(buckets, _, behind):
                    self._out.append(instruction)
                    self._lead(buckets, behind)
                case replication.Retry():
                    raise AssertionError("what is early comes here when its view does")
                case _:
                    self._out.append(instruction)

    def _lead(self, buckets: int, behind: frozenset[int]) -> None:
        version = self.replication.version
        workers = self.workers.counted | self.workers.named
        if version == 1:  # nobody led anything before
            workers, behind = set(), frozenset()
        self._sum_up(self.updates.lead(version, buckets, workers, behind))

    def _sum_up(self, sums: Iterable[Sum]) -> None:
        """Apply what workers pushed in complete iterations, and send it down the chains."""
        for each in sums:
            assert self.iterations is not None
            sequence = each.iteration + 1
            if self.replication.has_successors or each.buckets != self.replication.primary:
                token = events.SumUp(each.iteration, each.workers, each.buckets)
                self._out.append(token)
                version = self.replication.version
                self._replicate(replication.Push(token, AGGREGATE, sequence, version, each.buckets))
            else:
                self.replication.admit(AGGREGATE, sequence)
                self._out.append(events.ApplySum(each.iteration, each.workers, each.buckets))
                self.iterations.acknowledged(each.iteration)
            self._out.append(events.Completed(each.iteration))

    def validate(self) -> None:
        """Assert the invariants."""
        self.replication.validate()
        self.workers.validate()
