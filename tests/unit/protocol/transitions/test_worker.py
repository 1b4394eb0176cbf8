"""Check that the gate makes exactly the transitions of the state table of workers."""

from __future__ import annotations

from random import Random

from tests.unit.protocol.gate_events import Depart, Event, Finish, Join, Joined, Resume, Tick, handle

from paceline.protocol import BoundedDelay, Consistency, Sequential
from paceline.protocol.clocks import WORKER, Gate
from paceline.protocol.transitions import OUTSIDE

from .watching import Sight, Watch

WORKERS = range(4)
CONSISTENCIES: list[Consistency] = [Sequential(), BoundedDelay(tau=1)]


def sight(gate: Gate, worker: int) -> Sight:
    if worker not in gate.clocks:
        return (OUTSIDE,)
    clock = gate.clocks[worker]
    return "counting" if worker in gate.lagging(1000) else "finished", clock


def test_the_gate_follows_the_table() -> None:
    watch, random = Watch(WORKER), Random(1)
    for _ in range(100):
        gate = Gate(random.choice(CONSISTENCIES), random.randrange(3))
        for _ in range(60):
            worker = random.choice(WORKERS)
            clock = gate.clocks.get(worker, 0) + random.choice([-1, 0, 1, 1, 1, 3])
            departures: list[Event] = [Finish(worker), Resume(worker), Depart(worker)]
            event = random.choice([Join(worker, max(clock, 0)), Tick(worker, clock), Tick(worker, clock), *departures])
            before = [sight(gate, worker) for worker in WORKERS]
            joined = next((action for action in handle(gate, event) if isinstance(action, Joined)), None)
            after = [sight(gate, worker) for worker in WORKERS]
            watch.saw(before[worker], type(event).__name__.lower(), after[worker])
            assert joined is None or joined.worker == worker
            assert [worker for worker in WORKERS if before[worker] != after[worker]] in ([], [worker])
    watch.ends()
