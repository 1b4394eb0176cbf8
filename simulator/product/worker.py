"""A worker of the simulation: the product's client reads and pushes, and the values that it reads are checked."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from paceline.errors import AddressError, ConnectionLostError, DeadlineError, PacelineError
from paceline.ps import Client, Server
from paceline.tables.rules import SGD
from simulator.oracle import Violation
from simulator.product.changes import draw_request, push
from simulator.product.state import Participant, SharedState
from simulator.product.transport import ADDRESS, VirtualTransport
from simulator.product.truth import CHANGED, CLOCKS, RATES, Floats, Issued, Keys, Mirror, Plan
from simulator.world import VirtualProcess

_PATIENCE_S: Final = 60.0
_AT_ONCE_S: Final = 0.1
"""Workers change hyperparameters only at multiples of this time, and therefore at the same moment."""


class ProductWorker(Participant):
    """One worker and its state."""

    def __init__(self, state: SharedState, process: VirtualProcess, slot: int) -> None:
        super().__init__(process, slot)
        self.state = state
        self._random = state.world.random
        self._mirrors: dict[str, Mirror] = {}
        self._tables: dict[str, Any] = {}
        self._waiting: list[tuple[Any, Issued]] = []
        self._acknowledged: list[Issued] = []

    def run(self) -> None:
        """Do the work of all phases."""
        state = self.state
        client: Client | None = None
        try:
            client = self._connect()
            self.first_clock, self.is_joined = client.clock, True
            state.world.note(f"{self.process.name} is worker {client.rank} from iteration {client.clock}")
            for plan in state.plans:
                self._tables[plan.name] = table = plan.declare(client)
                state.truth.specs.setdefault(plan.name, table.spec)
                self._mirrors[plan.name] = Mirror(plan, table.spec)
            for phase in range(state.settings.num_phases):
                while client.clock < (phase + 1) * state.settings.iterations:
                    self._iterate(client)
                self._read_all(client)
                self._set_rate()
                self.num_arrived = phase + 1
                state.world.note(f"{self.process.name} has ended phase {phase}")
                while state.num_phases <= phase:
                    state.world.sleep(0.02)
            client.close()
        except PacelineError as error:
            state.world.note(f"{self.process.name} fails: {type(error).__name__}: {error}")
            if not self.process.is_disturbed:
                raise Violation(f"(progress) {self.process.name}: {type(error).__name__}: {error}") from error

    def _connect(self) -> Client:
        """Connect, and retry like a supervisor of workers if the cluster does not run."""
        state, world = self.state, self.state.world
        end_s = world.time_s + _PATIENCE_S
        while True:
            try:
                return Client.connect(VirtualTransport(state.network), ADDRESS, timeout_s=_PATIENCE_S)
            except (AddressError, ConnectionLostError, DeadlineError) as error:
                world.note(f"{self.process.name} tries again: {error}")
                if world.time_s >= end_s:
                    raise
                world.sleep(0.1)

    def _iterate(self, client: Client) -> None:
        random, state = self._random, self.state
        state.world.sleep(random.random() * state.settings.think_s)
        if random.random() < 0.7:
            self._check_clocks(client)
        if random.random() < 0.4 and not state.may_refuse:
            self._change(client)
        pushes: list[tuple[Plan, Keys, Floats]] = []
        for plan in state.plans:
            if plan is not CLOCKS and self.slot < plan.num_pushing and random.random() < 0.7:
                for _ in range(1 if state.settings.is_sequential else random.choice((1, 1, 2))):
                    pushes.append((plan, *self._draw(plan)))
        own_keys = np.array([self.slot], np.uint64)
        pushes.append((CLOCKS, own_keys, np.array([[-1.0]], np.float32)))
        if not state.settings.is_sequential:
            random.shuffle(pushes)
        applied = []
        for plan, keys, grads in pushes:
            if not plan.is_shared and random.random() < 0.2:
                self._check_own(plan)
            applied.append(self._push(plan, keys, grads))
            if not state.settings.is_sequential:
                self._note(applied[-1])
        if random.random() < 0.6 or state.may_refuse:
            self._wait_tickets()
        client.tick()
        self.num_counted += 1
        if state.settings.is_sequential:
            for issued in applied:
                self._note(issued)

    def _note(self, issued: Issued) -> None:
        mirror = self._mirrors.get(issued.plan.name)
        if mirror is not None:
            mirror.apply(issued)

    def _set_rate(self) -> None:
        """Change the hyperparameters of a table, at the same time as other workers."""
        self.state.world.sleep(-self.state.world.time_s % _AT_ONCE_S)
        unfinished = self.state.truth.unfinished
        unfinished[RATES.name] += 1
        self._break_connections()
        self._tables[RATES.name].set_update(SGD(lr=self._random.random()))
        unfinished[RATES.name] -= 1

    def _change(self, client: Client) -> None:
        """Change a table by a request other than a push, and check the number of erased rows."""
        state, random, truth = self.state, self._random, self.state.truth
        plans = [plan for plan in state.plans if self.slot < plan.num_pushing and not plan.is_shared]
        if not plans:
            return
        plan = CHANGED if CHANGED in plans and random.random() < 0.7 else random.choice(plans)
        if state.settings.is_sequential:
            self._check_own(plan)  # waits until the pushes of earlier iterations are applied
        pending = [issued.keys for _, issued in self._waiting if issued.plan is plan]
        request = draw_request(state, client, self._tables[plan.name], self._mirrors[plan.name], self.slot, pending)
        if request is None:
            return
        if not request.may_overtake:
            self._wait_tickets()
        issued = truth.issue(plan, self.slot, request.keys, request.rows, request.change)
        truth.unfinished[plan.name] += 1
        self._break_connections()
        version = client.servers.core.version
        num_erased = request.send()
        truth.unfinished[plan.name] -= 1
        issued.is_sure = True
        expected = self._mirrors[plan.name].apply(issued)
        # If a view change repeats an erasure on another server, the answer lacks the rows that were erased before.
        if num_erased != expected and client.servers.core.version == version:
            raise Violation(
                f"(exactly once) worker in slot {self.slot} has erased {num_erased} rows of {plan.name!r}, expected "
                f"{expected}"
            )

    def _break_connections(self) -> None:
        """Often let the connections to servers break at the next request (which may still arrive) or at the answer."""
        network, random = self.state.network, self._random
        ends = [
            end for end in network.ends if end.process is self.process and isinstance(end.other.process.role, Server)
        ]
        broken = random.choice(("none", "request", "answer"))
        if broken == "request":
            network.late.update(ends)
        elif broken == "answer":
            network.breaking.update(end.other for end in ends)

    def _draw(self, plan: Plan) -> tuple[Keys, Floats]:
        numbers = np.random.default_rng(self._random.getrandbits(32))
        keys = plan.keys_of(self.slot)
        if numbers.random() < 0.5:
            first = int(numbers.integers(len(keys)))
            keys = keys[first : first + int(numbers.integers(1, len(keys) + 1))]
        else:
            keys = keys[np.sort(numbers.permutation(len(keys))[: int(numbers.integers(1, len(keys) + 1))])]
        if plan.is_signs:
            return keys, np.where(numbers.random((len(keys), plan.dim)) < 0.5, -1, 1).astype(np.float32)
        if plan.is_shared:
            return keys, numbers.integers(-8, 9, (len(keys), plan.dim)).astype(np.float32)
        return keys, numbers.standard_normal((len(keys), plan.dim)).astype(np.float32)

    def _push(self, plan: Plan, keys: Keys, grads: Floats) -> Issued:
        issued = self.state.truth.issue(plan, self.slot, keys, grads, push)
        ticket = plan.push(self._tables[plan.name], keys, grads)
        self.state.truth.num_pushes += 1
        self._waiting.append((ticket, issued))
        if self._random.random() < 0.3:
            self._wait_tickets()
        return issued

    def _wait_tickets(self) -> None:
        waiting, self._waiting = self._waiting, []
        for ticket, issued in waiting:
            try:
                ticket.wait()
            except PacelineError as error:
                if not (self.state.may_refuse and "no memory" in str(error)):
                    raise
                self._mirrors.pop(issued.plan.name, None)  # the table's values are unknown now
            else:
                issued.is_sure = not self.state.settings.is_sequential
                self._acknowledged.append(issued)

    def _check_own(self, plan: Plan) -> None:
        """Check that the worker's own keys have the values from its pushes (if sequential: of earlier iterations)."""
        mirror = self._mirrors.get(plan.name)
        if mirror is None or plan.is_shared:
            return
        keys = plan.keys_of(self.slot)
        found = plan.pull(self._tables[plan.name], keys)
        self.state.truth.num_reads += 1
        if self._waiting and self.state.may_refuse:
            return  # a push may have been rejected
        expected = mirror.values(keys)
        if found.tobytes() != expected.tobytes():
            at = int(np.flatnonzero((found != expected).any(axis=1))[0])
            raise Violation(
                f"(reads) worker in slot {self.slot} reads {found[at].tolist()} for key {keys[at]} of {plan.name!r}, "
                f"but its pushes give {expected[at].tolist()}"
            )

    def _check_clocks(self, client: Client) -> None:
        """Check the workers' clocks in the table. Consistency guarantees a minimum, and sequential also a maximum."""
        state, clock, tau = self.state, client.clock, self.state.settings.consistency.tau
        live = [worker for worker in state.workers.values() if worker.is_joined and not worker.process.is_disturbed]
        values = CLOCKS.pull(self._tables["clocks"], CLOCKS.keys_of(0))[:, 0].tolist()
        state.truth.num_reads += 1
        for worker in live:
            if worker.process.is_disturbed or worker.process.is_dead:
                continue
            counted = worker.first_clock + int(values[worker.slot])
            if tau is not None and counted < min(clock - tau, worker.first_clock + worker.num_counted):
                raise Violation(
                    f"(gate) worker in slot {self.slot} reads in iteration {clock} that worker in slot {worker.slot} "
                    f"has finished {counted}, with a delay of {tau}"
                )
            if state.settings.is_sequential and counted > max(clock, worker.first_clock):
                raise Violation(
                    f"(gate) worker in slot {self.slot} reads in iteration {clock} the push of the worker in slot "
                    f"{worker.slot} in iteration {counted - 1}"
                )

    def _read_all(self, client: Client) -> None:
        self._wait_tickets()
        client.flush()
        for plan in self.state.plans:
            if plan is not CLOCKS:
                self._check_own(plan)
        self._check_clocks(client)
        for issued in self._acknowledged:  # their iteration is complete, because the reads have waited for it
            issued.is_sure = True
