"""Faults in a group raise an error on every rank. Ranks are threads on one or several simulated hosts."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import pytest

from paceline.collectives import Group, MemoryStore, join
from paceline.errors import (
    CollectiveError,
    DeadlineError,
    GroupClosedError,
    MismatchError,
    PacelineError,
    RankLostError,
    UsageError,
)
from paceline.testing import nothing_left, run_ranks

_T = TypeVar("_T")
_SHORT = timedelta(seconds=1.5)
_ENGINES = {
    "shared": {"size": 3},
    "ring": {"size": 3, "algorithm": "ring"},
    "hosts": {"size": 4, "hosts": [0, 0, 1, 1]},
    "layered": {"size": 4, "hosts": [0, 0, 1, 1], "algorithm": "hierarchical"},
}
engines = pytest.mark.parametrize(
    "options",
    [pytest.param(_ENGINES[name], marks=[pytest.mark.thorough] * (name == "hosts"), id=name) for name in _ENGINES],
)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    with nothing_left():
        yield


def failures(function: Callable[[Group], object], **options: Any) -> list[PacelineError]:
    """Run a function that must fail on every rank; return the errors. Check that every group then rejects calls."""

    def run(group: Group) -> PacelineError:
        try:
            function(group)
        except PacelineError as error:
            with pytest.raises(GroupClosedError, match="refuses further work"):
                group.barrier()
            with pytest.raises(GroupClosedError, match="refuses further work"):
                group.send(np.zeros(1), 0)
            with pytest.raises(GroupClosedError, match="refuses further work"):
                group.all_reduce_async(np.zeros(1))
            return error
        raise AssertionError(f"rank {group.rank} has detected no failure")

    return run_ranks(function=run, within=timedelta(seconds=20), **options)


_LARGE = 1 << 20
_MISMATCHES: dict[str, tuple[Callable[[Group], object], Callable[[Group], object], tuple[str, str]]] = {
    "operation": (
        lambda group: group.barrier(),
        lambda group: group.all_reduce(np.ones(3)),
        ("barrier()", "all_reduce(float64[3], sum)"),
    ),
    "shape": (
        lambda group: group.all_reduce(np.ones((2, 3))),
        lambda group: group.all_reduce(np.ones((3, 2))),
        ("float64[2, 3]", "float64[3, 2]"),
    ),
    "size": (
        lambda group: group.all_gather(np.ones(4)),
        lambda group: group.all_gather(np.ones(50_000)),
        ("float64[4]", "float64[50000]"),
    ),
    "large sizes": (
        lambda group: group.all_reduce(np.ones(_LARGE, np.float32)),
        lambda group: group.all_reduce(np.ones(4 * _LARGE, np.float32)),
        (f"float32[{_LARGE}]", f"float32[{4 * _LARGE}]"),
    ),
    "large and small": (
        lambda group: group.all_reduce(np.ones(_LARGE, np.float32)),
        lambda group: group.barrier(),
        (f"float32[{_LARGE}]", "barrier()"),
    ),
    "dtype": (
        lambda group: group.all_reduce(np.ones(3, np.float32)),
        lambda group: group.all_reduce(np.ones(3, np.int32)),
        ("float32[3]", "int32[3]"),
    ),
    "reduction": (
        lambda group: group.all_reduce(np.ones(3), "sum"),
        lambda group: group.all_reduce(np.ones(3), "max"),
        ("sum", "max"),
    ),
    "root": (
        lambda group: group.broadcast(np.ones(3), root=0),
        lambda group: group.broadcast(np.ones(3), root=1),
        ("root=0", "root=1"),
    ),
    "sizes": (
        lambda group: group.reduce_scatter(np.ones(7), sizes=[3, 4, *[0] * (group.size - 2)]),
        lambda group: group.reduce_scatter(np.ones(7), sizes=[4, 3, *[0] * (group.size - 2)]),
        ("[3, 4", "[4, 3"),
    ),
}


@pytest.mark.parametrize(
    "is_first", [True, pytest.param(False, marks=pytest.mark.thorough)], ids=["first call", "later call"]
)
@pytest.mark.parametrize(
    ("options", "case"),
    [
        pytest.param(
            *(options, case),
            marks=[pytest.mark.thorough]
            * (name not in ("shared", "ring") and case not in ("shape", "large and small")),
            id=f"{name}-{case}",
        )
        for name, options in _ENGINES.items()
        for case in _MISMATCHES
    ],
)
def test_different_calls_raise_on_every_rank(options: dict[str, Any], case: str, is_first: bool) -> None:
    one, other, mismatch = _MISMATCHES[case]

    def call(group: Group) -> None:
        if not is_first:
            group.all_reduce(np.ones(5))
            group.all_reduce(np.ones(_LARGE, np.float32))
        (other if group.rank == group.size - 1 else one)(group)

    for error in failures(call, **options):
        assert isinstance(error, MismatchError), repr(error)
        assert all(text in str(error) for text in mismatch), error
        assert f"rank {options['size'] - 1}" in str(error)
        assert "tune" not in str(error)


@engines
def test_the_error_names_the_missing_rank(options: dict[str, Any]) -> None:
    is_over = threading.Event()
    size = options["size"]
    num_over = threading.Semaphore(0)

    def call(group: Group) -> PacelineError | None:
        group.all_reduce(np.ones(4))
        if group.rank == 1:
            for _ in range(size - 1):
                assert num_over.acquire(timeout=60)
            is_over.set()
            return None
        try:
            group.all_reduce(np.ones(4))
        except PacelineError as error:
            return error
        finally:
            num_over.release()
            is_over.wait(60)  # a closed connection would show the death
        return None

    errors = run_ranks(function=call, timeout=_SHORT, within=timedelta(seconds=20), **options)
    for rank, error in enumerate(errors):
        if rank != 1:
            assert isinstance(error, RankLostError)
            assert error.ranks == (1,), error
            assert "rank 1" in str(error)


@engines
def test_a_leaving_rank_is_named(options: dict[str, Any]) -> None:
    def call(group: Group) -> PacelineError | None:
        group.all_reduce(np.ones(4))
        if group.rank == 1:
            return None  # the group is closed
        with pytest.raises(RankLostError) as lost:
            group.all_reduce(np.ones(4))
        return lost.value

    for rank, error in enumerate(run_ranks(function=call, within=timedelta(seconds=10), **options)):
        if rank != 1:
            assert isinstance(error, RankLostError)
            assert error.ranks == (1,), error


@engines
def test_an_interrupted_rank_is_reported(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt may occur at any place. Here it occurs in the group, after the engine's work."""

    def call(group: Group) -> BaseException | None:
        group.all_reduce(np.ones(4))
        if group.rank == 1:
            monkeypatch.setattr(group.tuner, "record", _interrupt)
        try:
            for _ in range(2):
                group.all_reduce(np.ones(4))
        except CollectiveError as error:
            is_detected.release()
            return error
        except KeyboardInterrupt:
            assert group.rank == 1
            assert is_detected.acquire(timeout=60)  # the timeout must detect the death, not the closed connection
        return None

    is_detected = threading.Semaphore(0)
    errors = run_ranks(function=call, within=timedelta(seconds=20), **options)
    for rank, error in enumerate(errors):
        if rank != 1:
            assert isinstance(error, CollectiveError)
            assert "KeyboardInterrupt" in str(error) or "rank 1" in str(error)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@engines
