"""How far a server is: its gate, its chains and its iterations, and how these act together.

What one of them says is fed to the others at once: a tick completes an iteration, its sum goes down the chain, and when
the chain has it a read is answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from paceline.protocol import clocks, replication
from paceline.protocol.consistency import Consistency, Sequential
from paceline.protocol.iterations import Iterations, OnArrival, Sum
from paceline.protocol.replication import AGGREGATE, Replication
from paceline.protocol.server import events
from paceline.protocol.server.events import Clocks, Instruction
from paceline.protocol.server.waiting import BlockedReads
from paceline.protocol.server.workers import Workers


class Progress:
    """The machines of one server; what they say is added to `out`, in order."""

    def __init__(
        self,
        consistency: Consistency,
        expected_workers: int,
        out: list[Instruction],
    ) -> None:
        self._consistency = consistency
        self._out = out
        self.workers = Workers(consistency, expected_workers)
        self.reads = BlockedReads()
        self.has_clocks = False
        """Whether it is known where the workers are."""
        self._reports: dict[int, replication.ReportFilled] = {}  # by target: those that wait
        self._withheld: dict[object, float] = {}  # pushes → until when
        self.become(Replication(0))

    def become(self, chains: Replication) -> None:
        """Begin with these chains."""
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
        """Answer the reads, and report the fills, that need not wait any more."""
        if self.reads.has_passed_gate:
            self._out += [events.Serve(token) for token in self.reads.take_readable(self.updates.may_read)]
        if self._reports:
            for target, report in list(self._reports.items()):
                if self.updates.may_report(report.buckets):
                    self._out.append(self._reports.pop(target))

    # Workers.

    def follow_gate(self, instructions: Iterable[clocks.Instruction]) -> None:
        """Do as the gate says."""
        for instruction in instructions:
            match instruction:
                case clocks.Complete(iteration, workers):
                    assert self.iterations is not None
                    sums = self.iterations.complete(iteration, workers)
                    self.sum_up(sums)
                    if not sums and not self.iterations.awaited:  # else it is not applied yet
                        self._out.append(events.Completed(iteration))
                case clocks.Unblock(token):
                    self.reads.pass_gate(token)

    def retire(self, worker: int) -> None:
        """Wait for a worker no more until it joins again."""
        if worker in self.workers.counted:
            self._drop_unfinished(worker)
            self.follow_gate(self.workers.retire(worker))

    def leave(self, worker: int) -> None:
        """Wait for a worker never again, and answer nothing that it has asked."""
        has_joined = worker in self.workers.ranks
        if has_joined:
            self._drop_unfinished(worker)
        self._out += [events.TellExpelled(token) for token in self.reads.take_of(worker)]
        self.follow_gate(self.workers.leave(worker))
        self.sum_up(self.updates.left(worker))
        if has_joined:
            self._out.append(events.ForgetWorker(worker))

    def _drop_unfinished(self, worker: int) -> None:
        """Drop what a worker has pushed for iterations that it does not finish."""
        if self.iterations is not None:
            clock = self.workers.gate.clocks[worker]
            self._out.append(events.DropKept(worker, clock))
            self.iterations.forget(worker, clock)

    def take_clocks(self, known: Clocks) -> None:
        """Begin where another server is, unless this one leads anything. Raises ProtocolError if that cannot be."""
        if self.replication.primary:
            return
        self.workers.check_clocks(known)
        if not self.workers.ranks:
            self.workers.begin(known.num_missing, known.minimum)
            self._begin_updates(known.minimum)
            self.has_clocks = True
        self.follow_gate(self.workers.take_clocks(known))

    def forget_workers(self) -> None:
        """Forget where the workers are, and what they pushed: they do not come here while this server is in no chain.

        When it is filled again it hears where they are by then.
        """
        self._out += [events.ForgetWorker(worker) for worker in self.workers.ranks]
        self._out.append(events.ForgetKept())
        self.workers.begin(0, 0)
        self._begin_updates(0)
        self.has_clocks = False

    # Chains.

    def change(self, view: events.ViewChanged) -> None:
        """Take the chains of a newer view."""
        # First of all: a sum that nobody is left to have counts as safe, and what was read may be here no more.
        self._out += [events.Stale(token) for token in self.reads.take_all()]
        self._reports = {}
        self.replicate(self.replication.handle(replication.Change(view.version, view.groups)))
        for target in self.replication.filling:  # it may have been in no chain by a view that this server missed
            self._out.append(events.SendClocks(target))

    def replicate(self, instructions: Iterable[replication.Instruction]) -> None:
        """Do as the chains say."""
        for instruction in instructions:
            match instruction:
                case replication.Forward() | replication.Apply():  # first, since every push has them
                    self._out.append(instruction)
                case replication.Acknowledge(events.SumUp(iteration)):
                    assert self.iterations is not None
                    self.iterations.acknowledged(iteration)
                case replication.Acknowledge(token) | replication.RefusePush(token):
                    self._withheld.pop(token, None)
                    self._out.append(instruction)
                case replication.ReportFilled():
                    self._reports[instruction.target] = instruction
                case replication.Hold():
                    self._out.append(instruction)
                    self.has_clocks = True  # nobody was anywhere before
                case replication.Lead(buckets, _, behind):
                    self._out.append(instruction)
                    self._lead(buckets, behind)
                case _:
                    self._out.append(instruction)

    def _lead(self, buckets: int, behind: frozenset[int]) -> None:
        version = self.replication.version
        workers = self.workers.counted | self.workers.named
        if version == 1:  # nobody led anything before
            workers, behind = set(), frozenset()
        self.sum_up(self.updates.lead(version, buckets, workers, behind))

    def sum_up(self, sums: Iterable[Sum]) -> None:
        """Apply what workers pushed in complete iterations, and send it down the chains."""
        for each in sums:
            assert self.iterations is not None
            sequence = each.iteration + 1
            if self.replication.has_successors or each.buckets != self.replication.primary:
                token = events.SumUp(each.iteration, each.workers, each.buckets)
                self._out.append(token)
                self.replicate(self.replication.push(token, AGGREGATE, sequence, each.buckets))
            else:
                self.replication.delivery.admit(AGGREGATE, sequence, each.buckets)
                self._out.append(events.ApplySum(each.iteration, each.workers, each.buckets))
                self.iterations.acknowledged(each.iteration)
            self._out.append(events.Completed(each.iteration))

    # What waits.

    @property
    def num_waiting(self) -> int:
        """How many reads wait, and pushes that too few replicas have."""
        return len(self.reads) + len(self._withheld)

    def withhold(self, token: object, deadline_s: float) -> None:
        """Wait no longer than this until a push may be acknowledged."""
        self._withheld[token] = deadline_s

    def expire(self, now_s: float) -> None:
        """Refuse what has waited until its deadline."""
        late = self.reads.take_late(now_s)
        late += self._give_up(lambda token: self._withheld[token] <= now_s)
        self._out += [events.Late(token) for token in late]

    def drop(self, is_meant: Callable[[object], bool]) -> None:
        """Answer some requests no more."""
        self.reads.drop_all(is_meant)
        self._give_up(is_meant)

    def _give_up(self, is_meant: Callable[[object], bool]) -> list[object]:
        found = [token for token in self._withheld if is_meant(token)]
        for token in found:
            del self._withheld[token]
            self.replication.pushes.give_up(token)
        return found

    def validate(self) -> None:
        """Assert the invariants."""
        self.replication.validate()
        self.workers.validate()
