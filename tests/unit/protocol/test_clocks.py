"""Examples of the gate: one test for each rule of ``docs/explanation/protocol.md``."""

from __future__ import annotations

import pytest
from tests.unit.protocol.gate_events import BeginIteration, Depart, Event, Finish, Join, Joined, Resume, Tick, handle

from paceline.errors import UsageError
from paceline.protocol import BoundedDelay, Consistency, Eventual, Sequential
from paceline.protocol.clocks import Complete, Gate, Instruction, Unblock, VectorClock


def feed(gate: Gate, *events: Event) -> list[Instruction | Joined]:
    """Handle events; return the instructions for the last event."""
    instructions: list[Instruction | Joined] = []
    for event in events:
        instructions = handle(gate, event)
        gate.validate()
    return instructions


def gate_of(consistency: Consistency, num_workers: int) -> Gate:
    gate = Gate(consistency, num_workers)
    feed(gate, *(Join(worker) for worker in range(num_workers)))
    return gate


def test_sequential_completes_an_iteration_and_then_unblocks_requests() -> None:
    gate = gate_of(Sequential(), 2)
    assert feed(gate, Tick(0, 1)) == []
    assert feed(gate, BeginIteration(0, 1, "a")) == []
    assert gate.lagging(1) == (1,)
    assert feed(gate, Tick(1, 1)) == [Complete(0, (0, 1)), Unblock("a")]
    assert feed(gate, BeginIteration(1, 1, "b")) == [Unblock("b")]


def test_bounded_delay_allows_tau_iterations() -> None:
    gate = gate_of(BoundedDelay(tau=2), 2)
    feed(gate, *(Tick(0, clock) for clock in (1, 2, 3)))
    assert gate.is_open(2)
    assert not gate.is_open(3)
    feed(gate, BeginIteration(0, 3, "far"))
    assert feed(gate, Tick(1, 1)) == [Unblock("far")]


def test_eventual_never_blocks() -> None:
    gate = Gate(Eventual(), 3)
    assert feed(gate, Join(0), BeginIteration(0, 10**9, "t")) == [Unblock("t")]
    assert gate.lagging(10**9) == ()


def test_no_worker_advances_before_the_expected_workers_join() -> None:
    gate = Gate(Sequential(), 2)
    assert feed(gate, Join(0), Tick(0, 1), BeginIteration(0, 1, "a")) == []
    assert gate.num_missing == 1
    assert gate.lagging(1) == ()
    assert feed(gate, Join(1)) == [Joined(1, 0)]
    assert feed(gate, Tick(1, 1)) == [Complete(0, (0, 1)), Unblock("a")]


def test_bounded_delay_allows_the_first_iterations_immediately() -> None:
    gate = Gate(BoundedDelay(tau=2), 2)
    feed(gate, Join(0), Tick(0, 1), Tick(0, 2), Tick(0, 3))
    assert gate.is_open(2)
    assert not gate.is_open(3)


def test_a_worker_that_joins_repeatedly_is_counted_once() -> None:
    gate = Gate(Sequential(), 2)
    feed(gate, Join(0), Depart(0), Join(0), Tick(0, 1))
    assert gate.num_missing == 1
    assert not gate.is_open(1)


def test_a_leaving_worker_is_not_awaited() -> None:
    gate = gate_of(Sequential(), 3)
    feed(gate, Tick(0, 1), Tick(1, 1), BeginIteration(0, 1, "a"))
    assert feed(gate, Depart(2)) == [Complete(0, (0, 1)), Unblock("a")]


def test_a_complete_iteration_lists_dead_workers_with_a_tick() -> None:
    gate = gate_of(Sequential(), 3)
    feed(gate, Tick(0, 1), Depart(0), Depart(1))
    assert feed(gate, Tick(2, 1)) == [Complete(0, (0, 2))]


def test_the_last_iteration_completes_if_the_other_workers_are_finished() -> None:
    gate = gate_of(Sequential(), 2)
    feed(gate, Tick(0, 1), Finish(0))
    assert feed(gate, Finish(1)) == [Complete(0, (0,))]