def test_sizes_that_only_another_rank_contradicts(options: dict[str, Any]) -> None:
    def exchange(group: Group) -> None:
        receives = [1] * group.size
        if group.rank == 0:
            receives[1] = 2
        group.all_to_all(np.ones(group.size), send_sizes=[1] * group.size, receive_sizes=receives)

    for error in failures(exchange, **options):
        assert isinstance(error, MismatchError), repr(error)


def test_a_closed_group_rejects_calls() -> None:
    def call(group: Group) -> None:
        ticket = group.all_reduce_async(np.ones(3))
        assert ticket.result().tolist() == [group.size * 1.0] * 3
        group.barrier()
        group.close()
        group.close()
        for use in (group.barrier, group.barrier_async, lambda: group.recv(np.ones(1), 0)):
            with pytest.raises(GroupClosedError, match="it was closed"):
                use()
        with pytest.raises(GroupClosedError):
            group.split(0)

    run_ranks(2, call)
    run_ranks(2, call, algorithm="ring")


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("algorithm", [None, "ring"])
@pytest.mark.parametrize("count", [3, pytest.param(100_000, marks=pytest.mark.thorough), 1_000_000])
def test_closing_ends_a_running_call(is_async: bool, algorithm: str | None, count: int) -> None:
    """The failed call does not free memory that the engine still uses."""
    is_over = threading.Event()

    def call(group: Group) -> None:
        group.all_reduce(np.ones(count))
        if group.rank == 1:
            assert is_over.wait(60)
            return
        has_begun = threading.Event()

        def close() -> None:
            has_begun.wait(60)
            group.close()

        closer = threading.Thread(target=close)
        closer.start()
        try:
            if is_async:
                ticket = group.all_reduce_async(np.ones(count))
                has_begun.set()
                with pytest.raises(CollectiveError):
                    ticket.wait(timedelta(seconds=10))
            else:
                has_begun.set()
                with pytest.raises(CollectiveError):
                    group.all_reduce(np.ones(count))
            closer.join(60)
            assert not closer.is_alive()
        finally:
            is_over.set()

    run_ranks(2, call, within=timedelta(seconds=20), algorithm=algorithm)


