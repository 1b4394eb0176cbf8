"""The executor moves the right bytes: real algorithms, odd sizes, partial sends and receives, overlapping memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.collectives.calls import CollectiveCall
from paceline.collectives.network.blocks import Blocks
from paceline.collectives.network.executor import ScheduleExecutor
from paceline.collectives.network.receiving import Combine
from paceline.collectives.schedules.base import Copy, Receive, Schedule, Send
from paceline.collectives.schedules.pairwise import all_to_all
from paceline.collectives.schedules.recursive_doubling import all_reduce as recursive_doubling
from paceline.collectives.schedules.registry import ALGORITHMS

from .meshes import in_ranks, open_meshes

Array = NDArray[Any]


def adding(dtype: Any) -> Combine:
    def add(target: memoryview, incoming: memoryview, _: bool) -> None:
        array = np.frombuffer(target, dtype)
        array += np.frombuffer(incoming, dtype)

    return add


def bytes_of(array: Array) -> memoryview:
    return array.view(np.uint8).data


def run_ranks(
    schedules: list[Schedule],
    blocks: Callable[[int], Blocks],
    *,
    dtype: Any = np.float32,
    num_calls: int = 1,
    buffer_bytes: int | None = None,
    lazy: bool = False,
) -> list[ScheduleExecutor]:
    size = len(schedules)
    with open_meshes(size, buffer_bytes=buffer_bytes, lazy=lazy) as meshes:
        executors = [ScheduleExecutor(links, group="world") for links in meshes]
        item_bytes = np.dtype(dtype).itemsize

        def run(rank: int) -> None:
            own_blocks = blocks(rank)
            for sequence in range(1, num_calls + 1):
                executors[rank].run(
                    schedules[rank],
                    own_blocks,
                    call=CollectiveCall("all_reduce", str(np.dtype(dtype)), (7,), "sum"),
                    sequence=sequence,
                    combine=adding(dtype),
                    item_bytes=item_bytes,
                    timeout_s=60,
                )

        assert in_ranks(run, range(size)) == dict.fromkeys(range(size))
    return executors


def integer_arrays(size: int, num_items: int, dtype: Any) -> list[Array]:
    rng = np.random.default_rng(size * num_items + 1)
    return [rng.integers(-1000, 1000, num_items).astype(dtype) for _ in range(size)]


ALL_REDUCES = ["ring", "recursive-doubling", "halving-doubling", "binomial-tree", "double-binary-tree", "central"]


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("num_items", [0, 1, 3, 1000, 100_003])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", ALL_REDUCES)
def test_all_reduce_is_exact_at_every_size(name: str, size: int, num_items: int, dtype: Any) -> None:
    algorithm = ALGORITHMS["all_reduce"][name]
    schedules = [algorithm.schedule(rank, size, pieces=3) for rank in range(size)]
    arrays = integer_arrays(size, num_items, dtype)
    expected = np.sum(arrays, axis=0)
    run_ranks(
        schedules,
        lambda rank: Blocks.even(bytes_of(arrays[rank]), schedules[rank].num_blocks, np.dtype(dtype).itemsize),
        dtype=dtype,
    )
    for array in arrays:
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("name", ["ring", "recursive-doubling", "central"])
def test_large_vectors_go_through_tiny_buffers(name: str) -> None:
    size, num_items = 3, 1 << 21
    schedules = [ALGORITHMS["all_reduce"][name].schedule(rank, size, pieces=4) for rank in range(size)]
    arrays = integer_arrays(size, num_items, np.float32)
    expected = np.sum(arrays, axis=0)
    run_ranks(
        schedules, lambda rank: Blocks.even(bytes_of(arrays[rank]), schedules[rank].num_blocks, 4), buffer_bytes=4096
    )
    for array in arrays:
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("scale", [0, 1, 5000])
def test_all_to_all_with_uneven_and_empty_blocks(size: int, scale: int, lazy: bool) -> None:
    # Rank s sends (s + 2d) % 4 * scale items to rank d. This number may be 0.
    counts = [[(source + 2 * target) % 4 * scale for target in range(size)] for source in range(size)]
    inputs = [
        np.concatenate([np.full(count, 100 * source + target, np.float32) for target, count in enumerate(row)])
        for source, row in enumerate(counts)
    ]
    outputs = [np.zeros(sum(row[target] for row in counts), np.float32) for target in range(size)]
    schedules = [all_to_all(rank, size) for rank in range(size)]

    def blocks(rank: int) -> Blocks:
        return Blocks(
            [
                (bytes_of(inputs[rank]), [4 * count for count in counts[rank]]),
                (bytes_of(outputs[rank]), [4 * row[rank] for row in counts]),
                (bytes_of(np.zeros(0, np.float32)), [0] * (schedules[rank].num_blocks - 2 * size)),
            ]
        )

    run_ranks(schedules, blocks, lazy=lazy)
    for target, output in enumerate(outputs):
        expected = [np.full(counts[source][target], 100 * source + target, np.float32) for source in range(size)]
        np.testing.assert_array_equal(output, np.concatenate(expected))


def test_a_round_sends_the_values_of_its_start() -> None:
    # Each sent block is also written in the same round: blocks 0 and 1 by additions, and block 2 by a copy.
    num_items = 300_000
    arrays = [np.repeat([1.0 + rank, 10.0 + rank, 100.0 + rank], num_items) for rank in (0, 1)]
    actions = [
        (
            Receive(1 - rank, ((1, 2), (0, 1), (3, 4)), reduce=True),
            Send(1 - rank, ((0, 3),)),
            Copy(((0, 1),), ((2, 3),)),
        )
        for rank in (0, 1)
    ]
    thirds = [np.zeros(num_items) for _ in (0, 1)]
    run_ranks(
        [Schedule(4, (one,)) for one in actions],
        lambda rank: Blocks([(bytes_of(arrays[rank]), [8 * num_items] * 3), (bytes_of(thirds[rank]), [8 * num_items])]),
        dtype=np.float64,
        buffer_bytes=4096,
    )
    for rank, other in ((0, 1), (1, 0)):
        first, second, third = (arrays[rank][i * num_items : (i + 1) * num_items] for i in range(3))
        np.testing.assert_array_equal(first, 1.0 + rank + 10.0 + other)
        np.testing.assert_array_equal(second, 10.0 + rank + 1.0 + other)
        np.testing.assert_array_equal(third, 1.0 + rank)
        np.testing.assert_array_equal(thirds[rank], 100.0 + other)


@pytest.mark.parametrize("num_items", [1, 100_000])
def test_blocks_are_swapped_by_copies(num_items: int) -> None:
    array = np.concatenate([np.full(num_items, 1.0), np.full(num_items, 2.0), np.full(num_items, 3.0)])
    swap = Schedule(3, ((Copy(((0, 1),), ((1, 2),)), Copy(((1, 3),), ((2, 3), (0, 1)))),))
    run_ranks([swap], lambda _: Blocks.even(bytes_of(array), 3, 8), dtype=np.float64)
    assert [array[0], array[num_items], array[2 * num_items]] == [3.0, 1.0, 2.0]


@pytest.mark.parametrize("num_items", [5, 200_000])
def test_sums_into_one_block_are_computed_in_the_order_of_the_actions(num_items: int) -> None:
    size = 5
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(num_items).astype(np.float32) * 10.0**rank for rank in range(size)]
    whole = ((0, 1),)
    expected = arrays[0].copy()
    for rank in (3, 1, 4, 2):
        expected += arrays[rank]
    schedules = [Schedule(1, (tuple(Receive(rank, whole, reduce=True) for rank in (3, 1, 4, 2)),))]
    schedules += [Schedule(1, ((Send(0, whole),),)) for _ in range(1, size)]
    run_ranks(schedules, lambda rank: Blocks.even(bytes_of(arrays[rank]), 1, 4))
    np.testing.assert_array_equal(arrays[0], expected)


def test_several_messages_to_one_peer_arrive_in_order() -> None:
    arrays = [np.arange(6, dtype=np.float32) + 10 * rank for rank in (0, 1)]
    spans = [((3, 6),), ((1, 2), (0, 1)), ((2, 3),)]
    schedules = [
        Schedule(6, (tuple(Send(1, span) for span in spans),)),
        Schedule(6, (tuple(Receive(0, span) for span in [((0, 3),), ((3, 4), (4, 5)), ((5, 6),)]),)),
    ]
    run_ranks(schedules, lambda rank: Blocks.even(bytes_of(arrays[rank]), 6, 4))
    np.testing.assert_array_equal(arrays[1], [3, 4, 5, 1, 0, 2])


def test_many_calls_use_the_same_links_and_leave_no_state() -> None:
    size, num_calls = 3, 50
    arrays = [np.full(1, rank + 1, np.float64) for rank in range(size)]
    schedules = [recursive_doubling(rank, size) for rank in range(size)]
    executors = run_ranks(
        schedules,
        lambda rank: Blocks.even(bytes_of(arrays[rank]), schedules[rank].num_blocks, 8),
        dtype=np.float64,
        num_calls=num_calls,
    )
    np.testing.assert_array_equal(np.concatenate(arrays), [6.0 * 3.0 ** (num_calls - 1)] * size)
    status = executors[0].status()
    assert (status.sequence, status.call, status.waiting_for) == (num_calls, None, ())


def test_empty_messages_are_exchanged() -> None:
    size = 5
    schedules = [ALGORITHMS["barrier"]["dissemination"].schedule(rank, size) for rank in range(size)]
    run_ranks(schedules, lambda _: Blocks([]), num_calls=100)


def test_even_blocks_differ_by_at_most_one_item() -> None:
    blocks = Blocks.even(memoryview(bytearray(11 * 4)), 4, 4)
    assert [blocks.views(((block, block + 1),))[0].nbytes for block in range(4)] == [12, 12, 12, 8]
    with pytest.raises(ValueError, match="whole items"):
        Blocks.even(memoryview(bytearray(10)), 2, 4)


def test_adjacent_blocks_of_one_part_are_merged_into_one_view() -> None:
    first, second = bytearray(b"abcdef"), bytearray(b"ghij")
    blocks = Blocks([(memoryview(first), [1, 2, 0, 3]), (memoryview(second), [2, 2])])
    assert len(blocks) == 6
    assert [bytes(view) for view in blocks.views(((0, 1), (1, 3), (3, 5)))] == [b"abcdef", b"gh"]
    assert [bytes(view) for view in blocks.views(((5, 6), (0, 2)))] == [b"ij", b"abc"]
    assert blocks.views(((2, 3),)) == []