def test_a_newcomer_starts_at_the_minimum() -> None:
    gate = gate_of(BoundedDelay(tau=4), 2)
    feed(gate, Tick(0, 1), Tick(0, 2), Tick(1, 1))
    assert feed(gate, Join(7)) == [Joined(7, 1)]
    assert gate.lagging(6) == (1, 7)


def test_a_repeated_join_can_raise_the_clock_without_a_tick() -> None:
    gate = gate_of(Sequential(), 1)
    assert feed(gate, Join(1)) == [Joined(1, 0)]
    assert feed(gate, Join(1)) == [Joined(1, 0)]
    assert feed(gate, Join(1, clock=1)) == [Joined(1, 1)]
    assert feed(gate, Tick(0, 1)) == [Complete(0, (0,))]


def test_finish_and_resume() -> None:
    gate = gate_of(Sequential(), 2)
    feed(gate, Finish(1), Tick(0, 1), Tick(0, 2))
    assert gate.minimum == 2
    assert feed(gate, Resume(1)) == [Joined(1, 2)]
    assert not gate.is_open(3)
    assert feed(gate, Resume(1)) == []
    assert feed(gate, Tick(0, 3)) == []
    assert feed(gate, Tick(1, 3)) == [Complete(2, (0, 1))]


def test_resume_keeps_a_higher_clock() -> None:
    gate = gate_of(BoundedDelay(tau=9), 2)
    feed(gate, Tick(1, 5), Finish(1))
    assert feed(gate, Resume(1)) == [Joined(1, 5)]


def test_repeated_events_and_unknown_workers_are_ignored() -> None:
    gate = gate_of(Sequential(), 2)
    feed(gate, Tick(0, 1))
    assert feed(gate, Tick(0, 1), Tick(0, 0), Tick(9, 5), Depart(9), Finish(9), Resume(9)) == []
    assert dict(gate.clocks) == {0: 1, 1: 0}


def test_the_requests_of_a_leaving_worker_are_dropped() -> None:
    gate = gate_of(Sequential(), 2)
    feed(gate, Tick(0, 1), BeginIteration(0, 1, "gone"), BeginIteration(1, 1, "kept"), BeginIteration(0, 2, "gone too"))
    assert feed(gate, Depart(0)) == []
    assert feed(gate, Tick(1, 1)) == [Complete(0, (0, 1)), Unblock("kept")]


def test_a_late_tick_of_a_finished_worker_does_not_change_a_complete_iteration() -> None:
    gate = gate_of(Sequential(), 2)
    feed(gate, Finish(1), Tick(0, 1))
    assert feed(gate, Tick(1, 1)) == []
    assert feed(gate, Depart(0)) == []


def test_a_late_tick_completes_the_iteration_if_all_workers_are_finished() -> None:
    gate = gate_of(Sequential(), 2)
    feed(gate, Finish(0), Finish(1))
    assert feed(gate, Tick(0, 1)) == [Complete(0, (0,))]


def test_a_new_server_starts_at_the_first_clock() -> None:
    gate = Gate(Sequential(), 1, first_clock=40)
    assert feed(gate, Join(0)) == [Joined(0, 40)]
    assert feed(gate, Tick(0, 41)) == [Complete(40, (0,))]


def test_a_new_worker_in_an_empty_gate_starts_at_the_highest_clock() -> None:
    gate = gate_of(BoundedDelay(tau=3), 2)
    feed(gate, Tick(0, 3), Depart(0), Depart(1))
    assert feed(gate, Join(5)) == [Joined(5, 3)]


def test_illegal_numbers_are_rejected() -> None:
    with pytest.raises(UsageError, match="expected_workers=-1"):
        Gate(Eventual(), -1)


def test_vector_clock_finds_the_minimum_after_a_jump_and_a_leave() -> None:
    clock = VectorClock()
    for worker in range(3):
        clock.join(worker)
    clock.tick(0, 10**12)
    clock.tick(1, 5)
    clock.leave(2)
    clock.validate()
    assert clock.minimum == 5
    assert clock.lagging(6) == (1,)
    clock.leave(1)
    assert clock.minimum == 10**12