def test_a_failed_call_fails_later_tickets() -> None:
    def call(group: Group) -> None:
        if group.rank == 1:
            with pytest.raises(MismatchError):
                group.barrier()
            return
        tickets = [group.all_reduce_async(np.ones(3)) for _ in range(3)]
        with pytest.raises(MismatchError):
            tickets[0].result()
        assert isinstance(tickets[0].exception(), MismatchError)
        for ticket in tickets[1:]:
            with pytest.raises(GroupClosedError):
                ticket.result()
            assert ticket.done()

    run_ranks(2, call)


def test_a_callback_that_raises_does_not_affect_the_group(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError("a user's mistake")

    def call(group: Group) -> None:
        called = threading.Event()
        ticket = group.barrier_async()
        ticket.add_done_callback(fail)
        ticket.add_done_callback(lambda _: called.set())
        ticket.wait()
        assert called.wait(60)
        group.barrier_async().wait(timedelta(seconds=10))

    run_ranks(2, call, within=timedelta(seconds=20))
    assert "a user's mistake" in caplog.text


class TestMessageTickets:
    """Tickets of send and receive behave like other tickets."""

    def test_a_timeout_of_a_wait_does_not_end_the_receive(self) -> None:
        def call(group: Group) -> None:
            if group.rank == 0:
                got = np.zeros(3)
                ticket = group.recv_async(got, 1)
                for wait in (timedelta(0), timedelta(milliseconds=30)):
                    with pytest.raises(DeadlineError):
                        ticket.wait(wait)
                assert not ticket.done()
                assert ticket.exception() is None
                group.barrier()
                assert ticket.result() == 1
                assert ticket.done()
                assert got.tolist() == [1, 2, 3]
            else:
                group.barrier()
                group.send(np.array([1.0, 2, 3]), 0)

        run_ranks(2, call)

    def test_callbacks_are_called_without_a_waiting_thread(self) -> None:
        def call(group: Group) -> None:
            if group.rank == 0:
                called = threading.Event()
                ticket = group.recv_async(np.zeros((2, 2)).T, 1)
                ticket.add_done_callback(lambda _: called.set())
                group.barrier()
                assert called.wait(60)
                assert ticket.done()
            else:
                group.barrier()
                group.send(np.ones((2, 2)), 0)
            group.barrier()

        run_ranks(2, call)

    def test_a_receive_of_another_size_fails_on_both_sides(self) -> None:
        def call(group: Group) -> None:
            if group.rank == 0:
                ticket = group.recv_async(np.zeros(4), 1)
                with pytest.raises(MismatchError, match=r"float64\[3\].*float64\[4\]"):
                    ticket.wait()
                assert ticket.done()
                assert isinstance(ticket.exception(), MismatchError)
                with pytest.raises(GroupClosedError, match=r"a message failed: rank 1 sent 24 bytes"):
                    group.barrier()
            else:
                ticket = group.recv_async(np.zeros(1), 0)
                group.send(np.zeros(3), 0)
                with pytest.raises(MismatchError, match=r"float64\[3\].*float64\[4\]"):
                    ticket.wait()

        run_ranks(2, call)

    def test_a_receive_without_a_sender_fails(self) -> None:
        is_over = threading.Event()

        def call(group: Group) -> None:
            if group.rank == 0:
                with pytest.raises(RankLostError, match="rank 1") as lost:
                    group.recv(np.zeros(4), 1, tag=3)
                assert lost.value.ranks == (1,)
                is_over.set()
            assert is_over.wait(60)
            with pytest.raises(CollectiveError, match="no message with tag 3 arrived from rank 1"):
                group.barrier()

        run_ranks(2, call, timeout=_SHORT)

    def test_a_sent_message_is_received_after_the_sender_has_left(self) -> None:
        has_left = threading.Event()

        def call(group: Group) -> None:
            if group.rank == 1:
                group.send(np.full(1000, 5.0), 0)
                group.close()
                has_left.set()
                return
            assert has_left.wait(60)
            got = np.zeros(1000)
            assert group.recv(got) == 1
            assert (got == 5).all()

        run_ranks(2, call)


class TestJoining:
    """If a group cannot be created, every rank raises an error and no resource stays open."""

    @pytest.mark.parametrize("size", [1, 2])
    def test_an_unknown_algorithm_is_rejected_before_the_rendezvous(self, size: int) -> None:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(UsageError, match=r"'rign', expected one of.*ring"):
            join(MemoryStore(), 0, size, token="a token for tests", algorithm="rign")
        assert len(os.listdir("/proc/self/fd")) == before

    def test_missing_ranks_are_named(self) -> None:
        with pytest.raises(RankLostError, match="ranks 1 and 2 of 3 did not come") as lost:
            join(MemoryStore(), 0, 3, token="a token for tests", timeout=timedelta(seconds=0.1))
        assert lost.value.ranks == (1, 2)

    def test_a_subgroup_with_a_missing_rank_fails(self) -> None:
        def call(group: Group) -> None:
            if group.rank != 1:
                with pytest.raises(RankLostError, match="rank 1") as lost:
                    group.subgroup([0, 1] if group.rank == 0 else [1, 2], timeout=timedelta(seconds=0.2))
                assert lost.value.ranks == (1,)
            group.barrier()

        run_ranks(3, call)

    @pytest.mark.parametrize("culprit", [0, 1])
    def test_missing_shared_memory_is_replaced_by_sockets(self, monkeypatch: pytest.MonkeyPatch, culprit: int) -> None:
        """All ranks use sockets, and the group works."""
        real = os.posix_fallocate if culprit == 0 else os.open

        def fail(*arguments: Any) -> Any:
            if culprit == 0 or "/fd/" in str(arguments[0]):
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*arguments)

        monkeypatch.setattr(os, "posix_fallocate" if culprit == 0 else "open", fail)

        def call(group: Group) -> str:
            assert group.all_reduce(np.ones(100_000))[-1] == 3
            return group.explain(800_000)

        for text in run_ranks(3, call):
            assert "shared" not in text

    def test_without_compiled_kernels_groups_use_sockets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("paceline.collectives.group_setup.config.DISABLE_JIT", 1)
        texts = run_ranks(2, lambda group: [group.all_reduce([1.0]).tolist() == [2.0], group.explain(10)])
        assert all(right and "shared" not in text for right, text in texts)


