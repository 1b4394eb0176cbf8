"""The end of groups, and calls that cannot finish: after an abort, a close or a fork, or within a callback."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from paceline.collectives import CollectiveTicket, Group, MemoryStore, join
from paceline.errors import GroupClosedError, MismatchError, PacelineError, RankLostError, UsageError
from paceline.testing import nothing_left, run_ranks
from paceline.transport.client import open_socket

_WAIT = timedelta(seconds=10)
engines = pytest.mark.parametrize("options", [{}, {"algorithm": "ring"}], ids=["shared", "network"])


def _wait_for_all(tickets: list[CollectiveTicket]) -> None:
    for ticket in tickets:
        ticket.wait(_WAIT)


@engines
def test_an_abort_ends_all_calls_and_names_the_rank(options: dict[str, Any]) -> None:
    is_over = threading.Event()

    def call(group: Group) -> None:
        group.all_reduce(np.ones(3))
        if group.rank == 1:
            assert is_over.wait(10)
            tickets = [
                group.all_reduce_async(np.ones(3)) for _ in range(2)
            ]  # rank 0 of the first group may have finished its part
            with pytest.raises(RankLostError, match="rank 0") as lost:
                _wait_for_all(tickets)
            assert lost.value.ranks == (0,)
            return
        tickets = [group.all_reduce_async(np.ones(3)) for _ in range(3)]
        message = group.recv_async(np.ones(3), 1)
        assert group.num_pending == 3
        group.abort()
        group.abort()
        for ticket in tickets:
            with pytest.raises(GroupClosedError, match="aborted"):
                ticket.wait(_WAIT)
        with pytest.raises(GroupClosedError, match="aborted"):
            message.wait(_WAIT)
        for use in (group.barrier, group.barrier_async, lambda: group.send(np.ones(1), 1)):
            with pytest.raises(GroupClosedError, match="aborted on this rank"):
                use()
        assert not group.num_pending
        is_over.set()

    run_ranks(2, call, within=timedelta(seconds=15), **options)


def test_a_callback_does_not_wait_for_later_calls() -> None:
    is_added = threading.Event()

    def call(group: Group) -> None:
        if group.rank == 1:
            assert is_added.wait(10)
            group.barrier()
            assert group.all_reduce(np.ones(1)) == [2]
            return
        refused: list[str] = []
        late: list[CollectiveTicket] = []

        def back(_: CollectiveTicket) -> None:
            late.append(group.all_reduce_async(np.ones(1)))
            for wait in (group.barrier, late[0].wait):
                try:
                    wait()
                except UsageError as error:
                    refused.append(str(error)[:10])
            was_called.set()

        was_called = threading.Event()
        group.barrier_async().add_done_callback(back)
        is_added.set()
        assert was_called.wait(10)
        assert late[0].result() == [2]
        assert refused == ["a callback"] * 2

    run_ranks(2, call, within=timedelta(seconds=15))


def test_closing_the_world_closes_its_subgroups() -> None:
    def call(group: Group) -> Group:
        part = group.subgroup(range(group.size))
        assert part is not None
        part.barrier_async().wait()
        return part

    with nothing_left():
        parts = run_ranks(2, call)
    for part in parts:
        with pytest.raises(GroupClosedError, match="it was closed"):
            part.barrier()
        with pytest.raises(GroupClosedError, match="all groups of this program were closed"):
            part.subgroup([0, 1])


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="this system has no os.fork")
def test_a_forked_child_leaves_the_group_to_the_parent() -> None:
    with join(MemoryStore(), 0, 1, token="a token for tests") as group:
        unix = group._world.node.info.endpoint.unix
        child = os.fork()
        if not child:
            code = 1
            try:
                group.close()
                group.barrier()
            except GroupClosedError as error:
                code = 0 if "forked" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        if unix is not None:
            open_socket(unix, 5.0).close()  # the parent still listens
        group.barrier()


def test_every_rank_reports_that_the_requested_algorithms_differ() -> None:
    store = MemoryStore()
    errors: list[PacelineError] = []

    def meet(rank: int, algorithm: str | None) -> None:
        with pytest.raises(MismatchError, match="ranks 0 and 2 demanded 'ring'; rank 1 demanded none") as caught:
            join(store, rank, 3, token="a token for tests", algorithm=algorithm, timeout=_WAIT)
        errors.append(caught.value)

    threads = [threading.Thread(target=meet, args=arguments) for arguments in enumerate(("ring", None, "ring"))]
    with nothing_left():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert len(errors) == 3


@engines
def test_sizes_of_an_uneven_all_to_all_are_not_used_as_data(options: dict[str, Any]) -> None:
    """An uneven all_to_all first exchanges its sizes by an even all_to_all."""

    def call(group: Group) -> None:
        with pytest.raises(MismatchError, match=r"rank 0 called all_to_all \(uneven\).* rank 1 called all_to_all\("):
            group.all_to_all(np.array([5, 6]), send_sizes=[1, 1] if group.rank == 0 else None)

    run_ranks(2, call, **options)


def test_an_invalid_color_is_refused() -> None:
    with join(MemoryStore(), 0, 1, token="a token for tests") as group:
        for color, key in ((1 << 70, 0), (0, -(1 << 70)), ("red", 0)):
            with pytest.raises(UsageError, match="expected integers of 64 bits"):
                group.split(color, key)  # type: ignore[arg-type]
        assert group.gather_sizes([1, 2, 3]) == [3]


@pytest.mark.parametrize("hosts", [None, (0, 1, 0)], ids=["one host", "two hosts"])
def test_a_failed_subgroup_can_be_created_again(hosts: tuple[int, ...] | None) -> None:
    """Ranks 0 and 2 have made more failed attempts than rank 1, so their attempts have higher numbers."""
    have_failed, has_failed = threading.Barrier(3, timeout=20), threading.Barrier(3, timeout=20)

    def call(group: Group) -> None:
        first = group.subgroup(range(3))
        assert first is not None
        first.barrier()
        if group.rank != 1:
            for _ in range(2):
                with pytest.raises(RankLostError, match="rank 1 did not create group") as lost:
                    group.subgroup(range(3), timeout=timedelta(seconds=0.5))
                assert lost.value.ranks == (1,)
        have_failed.wait()
        if group.rank == 1:
            with pytest.raises(RankLostError, match="ranks 0 and 2 did not create group"):
                group.subgroup(range(3), timeout=timedelta(seconds=0.2))
        has_failed.wait()
        for _ in range(2):
            again = group.subgroup(range(3))
            assert again is not None
            assert again.all_reduce(np.ones(2)).tolist() == [3, 3]
        assert first.all_reduce(np.ones(1)) == [3]

    run_ranks(3, call, hosts=hosts)


@engines
def test_a_wrong_target_of_an_uneven_all_to_all_leaves_the_group_alive(options: dict[str, Any]) -> None:
    read_only, expanded = np.ones((2, 3)), np.lib.stride_tricks.as_strided(np.ones(3), (2, 3), (0, 8))
    read_only.flags.writeable = False

    def call(group: Group) -> None:
        array = np.arange(6.0).reshape(2, 3)
        for out in (read_only, expanded, np.ones((2, 4)), np.ones((2, 3), np.float32), np.ones(()), [1]):
            for receives in (None, [1, 1]):
                with pytest.raises(UsageError):
                    group.all_to_all(array, send_sizes=[1, 1], receive_sizes=receives, out=out)
        with pytest.raises(UsageError, match="got out of"):
            group.all_to_all(array, send_sizes=[1, 1], receive_sizes=[1, 1], out=np.ones((3, 3)))
        with pytest.raises(UsageError, match="got receive_sizes"):
            group.all_to_all(array, send_sizes=[1, 1], receive_sizes=[1, -1])
        out = np.ones((2, 3))
        assert group.all_to_all(array, send_sizes=[1, 1], out=out) is out
        assert out.tolist() == [array[group.rank].tolist()] * 2

    run_ranks(2, call, **options)


def test_a_too_small_out_is_a_mismatch() -> None:
    def call(group: Group) -> None:
        with pytest.raises(MismatchError, match=r"rank 1: out has 3 rows, but .* in all_to_all"):
            group.all_to_all(np.ones(2), send_sizes=[1, 1], out=np.ones(2 + group.rank))

    run_ranks(2, call)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("algorithm", ["recursive-doubling", "halving-doubling", "ring", "binomial-tree", "shared"])
def test_signs_of_zeros_and_bits_of_nans_are_equal_on_all_ranks(size: int, algorithm: str) -> None:
    given = np.zeros((size, 2 * size + 40), np.float32)
    given[:, ::2] = -0.0
    given[np.arange(size), np.arange(size)] *= -1
    given.view(np.uint32)[:, -20:] = 0x7FC00000 + np.arange(size)[:, None]

    def call(group: Group) -> list[bytes]:
        return [group.all_reduce(given[group.rank], op).tobytes() for op in ("min", "max", "sum", "product")]

    results = run_ranks(size, call, algorithm=algorithm)
    assert all(result == results[0] for result in results)
