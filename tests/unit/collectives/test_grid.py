"""Grids: positions of ranks, and ghost cells compared with a padded global array. Ranks are threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest
from tests.waiting import in_threads

from paceline.collectives import Grid, Group, MemoryStore, dims_create, init, join, split_evenly
from paceline.errors import GroupClosedError, MismatchError, UsageError

_T = TypeVar("_T")
Array = np.ndarray[Any, Any]


def run_ranks(size: int, work: Callable[[Group], _T]) -> list[_T]:
    """Return the results of `work` on every rank of a new group."""
    store = MemoryStore()

    def run(rank: int) -> _T:
        with join(store, rank, size, token="a token for tests", timeout=timedelta(seconds=20)) as group:
            result = work(group)
            group.barrier()
        return result

    return in_threads(*(partial(run, rank) for rank in range(size)))


# shapes and slices: functions without communication


@pytest.mark.parametrize(
    ("size", "shape", "expected"),
    [
        (6, (0, 0), (3, 2)),  # the four examples of MPI 4.1, 8.5.2
        (7, (0, 0), (7, 1)),
        (6, (0, 3, 0), (2, 3, 1)),
        (1, (0, 0), (1, 1)),
        (4, (0, 0), (2, 2)),
        (12, (0, 0, 0), (3, 2, 2)),
        (16, (0, 0, 0), (4, 2, 2)),
        (64, (0, 0, 0), (4, 4, 4)),
        (72, (0, 0), (9, 8)),  # a greedy split makes 12 x 6
        (60, (0, 0, 0), (5, 4, 3)),
        (24, (2, 0, 0), (2, 4, 3)),
        (8, (0,), (8,)),
        (6, (3, 2), (3, 2)),
        (1000, (0, 0, 0, 0), (8, 5, 5, 5)),
    ],
)
def test_dims_create(size: int, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert dims_create(size, shape) == expected


@pytest.mark.parametrize("num_axes", [1, 2, 3])
@pytest.mark.parametrize("size", [*range(1, 49), 97, 210, 256])
def test_dims_create_returns_the_best_of_all_shapes(size: int, num_axes: int) -> None:
    divisors = [n for n in range(size, 0, -1) if size % n == 0]
    every = itertools.combinations_with_replacement(divisors, num_axes)
    assert dims_create(size, [0] * num_axes) == min(shape for shape in every if np.prod(shape) == size)


@pytest.mark.parametrize(
    ("size", "shape", "message"),
    [
        (7, (0, 3, 0), r"\[0, 3, 0\] needs a multiple of 3 ranks, got 7"),
        (6, (2, 2), r"\[2, 2\] needs 4 ranks, got 6"),
        (2, (4,), "needs 4 ranks, got 2"),
        (4, (-2, -2), "negative"),
        (1, (), "at least one axis"),
        (0, (0,), "got 0 ranks"),
    ],
)
def test_invalid_dims(size: int, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        dims_create(size, shape)


def test_split_evenly() -> None:
    assert split_evenly(10, 3) == [slice(0, 4), slice(4, 7), slice(7, 10)]
    assert split_evenly(2, 3) == [slice(0, 1), slice(1, 2), slice(2, 2)]
    for n, parts in itertools.product(range(20), range(1, 8)):
        lengths = [part.stop - part.start for part in split_evenly(n, parts)]
        assert [i for part in split_evenly(n, parts) for i in range(n)[part]] == list(range(n))
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] - lengths[-1] <= 1
    with pytest.raises(UsageError, match="0 parts"):
        split_evenly(3, 0)


# the position of each rank


def test_a_grid_numbers_ranks_row_by_row() -> None:
    def inspect_grid(group: Group) -> tuple[Any, ...]:
        grid = Grid(group, (2, 0), periodic=(False, True))
        assert grid.shape == (2, 3)
        assert grid.periodic == (False, True)
        assert [grid.rank_of(grid.coordinates_of(rank)) for rank in range(6)] == list(range(6))
        assert grid.rank_of((1, -1)) == grid.rank_of((1, 5)) == 5
        with pytest.raises(UsageError, match=r"\[2, 0\].*\[2, 3\]"):
            grid.rank_of((2, 0))
        return grid.coordinates, grid.shift(0), grid.shift(1), grid.neighbour(1, 2)

    assert run_ranks(6, inspect_grid) == [
        ((0, 0), (None, 3), (2, 1), 2),
        ((0, 1), (None, 4), (0, 2), 0),
        ((0, 2), (None, 5), (1, 0), 1),
        ((1, 0), (0, None), (5, 4), 5),
        ((1, 1), (1, None), (3, 5), 3),
        ((1, 2), (2, None), (4, 3), 4),
    ]


def test_local_slices_cover_the_global_array() -> None:
    def inspect_grid(group: Group) -> tuple[slice, ...]:
        grid = Grid(group)
        assert grid.shape == (2, 2)
        assert grid.local_slice((5, 7, 3), rank=3) == (slice(3, 5), slice(4, 7), slice(0, 3))
        return grid.local_slice((5, 7, 3))

    owned = np.zeros((5, 7, 3), int)
    for part in run_ranks(4, inspect_grid):
        owned[part] += 1
    assert (owned == 1).all()


@pytest.fixture(scope="module")
def alone() -> Iterator[Group]:
    with init(rank=0, world_size=1) as group:
        yield group


def test_a_grid_rejects_invalid_arguments(alone: Group) -> None:
    grid = Grid(alone)
    read_only = np.zeros((3, 3))
    read_only.flags.writeable = False
    refusals: list[tuple[Callable[[], object], str]] = [
        (lambda: Grid(alone, (2, 1)), r"\[2, 1\] needs 2 ranks, got 1"),
        (lambda: Grid(alone, periodic=[True]), "periodic for 1 axes"),
        (lambda: grid.neighbour(2, 1), "axis 2"),
        (lambda: grid.coordinates_of(1), "rank 1"),
        (lambda: grid.rank_of((0,)), "one for each axis"),
        (lambda: grid.local_slice((3,)), "at least 2 axes"),
        (lambda: grid.exchange_halos(np.zeros(9)), "at least 2 axes"),
        (lambda: grid.exchange_halos(np.zeros((3, 3)), 0), "width 0"),
        (lambda: grid.exchange_halos(np.zeros((6, 5)), 2), r"\[2, 1\] own cells, expected at least 2"),
        (lambda: grid.exchange_halos([[0.0]]), "list"),  # type: ignore[arg-type]
        (lambda: grid.exchange_halos(read_only), "read-only"),
        (lambda: Grid(alone, periodic=True).exchange_halos(np.full((3, 3), None)), "dtype object"),
        (lambda: grid.neighbour_all_to_all(np.zeros(3)), "expected 4 rows"),
        (lambda: grid.neighbour_all_to_all(np.zeros(4), out=np.zeros(4, int)), "out of int64"),
    ]
    for refused, message in refusals:
        with pytest.raises(UsageError, match=message):
            refused()


# halos


def padded(whole: Array, periodic: Sequence[bool], width: int) -> Array:
    """Return the global array with ghost layers: the opposite side on periodic axes, -1 on other axes."""
    for axis, wraps in enumerate(periodic):
        widths = [(width, width) if other == axis else (0, 0) for other in range(whole.ndim)]
        whole = np.pad(whole, widths, mode="wrap") if wraps else np.pad(whole, widths, constant_values=-1)
    return whole


def expected_block(grid: Grid, whole: Array, width: int, corners: bool, empty: Array) -> Array:
    """Return this rank's expected block after an exchange, given its block before the exchange (`empty`)."""
    axes = len(grid.shape)
    own = grid.local_slice(whole.shape)
    around = (*(slice(part.start, part.stop + 2 * width) for part in own[:axes]), *own[axes:])
    full = padded(whole, grid.periodic, width)[around]
    places = np.indices(full.shape)[:axes]
    lengths = np.array(full.shape[:axes]).reshape(-1, *[1] * full.ndim)
    num_sides = ((places < width) | (places >= lengths - width)).sum(axis=0)
    return np.where((full != -1) & (corners | (num_sides < 2)), full, empty)


