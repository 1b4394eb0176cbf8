"""Examples of leases of shards: one test for each rule of ``docs/explanation/protocol.md``."""

from __future__ import annotations

import pytest
from tests.unit.protocol.jobs.shard_events import Done, Event, ShardCountFound, ShardWanted, Wait, WorkerLost, handle

from paceline.errors import DataError, ProtocolError, UsageError
from paceline.protocol.jobs.shards import Exhausted, Granted, Instruction, Shards


def feed(shards: Shards, *events: Event) -> list[Instruction | Wait]:
    """Handle events; return the instructions for the last event."""
    instructions: list[Instruction | Wait] = []
    for event in events:
        instructions = handle(shards, event)
        shards.validate()
    return instructions


def drain(shards: Shards, worker: int) -> list[tuple[int, int, int]]:
    """Let one worker lease and finish shards until it must wait or stop."""
    read: list[tuple[int, int, int]] = []
    while True:
        (answer,) = feed(shards, ShardWanted(worker))
        if not isinstance(answer, Granted):
            return read
        read.append((answer.epoch, answer.file, answer.shard))
        feed(shards, Done(worker, answer.lease))


def test_first_come_leases_shards_in_order_without_a_barrier_between_epochs() -> None:
    shards = Shards([2, 0, 1], epochs=2)
    assert feed(shards, ShardWanted(0)) == [Granted(0, 0, 0, 0, 0)]
    assert feed(shards, ShardWanted(1)) == [Granted(1, 1, 0, 0, 1)]
    assert feed(shards, ShardWanted(1)) == [Granted(1, 2, 0, 2, 0)]
    assert feed(shards, ShardWanted(1)) == [Granted(1, 3, 1, 0, 0)]  # epoch 0 is not yet complete
    assert shards.progress() == (0, 6)
    feed(shards, Done(1, 1))
    assert shards.progress() == (1, 6)


def test_a_worker_without_a_shard_waits() -> None:
    shards = Shards([2])
    feed(shards, ShardWanted(0), ShardWanted(1))
    assert feed(shards, ShardWanted(2)) == [Wait(2)]
    assert feed(shards, ShardWanted(2)) == [Wait(2)]
    assert feed(shards, Done(1, 1), ShardWanted(1)) == [Wait(1)]
    assert shards.waiting == (2, 1)
    assert feed(shards, Done(0, 0)) == [Exhausted(2), Exhausted(1)]
    assert feed(shards, ShardWanted(0)) == [Exhausted(0)]


def test_shards_of_a_lost_worker_are_leased_before_new_shards() -> None:
    shards = Shards([3], epochs=2)
    feed(shards, ShardWanted(0), ShardWanted(1), ShardWanted(0))
    assert feed(shards, WorkerLost(0)) == []
    assert feed(shards, ShardWanted(1)) == [Granted(1, 3, 0, 0, 0)]
    assert feed(shards, ShardWanted(1)) == [Granted(1, 4, 0, 0, 2)]
    assert feed(shards, ShardWanted(1)) == [Granted(1, 5, 1, 0, 0)]


def test_a_lost_workers_lease_wakes_a_waiting_worker() -> None:
    shards = Shards([1])
    feed(shards, ShardWanted(0), ShardWanted(1), ShardWanted(2))
    assert feed(shards, WorkerLost(0)) == [Granted(1, 1, 0, 0, 0)]
    assert feed(shards, Done(0, 0)) == []  # the dead worker's report is late: its shard has a new lease
    assert feed(shards, WorkerLost(2)) == []
    assert feed(shards, Done(1, 1)) == []
    assert list(shards.done()) == [(0, 0, 0)]


def test_reporting_another_workers_lease_as_done_is_an_error_of_the_peer() -> None:
    shards = Shards([1])
    feed(shards, ShardWanted(0))
    with pytest.raises(ProtocolError, match="worker 0 holds it"):
        handle(shards, Done(1, 0))
    assert shards.progress() == (0, 1)


def test_a_file_may_end_before_its_known_size() -> None:
    shards = Shards([None, 1], epochs=2)
    feed(shards, ShardWanted(0), Done(0, 0), ShardWanted(0), ShardWanted(1), ShardWanted(2))
    assert shards.progress() == (1, None)
    feed(shards, Done(2, 3))  # the worker read no rows in this shard
    assert feed(shards, ShardCountFound(0, 2)) == []
    assert shards.progress() == (1, 6)
    assert feed(shards, Done(1, 2)) == []  # this shard is past the end, so its report has no effect
    assert feed(shards, Done(0, 1), ShardWanted(0)) == [Granted(0, 4, 0, 1, 0)]
    assert drain(shards, 1) == [(1, 0, 0), (1, 0, 1), (1, 1, 0)]
    assert feed(shards, ShardCountFound(0, 2)) == []
    assert feed(shards, Done(0, 4)) == [Exhausted(1)]
    assert shards.progress() == (6, 6)