class TestBarrier:
    """No rank leaves a barrier before all ranks have entered."""

    @engines
    def test_no_rank_leaves_before_all_ranks_have_entered(self, options: dict[str, Any]) -> None:
        counts = [0] * 10
        lock = threading.Lock()

        def call(group: Group) -> None:
            for turn in range(10):
                with lock:
                    counts[turn] += 1
                (group.barrier if turn % 2 else group.barrier_async().wait)()
                assert counts[turn] == group.size

        run_ranks(function=call, **options)


class TestExplanations:
    """explain() names the executed algorithm."""

    @pytest.mark.parametrize(
        ("num_bytes", "operation"),
        [
            (104, "all_reduce"),
            pytest.param(104, "gather", marks=pytest.mark.thorough),
            pytest.param(1 << 22, "all_reduce", marks=pytest.mark.thorough),
            (1 << 22, "gather"),
        ],
    )
    @pytest.mark.parametrize("algorithm", [None, "direct", "shared", "ring", "binomial-tree"])
    def test_explain_names_the_algorithm_in_use(self, algorithm: str | None, operation: str, num_bytes: int) -> None:
        def call(group: Group) -> list[str]:
            getattr(group, operation)(np.ones(num_bytes // 8))
            explanation = group.explain(num_bytes, operation).splitlines()
            group.barrier()
            return explanation

        for explanation in run_ranks(2, call, algorithm=algorithm):
            marked = [line.split() for line in explanation if line.startswith("*")]
            assert len(marked) == 1, explanation
            assert f": {marked[0][1]} (" in explanation[0]
            if operation == "all_reduce":
                assert marked[0][-1] != "-", explanation

    def test_a_single_rank(self) -> None:
        assert run_ranks(1, lambda group: "the first call measures" in group.explain(1000)) == [False]


def test_the_given_timeout_is_used() -> None:
    def call(group: Group) -> None:
        part = group.subgroup([1, 0], timeout=timedelta(seconds=7))
        assert part is not None
        assert part.timeout == timedelta(seconds=7)
        assert group.timeout == timedelta(seconds=30)
        part.close()

    run_ranks(2, call)


def test_run_ranks_reports_which_rank_failed() -> None:
    def call(group: Group) -> int:
        if group.rank == 1:
            raise ValueError("out of luck")
        return group.rank

    with pytest.raises(AssertionError, match="rank 1: ValueError: out of luck") as failed:
        run_ranks(2, call)
    assert isinstance(failed.value.__cause__, ValueError)
    hold = threading.Event()
    with pytest.raises(AssertionError, match=r"(?s)rank 1 has not ended within 2 s:.*hold.wait"):
        run_ranks(2, lambda group: hold.wait(20) if group.rank else None, within=timedelta(seconds=2))
    hold.set()
    assert run_ranks(3, lambda group: group.rank) == [0, 1, 2]
