"""The gate equals a simple model: no request passes early, and no allowed request is blocked."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.random_examples import num_examples
from tests.unit.protocol.gate_events import BeginIteration, Depart, Event, Finish, Join, Joined, Resume, Tick, handle

from paceline.protocol import BoundedDelay, Consistency, Eventual, Sequential
from paceline.protocol.clocks import Complete, Gate, Unblock

workers = st.integers(0, 4)
consistencies: st.SearchStrategy[Consistency] = st.one_of(
    st.just(Sequential()), st.builds(BoundedDelay, tau=st.integers(0, 3)), st.just(Eventual())
)


class GateMachine(RuleBasedStateMachine):
    """A gate and its model: a dictionary of clocks, the ticks so far, and the blocked requests."""

    @initialize(consistency=consistencies, expected=st.integers(0, 3))
    def start(self, consistency: Consistency, expected: int) -> None:
        self.gate = Gate(consistency, expected)
        self.expected = expected
        self.clocks: dict[int, int] = {}
        self.finished: set[int] = set()
        self.ever_joined: set[int] = set()
        self.highest = 0
        self.ticked: set[tuple[int, int]] = set()
        self.held: dict[int, tuple[int, int]] = {}
        self.next_ticket = 0
        self.num_completed = 0

    def minimum(self) -> int:
        if len(self.ever_joined) < self.expected:
            return 0
        counted = [c for w, c in self.clocks.items() if w not in self.finished]
        return min(counted, default=self.highest)

    def may_begin(self, clock: int) -> bool:
        tau = self.gate.consistency.tau
        if tau is None:
            return True
        if len(self.ever_joined) < self.expected:
            return clock - tau <= 0
        live = [c for w, c in self.clocks.items() if w not in self.finished]
        return all(c >= clock - tau for c in live) if live else self.highest >= clock - tau

    def apply(self, event: Event) -> list[Joined]:
        """Apply an event to the gate after the model has changed; compare its instructions with the model."""
        joined: list[Joined] = []
        released = False
        for instruction in handle(self.gate, event):
            if isinstance(instruction, Unblock):
                released = True
                assert isinstance(instruction.ticket, int)
                _, clock = self.held.pop(instruction.ticket)
                assert self.may_begin(clock), "unblocked too early"
            elif isinstance(instruction, Complete):
                assert not released, "a request was unblocked before its iteration was complete"
                assert isinstance(self.gate.consistency, Sequential)
                assert instruction.iteration == self.num_completed
                named = tuple(sorted(w for w, i in self.ticked if i == instruction.iteration))
                assert instruction.workers == named
                self.num_completed += 1
            else:
                joined.append(instruction)
        return joined

    @rule(worker=workers, ahead=st.sampled_from([0, 0, 0, 2]))
    def join(self, worker: int, ahead: int) -> None:
        minimum = self.minimum()
        start = max(self.clocks.get(worker, minimum), minimum + ahead if ahead else 0)
        self.clocks[worker] = start
        self.highest = max(self.highest, start)
        self.ever_joined.add(worker)
        assert self.apply(Join(worker, minimum + ahead if ahead else 0)) == [Joined(worker, start)]

    @rule(worker=workers)
    def leave(self, worker: int) -> None:
        self.clocks.pop(worker, None)
        self.finished.discard(worker)
        self.held = {t: (w, c) for t, (w, c) in self.held.items() if w != worker}
        assert self.apply(Depart(worker)) == []

    @rule(worker=workers)
    def finish(self, worker: int) -> None:
        if worker in self.clocks:
            self.finished.add(worker)
        assert self.apply(Finish(worker)) == []

    @rule(worker=workers)
    def resume(self, worker: int) -> None:
        expected = []
        if worker in self.finished:
            start = max(self.minimum(), self.clocks[worker])
            self.finished.remove(worker)
            self.clocks[worker] = start
            expected = [Joined(worker, start)]
        assert self.apply(Resume(worker)) == expected

    @rule(worker=workers, by=st.sampled_from([1, 1, 1, 1, 1, 1, 0, -1, 3]))
    def tick(self, worker: int, by: int) -> None:
        before = self.clocks.get(worker)
        clock = (before or 0) + by
        if before is not None and clock > before:
            for iteration in range(before, clock):
                if iteration >= self.num_completed:
                    self.ticked.add((worker, iteration))
            self.clocks[worker] = clock
            self.highest = max(self.highest, clock)
        assert self.apply(Tick(worker, clock)) == []

    @rule(worker=workers, ahead=st.integers(0, 5))
    def send_request(self, worker: int, ahead: int) -> None:
        clock = self.clocks.get(worker, 0) + ahead
        self.held[self.next_ticket] = worker, clock
        self.next_ticket += 1
        assert self.apply(BeginIteration(worker, clock, self.next_ticket - 1)) == []

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.gate.validate()
        assert self.gate.minimum == self.minimum()
        assert dict(self.gate.clocks) == self.clocks
        assert not any(self.may_begin(clock) for _, clock in self.held.values()), "blocked although allowed"
        for clock in range(self.highest + 4):
            assert self.gate.is_open(clock) == self.may_begin(clock)
            tau = self.gate.consistency.tau
            late = (
                ()
                if tau is None
                else sorted(w for w, c in self.clocks.items() if c < clock - tau and w not in self.finished)
            )
            assert self.gate.lagging(clock) == tuple(late)
        if isinstance(self.gate.consistency, Sequential):
            assert self.num_completed == self.minimum()


TestGateMachine = GateMachine.TestCase
TestGateMachine.settings = num_examples(250, stateful_step_count=50)