CASES = [
    # ranks' grid, periodic, whole array, width
    ((3,), (False,), (10,), 1),
    ((3,), (True,), (10,), 2),
    ((2,), (True,), (5, 3), 1),  # both neighbours are the same rank
    ((1,), (True,), (4,), 2),  # the rank is its own neighbour
    ((1,), (True,), (4,), 4),
    ((2, 2), (False, False), (7, 5), 1),
    ((2, 2), (True, True), (7, 5), 2),
    ((2, 3), (False, True), (4, 11), 1),
    ((3, 2), (True, False), (9, 8, 2), 2),
    ((1, 3), (True, False), (3, 9), 3),
    ((2, 2, 2), (False, True, False), (5, 4, 6), 1),
    ((2, 1, 2), (True, True, False), (6, 3, 5), 2),
]


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "{}-{}-{}-{}".format(*case).replace(" ", ""))
def test_every_ghost_cell(case: tuple[Any, ...], corners: bool) -> None:
    shape, periodic, full_shape, width = case

    def exchange(group: Group) -> None:
        grid = Grid(group, shape, periodic=periodic)
        own = grid.local_slice(full_shape)
        lengths = [part.stop - part.start for part in own]
        ghosted = [length + 2 * width if axis < len(shape) else length for axis, length in enumerate(lengths)]
        inner = tuple(slice(width, width + n) if axis < len(shape) else slice(None) for axis, n in enumerate(lengths))
        for repeat, order in enumerate("CFC"):  # the third array has the buffers of the first one
            whole = np.arange(np.prod(full_shape), dtype=np.float64).reshape(full_shape) + 1000 * repeat
            block = np.full(ghosted, -7.0, order=order)  # type: ignore[call-overload]
            block[inner] = whole[own]
            expected = expected_block(grid, whole, width, corners, block)
            grid.exchange_halos(block, width, corners=corners)
            np.testing.assert_array_equal(block, expected)

    run_ranks(int(np.prod(shape)), exchange)


