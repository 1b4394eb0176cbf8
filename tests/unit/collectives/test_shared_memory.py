"""The engine without a group: two ranks in one process share one segment."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from paceline.collectives.aborts import Abort
from paceline.collectives.calls import CollectiveCall, shorten
from paceline.collectives.engine import Area, Order, Reduction
from paceline.collectives.shared import faults
from paceline.collectives.shared.engine import DIRECT_BYTES, SharedMemory
from paceline.collectives.shared.segment import Segment
from paceline.errors import CollectiveError, MismatchError, RankLostError
from paceline.kernels import combine, steps

_SUM = Reduction(combine.combiner("float32"), combine.SUM, 1.0, 4)


def order(sequence: int, operation: str = "all_reduce", algorithm: str = "", timeout_s: float = 10.0) -> Order:
    call = CollectiveCall(operation, "float32", (sequence,))
    return Order(call, call.signature, sequence, timeout_s, algorithm)


def area(array: np.ndarray) -> Area:
    return Area(array.ctypes.data, array.nbytes)


@pytest.fixture
def engines() -> Iterator[list[SharedMemory]]:
    one = Segment.create(steps.segment_bytes(2))
    other = Segment.open(one.path, one.num_bytes, pid=os.getpid())
    made = [
        SharedMemory(segment, rank, [os.getpid()] * 2, name="pair", num_cores=1, members=(4, 7))
        for rank, segment in enumerate((one, other))
    ]
    yield made
    for engine in made:
        engine.close()
        engine.close()


def in_both_ranks(engines: list[SharedMemory], work: Callable[[SharedMemory], object]) -> list[BaseException | None]:
    errors: list[BaseException | None] = [None, None]

    def run(rank: int) -> None:
        try:
            work(engines[rank])
        except CollectiveError as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return errors


def counts_around(num_bytes: int) -> list[int]:
    return [(num_bytes + change) // 4 for change in (-4, 0, 4)]


_EDGES = (1 << 15, steps.SLOT_BYTES // 2, steps.SLOT_BYTES, 3 * steps.SLOT_BYTES)


@pytest.mark.parametrize("count", [0, 1, *(count for edge in _EDGES for count in counts_around(edge))])
@pytest.mark.parametrize("algorithm", ["shared", "direct"])
def test_sums_of_sizes_around_each_limit(engines: list[SharedMemory], count: int, algorithm: str) -> None:
    def reduce(engine: SharedMemory) -> None:
        if algorithm == "direct":
            engine.test_peer_reads(order(1, "meet"))
            assert engine.reads_peers
        for sequence in (2, 3):
            array = np.arange(count, dtype=np.float32) + engine.rank + sequence
            engine.all_reduce(order(sequence, algorithm=algorithm), area(array), area(array), _SUM)
            assert np.array_equal(array, 2 * np.arange(count, dtype=np.float32) + 1 + 2 * sequence)

    assert in_both_ranks(engines, reduce) == [None, None]


def test_errors_name_ranks_by_their_numbers_in_the_group(engines: list[SharedMemory]) -> None:
    with pytest.raises(RankLostError, match="rank 7") as lost:
        engines[0].barrier(order(1, timeout_s=0.05))
    assert lost.value.ranks == (7,)
    engines[1].barrier(order(1))  # rank 4 has already called this barrier
    with pytest.raises(RankLostError, match="rank 7") as lost:
        engines[1].barrier(order(2))
    assert lost.value.ranks == (7,)


def test_a_mismatch_names_both_calls(engines: list[SharedMemory]) -> None:
    errors = in_both_ranks(engines, lambda engine: engine.barrier(order(1, f"number {engine.rank}")))
    for error in errors:
        assert isinstance(error, MismatchError)
        assert "rank 4 called number 0" in str(error)
        assert "rank 7 called number 1" in str(error)


def test_an_error_of_one_rank_reaches_the_other(engines: list[SharedMemory]) -> None:
    engines[0].abort(ZeroDivisionError("a bug"))
    engines[0].abort(ValueError("the second abort is ignored"))
    with pytest.raises(CollectiveError, match=r"rank 4 of group 'pair' failed: ZeroDivisionError a bug"):
        engines[1].barrier(order(1))


def test_a_long_error_message_is_cut(engines: list[SharedMemory]) -> None:
    engines[0].abort(RankLostError("ä" * 10_000, tuple(range(10_000))))
    with pytest.raises(RankLostError, match=r"^ä{1500}$") as lost:
        engines[1].barrier(order(1))
    assert lost.value.ranks[:3] == (0, 1, 2)


def test_a_mismatch_of_many_sizes_reports_the_number(engines: list[SharedMemory]) -> None:
    def gather(engine: SharedMemory) -> None:
        call = shorten(CollectiveCall("all_gather (uneven)", "float32", (1 << 20,) * (1000 + engine.rank)))
        engine.barrier(Order(call, call.signature, 1, 10.0))

    for error in in_both_ranks(engines, gather):
        assert isinstance(error, MismatchError), repr(error)
        assert "rank 4 called all_gather (uneven) of 1000 sizes" in str(error)
        assert "rank 7 called all_gather (uneven) of 1001 sizes" in str(error)


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux can a process read the memory of another process")
def test_a_rank_with_unreadable_memory_is_named(engines: list[SharedMemory], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "DYING_S", 0.01)
    steps.publish_word(np.uint64(engines[1].control + steps.PROCESS), np.uint64(1 << 30))  # no such process

    def reduce(engine: SharedMemory) -> None:
        engine.reads_peers = True
        array = np.ones(DIRECT_BYTES // 4, np.float32)
        engine.all_reduce(order(1, algorithm="direct"), area(array), area(array), _SUM)

    for error in in_both_ranks(engines, reduce):
        assert isinstance(error, RankLostError), repr(error)
        assert error.ranks == (7,)
        assert "cannot read the memory of rank 7" in str(error)


def test_a_departed_rank_is_named(engines: list[SharedMemory]) -> None:
    engines[1].close()
    with pytest.raises(RankLostError, match="rank 7 left the group"):
        engines[0].barrier(order(1))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MismatchError("they differ"), MismatchError),
        (RankLostError("gone", (3, 4)), RankLostError),
        (CollectiveError("odd"), CollectiveError),
        (KeyboardInterrupt(), CollectiveError),
    ],
)
def test_a_transmitted_error_keeps_kind_text_and_ranks(error: BaseException, kind: type[CollectiveError]) -> None:
    raised = Abort.of(error).error("g")
    assert type(raised) is kind
    assert str(raised) == str(error)
    assert getattr(raised, "ranks", ()) == getattr(error, "ranks", ())
