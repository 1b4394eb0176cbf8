"""Connect a server's gate, chains and iterations. A tick can complete an iteration.

The iteration's sum then goes down the chain, and reads are answered when the whole chain has the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from paceline.protocol import clocks, replication
from paceline.protocol.consistency import Consistency, Sequential
from paceline.protocol.iterations import Iterations, OnArrival, Sum
from paceline.protocol.replication import AGGREGATE, Replication
from paceline.protocol.scheduler.views import View
from paceline.protocol.server import events
from paceline.protocol.server.events import Clocks, Instruction, Read, Timing
from paceline.protocol.server.workers import Workers

POSTPONED = (Timing.EARLY, Timing.UNNAMED, Timing.BEFORE_CLOCKS)


class EarlyRequests:
    """The postponed requests, in order of arrival."""

    def __init__(self) -> None:
        self._requests: dict[Timing, list[tuple[int, object]]] = {timing: [] for timing in POSTPONED}

    def __iter__(self) -> Iterator[object]:
        for requests in self._requests.values():
            for _, token in requests:
                yield token

    def has_of(self, sender: int) -> bool:
        return any(sender == other for other, _ in self._requests[Timing.EARLY])

    def postpone(self, timing: Timing, sender: int, token: object) -> None:
        self._requests[timing].append((sender, token))

    def take(self, timing: Timing) -> list[object]:
        requests, self._requests[timing] = self._requests[timing], []
        return [token for _, token in requests]

    def drop(self, is_meant: Callable[[object], bool]) -> None:
        for timing, requests in self._requests.items():
            if requests:
                self._requests[timing] = [request for request in requests if not is_meant(request[1])]


class BlockedReads:
    """The reads that wait, first for the gate, then for the end of a takeover and for the sum on the whole chain."""

    def __init__(self) -> None:
        self._reads: dict[object, Read] = {}
        self._past_gate: dict[object, None] = {}

    def __len__(self) -> int:
        return len(self._reads)

    def __iter__(self) -> Iterator[object]:
        return iter(self._reads)

    @property
    def has_passed_gate(self) -> bool:
        return bool(self._past_gate)

    def block(self, read: Read) -> None:
        self._reads[read.token] = read

    def pass_gate(self, token: object) -> None:
        if token in self._reads:
            self._past_gate[token] = None

    def take_readable(self, may_read: Callable[[int], bool]) -> list[object]:
        """Remove and return the reads that no longer wait, in the order in which they passed the gate."""
        found = [token for token in self._past_gate if may_read(self._reads[token].clock)]
        for token in found:
            self._drop(token)
        return found

    def take_late(self, time_s: float) -> list[object]:
        late = [token for token, read in self._reads.items() if read.deadline_s <= time_s]
        for token in late:
            self._drop(token)
        return late

    def take_of(self, worker: int) -> list[object]:
        found = [token for token, read in self._reads.items() if read.worker == worker]
        for token in found:
            self._drop(token)
        return found

    def take_all(self) -> list[object]:
        found = list(self._reads)
        self._reads, self._past_gate = {}, {}
        return found

    def drop_all(self, is_meant: Callable[[object], bool]) -> None:
        for token in [token for token in self._reads if is_meant(token)]:
            self._drop(token)

    def _drop(self, token: object) -> None:
        self._reads.pop(token, None)
        self._past_gate.pop(token, None)


class Progress:
    """Connects one server's gate with its replication and its iterations.

    The gate holds requests of workers that are too far ahead. All instructions are appended to `out`.
    """

    def __init__(self, consistency: Consistency, expected_workers: int, out: list[Instruction]) -> None:
        self._consistency = consistency
        self._out = out
        self.workers = Workers(consistency, expected_workers)
        self.reads = BlockedReads()
        self.has_clocks = False
        self._reports: dict[int, replication.Filled] = {}  # target → report of its fill that waits for iterations
        self._withheld: dict[object, float] = {}  # token of a withheld push → deadline
        self.become(Replication(0))

    def become(self, chains: Replication) -> None:
        self.replication = chains
        self.iterations: Iterations | None = None
        self._begin_updates(0)

    def _begin_updates(self, first_clock: int) -> None:
        if isinstance(self._consistency, Sequential):
            former, self.iterations = self.iterations, Iterations(self.replication, first_clock)
            if former is not None:
                self.iterations.follow(former)
            self.updates: Iterations | OnArrival = self.iterations
        else:
            self.updates = OnArrival(self.replication, self._consistency.tau is None)

    def answer(self) -> None:
        """Answer the reads, and report the fills, that no longer have to wait."""
        if self.reads.has_passed_gate:
            self._out += [events.Serve(token) for token in self.reads.take_readable(self.updates.may_read)]
        if self._reports:
            for target, report in list(self._reports.items()):
                if self.updates.may_report(report.buckets):
                    self._out.append(self._reports.pop(target))

    def follow_gate(self, instructions: Iterable[clocks.Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case clocks.Complete(iteration, workers):
                    assert self.iterations is not None
                    sums = self.iterations.complete(iteration, workers)
                    self.sum_up(sums)
                    # else the iteration is completed when its sum is applied
                    if not sums and not self.iterations.pending_workers:
                        self._out.append(events.Completed(iteration))
                case clocks.Unblock(token):
                    self.reads.pass_gate(token)

    def retire(self, worker: int) -> None:
        if worker in self.workers.counted:
            self._drop_unfinished(worker)
            self.follow_gate(self.workers.retire(worker))

    def leave(self, worker: int) -> None:
        """Remove a worker that left or died, and reject its requests."""
        has_joined = worker in self.workers.ranks
        if has_joined:
            self._drop_unfinished(worker)
        self._out += [events.RejectExpelled(token) for token in self.reads.take_of(worker)]
        self.follow_gate(self.workers.leave(worker))
        self.sum_up(self.updates.left(worker))
        if has_joined:
            self._out.append(events.ForgetWorker(worker))

    def _drop_unfinished(self, worker: int) -> None:
        if self.iterations is not None:
            clock = self.workers.gate.clocks[worker]
            self._out.append(events.DropBuffered(worker, clock))
            self.iterations.forget(worker, clock)

    def take_clocks(self, known: Clocks) -> None:
        """Adopt another server's clocks unless this server is a primary. Raises ProtocolError for impossible clocks."""
        if self.replication.primary:
            return
        self.workers.check_clocks(known)
        if not self.workers.ranks:
            self.workers.begin(known.num_missing, known.minimum)
            self._begin_updates(known.minimum)
            self.has_clocks = True
        self.follow_gate(self.workers.take_clocks(known))

    def forget_workers(self) -> None:
        """Drop the workers' clocks and pushes, because a server that is in no chain no longer receives ticks.

        When another server fills this server later, it also sends the current clocks.
        """
        self._out += [events.ForgetWorker(worker) for worker in self.workers.ranks]
        self._out.append(events.DropAllBuffered())
        self.workers.begin(0, 0)
        self._begin_updates(0)
        self.has_clocks = False

    def change(self, view: View) -> None:
        # Reject all reads first. After the change a sum may count as durable only because its chain has no successor
        # left, so a read could be answered although its buckets have moved.
        self._out += [events.Stale(token) for token in self.reads.take_all()]
        self._reports = {}
        self.replicate(self.replication.handle(replication.Change(view.version, view.groups)))
        # the target may have dropped the clocks in a view that this server missed
        for target in self.replication.filling:
            self._out.append(events.SendClocks(target))

    def replicate(self, instructions: Iterable[replication.Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case replication.Forward() | replication.Apply():  # the most frequent cases first
                    self._out.append(instruction)
                case replication.Acknowledge(events.SumUp(iteration)):
                    assert self.iterations is not None
                    self.iterations.acknowledged(iteration)
                case replication.Acknowledge(token) | replication.RefusePush(token):
                    self._withheld.pop(token, None)
                    self._out.append(instruction)
                case replication.Filled():
                    self._reports[instruction.target] = instruction
                case replication.CreateBuckets():
                    self._out.append(instruction)
                    self.has_clocks = True  # no worker has started yet
                case replication.Lead(buckets, _, followers):
                    self._out.append(instruction)
                    self._lead(buckets, followers)
                case _:
                    self._out.append(instruction)

    def _lead(self, buckets: int, followers: frozenset[int]) -> None:
        version = self.replication.version
        workers = self.workers.counted | self.workers.named
        if version == 1:  # in the first view there is no former primary to take over from
            workers, followers = set(), frozenset()
        self.sum_up(self.updates.lead(version, buckets, workers, followers))

    def sum_up(self, sums: Iterable[Sum]) -> None:
        for item in sums:
            assert self.iterations is not None
            iteration, buckets = item.iteration, item.buckets
            if self.replication.has_successors or buckets != self.replication.primary:
                token = events.SumUp(iteration, item.workers, buckets)
                self._out.append(token)
                self.replicate(self.replication.push(token, AGGREGATE, iteration + 1, buckets))
            else:
                self.replication.delivery.admit(AGGREGATE, iteration + 1, buckets)
                self._out.append(events.ApplySum(iteration, item.workers, buckets))
                self.iterations.acknowledged(iteration)
            self._out.append(events.Completed(iteration))

    @property
    def num_waiting(self) -> int:
        return len(self.reads) + len(self._withheld)

    def withhold(self, token: object, deadline_s: float) -> None:
        self._withheld[token] = deadline_s

    def expire(self, time_s: float) -> None:
        late = self.reads.take_late(time_s)
        late += self._give_up(lambda token: self._withheld[token] <= time_s)
        self._out += [events.DeadlinePassed(token) for token in late]

    def drop(self, is_meant: Callable[[object], bool]) -> None:
        self.reads.drop_all(is_meant)
        self._give_up(is_meant)

    def _give_up(self, is_meant: Callable[[object], bool]) -> list[object]:
        found = [token for token in self._withheld if is_meant(token)]
        for token in found:
            del self._withheld[token]
            self.replication.pushes.give_up(token)
        return found

    def validate(self) -> None:
        self.replication.validate()
        self.workers.validate()
