"""Events that stand for the calls of a gate, for tests."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from paceline.protocol.clocks import Gate, Instruction


class Join(NamedTuple):
    """A worker joins, or raises its clock."""

    worker: int
    clock: int = 0


class Depart(NamedTuple):
    """A worker left or died."""

    worker: int


class Finish(NamedTuple):
    """A worker has no more work."""

    worker: int


class Resume(NamedTuple):
    """A finished worker has work again."""

    worker: int


class Tick(NamedTuple):
    """A worker has finished `clock` iterations."""

    worker: int
    clock: int


class BeginIteration(NamedTuple):
    """A worker requests to begin iteration `clock`."""

    worker: int
    clock: int
    ticket: object


class Joined(NamedTuple):
    """A worker takes part, and begins this iteration next."""

    worker: int
    clock: int


Event: TypeAlias = Join | Depart | Finish | Resume | Tick | BeginIteration

_finished: WeakKeyDictionary[Gate, set[int]] = WeakKeyDictionary()


def handle(gate: Gate, event: Event) -> list[Instruction | Joined]:
    """Call the gate, and return its instructions; first a Joined for a worker that joins or resumes."""
    finished = _finished.setdefault(gate, set())
    out: list[Instruction | Joined] = []
    match event:
        case Join():
            out += gate.join(*event)
            out.insert(0, Joined(event.worker, gate.clocks[event.worker]))
        case Depart(worker):
            finished.discard(worker)
            out += gate.depart(worker)
        case Finish(worker):
            if worker in gate.clocks:
                finished.add(worker)
            out += gate.finish(worker)
        case Resume(worker):
            out += gate.resume(worker)
            if worker in finished:
                finished.remove(worker)
                out.insert(0, Joined(worker, gate.clocks[worker]))
        case Tick():
            out += gate.tick(*event)
        case BeginIteration():
            out += gate.begin(*event)
    return out