@pytest.mark.parametrize("dtype", ["float32", "int16", "bool", "complex128", ">f8"])
def test_halos_of_other_dtypes(dtype: str) -> None:
    def exchange(group: Group) -> None:
        grid = Grid(group, (2, 1), periodic=(True, False))
        whole = (np.arange(24).reshape(6, 4) % 7).astype(dtype)
        whole = whole * np.array(1 + 2j, dtype) if dtype == "complex128" else whole
        block = np.zeros((5, 6), dtype)
        block[1:-1, 1:-1] = whole[grid.local_slice(whole.shape)]
        grid.exchange_halos(block)
        start = 3 * group.rank
        np.testing.assert_array_equal(block[:, 1:-1], np.take(whole, range(start - 1, start + 4), axis=0, mode="wrap"))
        assert not block[:, [0, -1]].any()

    run_ranks(2, exchange)


def test_a_block_may_be_a_view_of_a_larger_array() -> None:
    def exchange(group: Group) -> None:
        whole = np.zeros((6, 10))
        block = whole[1:5, 2:8:2]
        block[1:-1, 1:-1] = group.rank + 1
        Grid(group, (2, 1)).exchange_halos(block)
        assert whole.sum() == 2 * (group.rank + 1) + (2 - group.rank)
        assert whole[4 - 3 * group.rank, 4] == 2 - group.rank

    run_ranks(2, exchange)


def test_exchanges_are_not_mixed_with_other_messages_of_fast_ranks() -> None:
    def exchange(group: Group) -> None:
        grid = Grid(group, periodic=True)
        block = np.zeros((3, 3))
        lower, higher = grid.shift(0)
        for number in range(200):
            block[1, 1] = 10 * number + group.rank
            ticket = group.send_async(block[1, 1:2], higher or 0)
            grid.exchange_halos(block, corners=bool(number % 3))
            assert block[0, 1] == 10 * number + (lower or 0)
            assert block[2, 1] == 10 * number + (higher or 0)
            received = np.zeros(1)
            group.recv(received, lower)
            ticket.wait()
            assert received[0] == block[0, 1]

    run_ranks(4, exchange)


def test_blocks_of_different_sizes_are_a_mismatch() -> None:
    def exchange(group: Group) -> None:
        grid = Grid(group, (2, 1))
        block = np.zeros((4, 5 + group.rank))
        with pytest.raises(MismatchError, match=r"float64\[[34]\]"):
            grid.exchange_halos(block)
        with pytest.raises(GroupClosedError, match=r"earlier one failed|a message failed"):
            grid.exchange_halos(block)
        done.append(group.rank)

    done: list[int] = []
    with pytest.raises(GroupClosedError, match="a message failed"):  # raised by the barrier at the end of run_ranks
        run_ranks(2, exchange)
    assert sorted(done) == [0, 1]


def test_errors_before_sending_leave_the_group_usable() -> None:
    def exchange(group: Group) -> None:
        grid = Grid(group, (2, 1))
        for bad in (np.zeros((2, 3)), np.full((3, 3), None)):
            with pytest.raises(UsageError):
                grid.exchange_halos(bad)
        block = np.full((3, 3), group.rank)
        grid.exchange_halos(block)
        assert block[2 - 2 * group.rank, 1] == 1 - group.rank

    run_ranks(2, exchange)


# collectives among neighbours


def test_neighbour_all_to_all() -> None:
    def exchange(group: Group) -> None:
        grid = Grid(group, (2, 3), periodic=(False, True))
        rows = np.array([[group.rank, 0], [group.rank, 1], [group.rank, 2], [group.rank, 3]])
        neighbours = [grid.neighbour(axis, step) for axis in (0, 1) for step in (-1, 1)]
        expected = [[0, 0] if next_row is None else [next_row, row ^ 1] for row, next_row in enumerate(neighbours)]
        assert grid.neighbour_all_to_all(rows).tolist() == expected
        out = np.full((4, 2), -1)
        assert grid.neighbour_all_to_all(rows, out=out) is out
        assert [row.tolist() for row in out] == [
            [-1, -1] if next_row is None else row for row, next_row in zip(expected, neighbours, strict=True)
        ]

    run_ranks(6, exchange)


def test_neighbour_all_gather() -> None:
    def exchange(group: Group) -> None:
        grid = Grid(group, (3,), periodic=True)
        gathered = grid.neighbour_all_gather(np.full((2, 2), group.rank))
        assert gathered[:, 1, 1].tolist() == [(group.rank - 1) % 3, (group.rank + 1) % 3]

    run_ranks(3, exchange)


def test_a_grid_of_a_subgroup() -> None:
    def exchange(group: Group) -> list[int] | None:
        chosen = group.subgroup([2, 0])
        if chosen is None:
            return None
        with chosen:
            return [int(rank) for rank in Grid(chosen, (2,)).neighbour_all_gather(np.array(group.rank))]

    assert run_ranks(3, exchange) == [[2, 0], None, [0, 0]]
