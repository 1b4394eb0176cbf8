"""A fault on one rank ends the call on all ranks, without delay; the error names the responsible rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from paceline.collectives.calls import CollectiveCall
from paceline.collectives.network.blocks import Blocks
from paceline.collectives.network.culprits import Status
from paceline.collectives.network.executor import ScheduleExecutor
from paceline.collectives.network.receiving import Combine
from paceline.collectives.schedules.base import Receive, Schedule, Send
from paceline.collectives.schedules.registry import ALGORITHMS
from paceline.errors import CollectiveError, GroupClosedError, MismatchError, RankLostError

from .meshes import PairLink, PairLinks, in_ranks, open_meshes

CALL = CollectiveCall("all_reduce", "float32", (1000,), "sum")
LARGE_BYTES = 1 << 22


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(2)
        assert not thread.is_alive(), thread


def add(target: memoryview, incoming: memoryview, _: bool) -> None:
    array = np.frombuffer(target, np.float32)
    array += np.frombuffer(incoming, np.float32)


def run(
    executor: ScheduleExecutor,
    schedule: Schedule,
    nbytes: int,
    *,
    call: CollectiveCall = CALL,
    sequence: int = 17,
    timeout_s: float = 30,
    combine: Combine = add,
) -> None:
    buffer = memoryview(bytearray(nbytes))
    blocks = Blocks.even(buffer, schedule.num_blocks, 4) if schedule.num_blocks else Blocks([])
    executor.run(schedule, blocks, call=call, sequence=sequence, combine=combine, item_bytes=4, timeout_s=timeout_s)


def executors_of(
    meshes: Sequence[PairLinks], request_status: Callable[[int], Status | None] | None = None
) -> list[ScheduleExecutor]:
    return [ScheduleExecutor(mesh, group="world", request_status=request_status) for mesh in meshes]


def all_reduces(name: str, size: int) -> list[Schedule]:
    return [ALGORITHMS["all_reduce"][name].schedule(rank, size) for rank in range(size)]


@pytest.mark.parametrize("nbytes", [4000, LARGE_BYTES])
@pytest.mark.parametrize("odd", [0, 2, 5])
@pytest.mark.parametrize("name", ["ring", "recursive-doubling", "binomial-tree"])
def test_a_mismatch_raises_on_every_rank_with_both_sides(name: str, odd: int, nbytes: int) -> None:
    size = 6
    schedules = all_reduces(name, size)
    other = CollectiveCall("all_reduce", "float64", (1000,), "sum")
    with open_meshes(size) as meshes:
        executors = executors_of(meshes)
        start = time.monotonic()
        results = in_ranks(
            lambda rank: run(executors[rank], schedules[rank], nbytes, call=other if rank == odd else CALL),
            range(size),
        )
    assert time.monotonic() - start < 10
    for rank, error in results.items():
        assert isinstance(error, MismatchError), (rank, error)
        assert f"rank {odd} called all_reduce(float64[1000], sum)" in str(error)
        assert "called all_reduce(float32[1000], sum)" in str(error)
        assert "call 17" in str(error)
        if rank != odd:
            sides = str(error).split(";")
            assert any(str(rank) in side.split(" called ")[0] and "float32" in side for side in sides), error


@pytest.mark.parametrize("odd", [0, 1, 3])
def test_ranks_in_different_calls_are_named_with_numbers(odd: int) -> None:
    size = 4
    schedules = all_reduces("ring", size)
    with open_meshes(size) as meshes:
        executors = executors_of(meshes)
        results = in_ranks(
            lambda rank: run(executors[rank], schedules[rank], 4000, sequence=18 if rank == odd else 17), range(size)
        )
    for error in results.values():
        assert isinstance(error, MismatchError)
        assert f"rank {odd}" in str(error)
        assert "call 17, all_reduce(float32[1000], sum)" in str(error)
        assert "call 18, all_reduce(float32[1000], sum)" in str(error)


def test_messages_of_unexpected_length_are_a_mismatch() -> None:
    schedules = all_reduces("ring", 2)
    with open_meshes(2) as meshes:
        executors = executors_of(meshes)
        results = in_ranks(lambda rank: run(executors[rank], schedules[rank], 4000 + 400 * rank), range(2))
    for error in results.values():
        assert isinstance(error, MismatchError)
        assert "bytes" in str(error)


class Fuse:
    """Closes the links of its rank after a number of sent bytes, as if the rank had died."""

    def __init__(self, mesh: PairLinks, after_bytes: int) -> None:
        self.left = after_bytes
        self.mesh = mesh
        for link in mesh.connected():
            self._arm(link)

    def _arm(self, link: PairLink) -> None:
        send = link.send_nowait

        def send_nowait(buffers: Sequence[memoryview]) -> int:
            first = [buffer for buffer in buffers if buffer.nbytes][:1]
            count = send([first[0][: max(1, self.left)]])
            self.left -= count
            if self.left <= 0:
                self.mesh.close()
            return count

        link.send_nowait = send_nowait  # type: ignore[method-assign]

    @property
    def has_blown(self) -> bool:
        return self.left <= 0


@pytest.mark.parametrize("dead", [0, 2, 4])
@pytest.mark.parametrize("after_bytes", [10, 50, 1_000_000])
@pytest.mark.parametrize("name", ["ring", "recursive-doubling"])
def test_all_ranks_name_a_rank_that_dies_within_a_message(name: str, after_bytes: int, dead: int) -> None:
    size = 5
    schedules = all_reduces(name, size)
    with open_meshes(size) as meshes:
        fuse = Fuse(meshes[dead], after_bytes)
        executors = executors_of(meshes)
        results = in_ranks(lambda rank: run(executors[rank], schedules[rank], 2 * LARGE_BYTES), range(size))
    assert fuse.has_blown
    for rank, error in results.items():
        if rank != dead:
            assert isinstance(error, RankLostError), (rank, error)
            assert error.ranks == (dead,)
            assert str(error) == (
                f"rank {dead} died or left during all_reduce(float32[1000], sum), call 17 of group 'world'; "
                "the group refuses further work"
            )


def statuses_of(executors: list[ScheduleExecutor], answers: dict[int, Status | None]) -> Callable[[int], Status | None]:
    return lambda rank: answers[rank] if rank in answers else executors[rank].status()


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("name", ["ring", "recursive-doubling", "double-binary-tree"])
@pytest.mark.parametrize("silent", [False, True])
def test_the_error_names_the_missing_rank_and_not_the_neighbour(name: str, lazy: bool, silent: bool) -> None:
    size, absent, timeout_s = 5, 2, 0.6
    schedules = all_reduces(name, size)
    executors: list[ScheduleExecutor] = []
    with open_meshes(size, lazy=lazy) as meshes:
        request_status = statuses_of(executors, {absent: None if silent else Status(16, None, ())})
        executors += executors_of(meshes, request_status)
        start = time.monotonic()
        present = [rank for rank in range(size) if rank != absent]
        results = in_ranks(lambda rank: run(executors[rank], schedules[rank], 4000, timeout_s=timeout_s), present)
        took_s = time.monotonic() - start
    assert 0.3 < took_s < 1.5  # 1.5 s: more than the timeout, because the machine may be busy
    for error in results.values():
        assert isinstance(error, RankLostError)
        assert error.ranks == (absent,), error
        reason = "does not answer" if silent else "has not called it (it finished call 16 and is not in a collective)"
        assert f"rank {absent} {reason}" in str(error)
        assert "all_reduce(float32[1000], sum), call 17 of group 'world' did not finish within 0.6 s" in str(error)


def test_without_a_status_source_the_error_names_the_next_rank() -> None:
    schedules = all_reduces("ring", 2)
    with open_meshes(2) as meshes:
        executor = ScheduleExecutor(meshes[0], group="world")
        with pytest.raises(RankLostError, match="rank 1 did not send") as caught:
            run(executor, schedules[0], 4000, timeout_s=0.3)
        assert caught.value.ranks == (1,)


def test_a_rank_arriving_during_status_requests_is_not_lost() -> None:
    schedules = all_reduces("ring", 2)
    requested = threading.Event()

    def request_status(_: int) -> Status:
        requested.set()
        return Status(16, None, ())

    with open_meshes(2) as meshes:
        executors = executors_of(meshes, request_status)

        def work(rank: int) -> None:
            if rank == 1:
                assert requested.wait(30)
            run(executors[rank], schedules[rank], 4000, timeout_s=3)

        assert in_ranks(work, range(2)) == {0: None, 1: None}


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ZeroDivisionError])
def test_an_exception_is_raised_on_one_rank_and_reported_to_the_other_ranks(kind: type[BaseException]) -> None:
    size, failing = 4, 1
    schedules = all_reduces("ring", size)

    def fail(target: memoryview, incoming: memoryview, _: bool) -> None:
        raise kind("on purpose")

    with open_meshes(size) as meshes:
        executors = executors_of(meshes)
        results = in_ranks(
            lambda rank: run(executors[rank], schedules[rank], LARGE_BYTES, combine=fail if rank == failing else add),
            range(size),
        )
    assert type(results.pop(failing)) is kind
    for error in results.values():
        assert type(error) is CollectiveError
        assert (
            f"rank 1 failed during all_reduce(float32[1000], sum), call 17 of group 'world', with {kind.__name__}"
            in (str(error))
        )


def test_after_a_failure_every_call_raises_the_first_error() -> None:
    schedules = all_reduces("ring", 2)
    with open_meshes(2) as meshes:
        executors = executors_of(meshes)
        in_ranks(lambda rank: run(executors[rank], schedules[rank], 400, sequence=17 + rank), range(2))
        for rank in range(2):
            with pytest.raises(GroupClosedError, match="not in the same call"):
                run(executors[rank], schedules[rank], 400, sequence=19)


@pytest.mark.parametrize("name", ["ring", "binomial-tree"])
def test_an_absent_rank_receives_the_failure_at_its_next_call(name: str) -> None:
    # Ranks 0 and 1 fail before rank 2 makes the call, so their links are closed at that time.
    size = 3
    schedules = all_reduces(name, size)
    other = CollectiveCall("broadcast", "int64", (3,), root=1)
    with open_meshes(size) as meshes:
        executors = executors_of(meshes)
        results = in_ranks(
            lambda rank: run(executors[rank], schedules[rank], LARGE_BYTES, call=CALL if rank else other), (0, 1)
        )
        assert [type(error) for error in results.values()] == [MismatchError] * 2
        with pytest.raises(MismatchError, match=r"rank 0 called broadcast\(int64\[3\], root=1\)"):
            run(executors[2], schedules[2], LARGE_BYTES)


def test_a_blocked_sender_is_notified_of_a_failure() -> None:
    # Rank 0 sends to rank 1. Rank 1 first reduces the block of rank 2, and this reduction fails.
    size = 3
    schedules = [
        Schedule(1, ((Send(1, ((0, 1),)),),)),
        Schedule(1, ((Receive(2, ((0, 1),), reduce=True),), (Receive(0, ((0, 1),)),))),
        Schedule(1, ((Send(1, ((0, 1),)),),)),
    ]

    def fail(target: memoryview, incoming: memoryview, _: bool) -> None:
        raise ZeroDivisionError

    with open_meshes(size) as meshes:
        executors = executors_of(meshes)
        results = in_ranks(lambda rank: run(executors[rank], schedules[rank], LARGE_BYTES, combine=fail), range(size))
    assert isinstance(results[1], ZeroDivisionError)
    for rank in (0, 2):
        assert "rank 1 failed" in str(results[rank])


def test_invalid_bytes_are_reported_to_all_ranks() -> None:
    schedules = all_reduces("ring", 3)
    with open_meshes(3) as meshes:
        executors = executors_of(meshes)
        meshes[2].link(0, 0).socket.send(b"GET / HTTP/1.1\r\nHost: paceline\r\n\r\n")
        results = in_ranks(lambda rank: run(executors[rank], schedules[rank], 4000), range(3))
    for error in results.values():
        assert isinstance(error, CollectiveError), error
    assert "rank 2 sent invalid bytes" in str(results[0])


def test_the_status_names_the_missing_ranks() -> None:
    schedules = all_reduces("ring", 2)
    seen: list[Status] = []
    with open_meshes(2) as meshes:
        executors: list[ScheduleExecutor] = []

        def request_status(_: int) -> Status | None:
            seen.append(executors[0].status())
            return None

        executors += executors_of(meshes, request_status)
        assert executors[0].status() == Status(-1, None, ())
        with pytest.raises(RankLostError):
            run(executors[0], schedules[0], 4000, timeout_s=0.5)
    assert seen == [Status(17, CALL, (1,))]


def test_a_failure_is_not_lost_in_large_messages_through_tiny_buffers() -> None:
    size = 3
    schedules = all_reduces("recursive-doubling", size)
    calls: list[Any] = [CALL, CALL, CollectiveCall("all_reduce", "float32", (999,), "sum")]
    with open_meshes(size, buffer_bytes=4096) as meshes:
        executors = executors_of(meshes)
        results = in_ranks(
            lambda rank: run(executors[rank], schedules[rank], LARGE_BYTES, call=calls[rank]), range(size)
        )
    for error in results.values():
        assert isinstance(error, MismatchError), error
        assert "rank 2 called all_reduce(float32[999], sum)" in str(error)