def test_returned_shards_past_the_end_of_a_file_are_dropped() -> None:
    shards = Shards([None])
    feed(shards, ShardWanted(0), ShardWanted(0), WorkerLost(0), ShardCountFound(0, 1))
    assert drain(shards, 1) == [(0, 0, 0)]
    assert shards.progress() == (1, 1)


@pytest.mark.parametrize(
    "ended", [ShardCountFound(0, 3), ShardCountFound(1, 1), ShardCountFound(-1, 1), ShardCountFound(2, -1)]
)
def test_a_contradictory_end_of_a_file(ended: ShardCountFound) -> None:
    with pytest.raises(DataError, match="was reported to end"):
        handle(Shards([2]), ended)


def test_strided_leases_a_fixed_part_to_every_worker() -> None:
    shards = Shards([3, 4], epochs=2, assignment="strided", num_workers=3)
    assert drain(shards, 1) == [(e, f, s) for e in (0, 1) for f, s in ((0, 1), (1, 1))]
    assert list(shards.waiting) == [1]
    assert drain(shards, 0) == [(e, f, s) for e in (0, 1) for f, s in ((0, 0), (1, 0), (1, 3))]
    assert feed(shards, ShardWanted(7)) == [Wait(7)]  # the worker has no position
    assert drain(shards, 2) == [(e, f, s) for e in (0, 1) for f, s in ((0, 2), (1, 2))]
    assert list(shards.waiting) == []
    assert shards.progress() == (14, 14)


def test_strided_leases_the_part_of_a_lost_worker_to_other_workers() -> None:
    shards = Shards([6], assignment="strided", num_workers=2)
    feed(shards, ShardWanted(1), WorkerLost(1))
    assert drain(shards, 0) == [(0, 0, 1), (0, 0, 0), (0, 0, 2), (0, 0, 4), (0, 0, 3), (0, 0, 5)]
    assert shards.progress() == (6, 6)


def test_strided_shards_of_a_lost_worker_are_leased_before_the_next_epoch() -> None:
    shards = Shards([4], epochs=2, assignment="strided", num_workers=2)
    feed(shards, WorkerLost(1))
    assert drain(shards, 0) == [(e, 0, s) for e in (0, 1) for s in (0, 2, 1, 3)]


def test_strided_leases_its_part_to_a_returning_worker() -> None:
    shards = Shards([4], assignment="strided", num_workers=2)
    feed(shards, WorkerLost(1), ShardWanted(1), Done(1, 0))
    assert drain(shards, 0) == [(0, 0, 0), (0, 0, 2)]
    assert drain(shards, 1) == [(0, 0, 3)]


def test_strided_leases_of_a_file_of_unknown_length() -> None:
    shards = Shards([None, 2], epochs=2, assignment="strided", num_workers=2)
    for expected in (0, 2, 4):
        (granted,) = feed(shards, ShardWanted(0))
        assert granted == Granted(0, expected // 2, 0, 0, expected)
        feed(shards, Done(0, expected // 2))
    feed(shards, ShardCountFound(0, 4))
    assert drain(shards, 0) == [(0, 1, 0), (1, 0, 0), (1, 0, 2), (1, 1, 0)]
    assert drain(shards, 1) == [(0, 0, 1), (0, 0, 3), (0, 1, 1), (1, 0, 1), (1, 0, 3), (1, 1, 1)]
    assert shards.progress() == (12, 12)


@pytest.mark.parametrize("shards", [Shards([]), Shards([0, 0], epochs=10**4), Shards([3], epochs=0)])
def test_a_job_without_shards_ends_immediately(shards: Shards) -> None:
    assert feed(shards, ShardWanted(0)) == [Exhausted(0)]
    assert shards.progress() == (0, 0)
    assert list(shards.done()) == []


def test_illegal_arguments_are_rejected() -> None:
    with pytest.raises(UsageError, match="first-come"):
        Shards([1], assignment="random")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="at least one worker"):
        Shards([1], num_workers=0)
    with pytest.raises(UsageError, match="at least 0"):
        Shards([-1])
