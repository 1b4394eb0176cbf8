"""The pushes of an iteration: the counted pushes, their order, and the effect of their sum."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.protocol.buckets import ALL, Buckets, bucket_set
from paceline.ps.messages import TableSpec
from paceline.tables.aggregation import IterationBuffer, apply_sum
from paceline.tables.initializers import Zeros
from paceline.tables.part import Selection, TablePart
from paceline.tables.rules import SGD, Adagrad, UpdateRule
from paceline.tables.settings import to_fields
from paceline.tables.sparse_part import make_part
from paceline.tables.types import Floats

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # without the JIT


def part_of(kind: str, *, update: UpdateRule | None = None, dim: int = 1, size: int = 0) -> TablePart:
    fields = to_fields(SGD(lr=1.0) if update is None else update)
    spec = TableSpec(name="w", kind=kind, dim=dim, size=size, update=fields, initializer=to_fields(Zeros()))
    return make_part(spec, ALL)


def keys(*numbers: int) -> Selection:
    return Selection(np.array(numbers, np.uint64))


def floats(*values: float) -> Floats:
    return np.array(values, np.float32)


def read(part: TablePart, selection: Selection) -> list[float]:
    out = np.empty(part.num_values(selection), np.float32)
    part.pull(selection, out)
    return out.tolist()


def test_pushes_are_sorted_by_rank_and_table() -> None:
    buffer = IterationBuffer(mean=False)
    for worker, rank in ((11, 2), (12, 0), (13, 1)):
        for table in (1, 2):
            buffer.add(5, worker, rank, table, buffer.copy(keys(rank), floats(rank)), 1.0)
    buffer.add(6, 12, 0, 1, buffer.copy(keys(9), floats(9)), 1.0)
    tables, _, factor = buffer.complete(5, (13, 12, 11))
    assert factor == 1.0
    assert {table: [grads[0] for _, grads in pushes] for table, pushes in tables.items()} == {
        1: [0, 1, 2],
        2: [0, 1, 2],
    }
    assert buffer.complete(5, (11, 12, 13)) == ({}, {}, 1.0)
    assert len(buffer.complete(6, (12,))[0][1]) == 1


def test_the_largest_magnitude_of_the_sum_is_bounded() -> None:
    buffer = IterationBuffer(mean=True)
    for worker, table, top in ((11, 1, 3.0), (11, 1, 4.0), (12, 1, 5.0), (12, 2, 6.0), (13, 2, 7.0)):
        buffer.add(0, worker, 0, table, buffer.copy(keys(1), floats(top)), top)
    assert buffer.complete(0, (11, 12)).tops == {1: 12.0, 2: 6.0}  # pushes of workers without a tick are not counted


def test_only_workers_with_a_tick_count_in_the_mean() -> None:
    buffer = IterationBuffer(mean=True)
    buffer.add(0, 11, 0, 1, buffer.copy(keys(1), floats(1)), 1.0)
    buffer.add(0, 12, 1, 1, buffer.copy(keys(1), floats(2)), 1.0)
    tables, _, factor = buffer.complete(0, (11, 13, 14, 15))  # workers 13 to 15 pushed nothing
    assert [grads.tolist() for _, grads in tables[1]] == [[1.0]]
    assert factor == 0.25
    assert buffer.complete(1, ()) == ({}, {}, 1.0)


def test_a_departed_workers_unfinished_pushes_are_dropped() -> None:
    buffer = IterationBuffer(mean=False)
    for iteration in (3, 4, 5):
        buffer.add(iteration, 11, 0, 1, buffer.copy(keys(1), floats(1)), 1.0)
    buffer.forget(11, 4)
    assert [len(buffer.complete(iteration, (11,))[0]) for iteration in (3, 4, 5)] == [1, 0, 0]


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_sums_of_moved_buckets_are_dropped(kind: str) -> None:
    part = part_of(kind, size=512 if kind == "dense" else 0)
    buckets = part.buckets_of(keys(1))
    buffer = IterationBuffer(mean=False)
    for worker, numbers in ((11, range(6)), (12, (1,)), (13, (0, 2))):
        buffer.add(4, worker, worker, 1, buffer.copy(keys(*numbers), floats(*numbers)), 1.0)
    if kind == "dense":
        buffer.add(4, 11, 11, 1, buffer.copy(Selection(None, 0, 3, ALL), floats(7, 8, 9)), 1.0)
    buffer.restrict({1: part}, buckets)
    tables, *_ = buffer.complete(4, (11, 12, 13))
    assert [grads.tolist() for _, grads in tables[1]] == ([[1], [8], [1]] if kind == "dense" else [[1], [1]])
    assert [part.keys_of(selection).tolist() for selection, _ in tables[1]] == [[1]] * len(tables[1])


def test_buffered_pushes_do_not_change_with_the_receive_buffer() -> None:
    buffer = IterationBuffer(mean=False)
    selection, grads = keys(1, 2), floats(1, 2)
    buffer.add(0, 11, 0, 1, buffer.copy(selection, grads), 1.0)
    assert selection.keys is not None
    selection.keys[:] = 7
    grads[:] = 7
    ((kept, values),) = buffer.complete(0, (11,))[0][1]
    assert kept.keys is not None
    assert (kept.keys.tolist(), values.tolist()) == ([1, 2], [1, 2])


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_equal_keys_become_one_gradient(factor: float) -> None:
    part = part_of("sparse", dim=2, update=Adagrad(lr=1.0, initial_accumulator=0.0))
    plain = part_of("sparse", dim=2)
    pushes = [(keys(1, 5), floats(1, 1, 2, 2)), (keys(5), floats(2, 2)), (keys(9, 1), floats(1, 1, 3, 3))]
    for store in (part, plain):
        apply_sum(store, pushes, factor)
    assert read(part, keys(1, 5, 9, 3)) == pytest.approx([-1, -1, -1, -1, -1, -1, 0, 0])  # one step per key
    assert read(plain, keys(1, 5, 9)) == [-4 * factor, -4 * factor, -4 * factor, -4 * factor, -factor, -factor]


@pytest.mark.parametrize(
    "pushes",
    [
        [(Selection(None, 0, 4), floats(1, 1, 1, 1)), (Selection(None, 0, 4), floats(1, 2, 3, 4))],
        [(Selection(None, 0, 4), floats(1, 1, 1, 1)), (Selection(None, 1, 4), floats(2, 3, 4)), (keys(0), floats(1))],
        [(Selection(None, 0, 4), floats(2, 3, 4, 5))],
    ],
    ids=["equal ranges", "ranges and keys", "one range"],
)
def test_ranges_and_keys_of_a_dense_table(pushes: list[tuple[Selection, Floats]]) -> None:
    part = part_of("dense", size=5)
    given = [grads.copy() for _, grads in pushes]
    apply_sum(part, pushes, 1.0)
    assert read(part, Selection(None, 0, 5)) == [-2, -3, -4, -5, 0]
    assert all(np.array_equal(grads, before) for (_, grads), before in zip(pushes, given, strict=True))


def test_the_sum_is_computed_in_the_order_of_the_ranks() -> None:
    """The order changes the result, because (a + b) + c differs from a + (b + c) in floats."""
    a, b, c = 1e8, -1e8, 1.25
    for kind, size in (("sparse", 0), ("dense", 1)):
        part = part_of(kind, size=size)
        apply_sum(part, [(keys(0), floats(value)) for value in (a, b, c)], 1.0)
        assert read(part, keys(0)) == [-1.25]
        part = part_of(kind, size=size)
        apply_sum(part, [(keys(0), floats(value)) for value in (a, c, b)], 1.0)
        assert read(part, keys(0)) == [0.0]


@pytest.mark.parametrize("owned", [ALL, bucket_set(range(0, 512, 3))], ids=["all buckets", "every third bucket"])
@pytest.mark.parametrize("rule", [SGD(lr=0.5), Adagrad(lr=0.5)], ids=["SGD", "Adagrad"])
def test_ranges_of_several_workers_are_summed_in_rank_order(rule: UpdateRule, owned: Buckets) -> None:
    size = 100_000  # larger than a block
    spec = TableSpec(name="w", kind="dense", size=size, update=to_fields(rule), initializer=to_fields(Zeros()))
    part, expected = make_part(spec, owned), make_part(spec, owned)
    generator = np.random.default_rng(1)
    pushes, total = [], []
    for bounds in ((0, 70_001), (70_001, size)):
        selection = Selection(None, *bounds)
        grads = generator.standard_normal((3, part.num_values(selection)), np.float32)
        pushes.append([(selection, grad) for grad in grads])
        total.append((selection, (grads[0] + grads[1] + grads[2]) * np.float32(1 / 3)))
    apply_sum(part, [push[worker] for worker in range(3) for push in reversed(pushes)], 1 / 3)
    for selection, gradient in total:
        expected.push(selection, gradient)
    assert read(part, Selection(None, 0, size)) == read(expected, Selection(None, 0, size))


def test_overlapping_ranges_are_summed_by_element() -> None:
    part = part_of("dense", size=6)
    apply_sum(part, [(Selection(None, 0, 4), floats(1, 1, 1, 1)), (Selection(None, 2, 6), floats(2, 2, 2, 2))], 1.0)
    assert read(part, Selection(None, 0, 6)) == [-1, -1, -3, -3, -2, -2]


def test_equal_ranges_of_other_buckets_are_summed_by_element() -> None:
    """If a server becomes primary of more buckets within an iteration, later pushes of a range have more elements."""
    part = part_of("dense", size=512)
    before, after = Selection(None, 0, 4, 0b0101), Selection(None, 0, 4, 0b1101)
    apply_sum(part, [(before, floats(1, 1)), (after, floats(2, 3, 4))], 1.0)
    assert read(part, Selection(None, 0, 5)) == [-3, 0, -4, -4, 0]


def test_memory_of_an_iteration_is_reused() -> None:
    buffer = IterationBuffer(mean=False)
    selection, grads = Selection(None, 0, 1 << 15), np.ones(1 << 15, np.float32)
    buffer.add(0, 11, 0, 1, buffer.copy(selection, grads), 1.0)
    first = buffer.complete(0, (11,))[0]
    kept = first[1][0][1]
    buffer.add(1, 11, 0, 1, buffer.copy(selection, grads), 1.0)  # before the memory of the first push is free
    buffer.recycle(first)
    buffer.add(2, 11, 0, 1, buffer.copy(selection, 2 * grads), 1.0)
    second = buffer.complete(1, (11,))[0][1][0][1]
    third = buffer.complete(2, (11,))[0][1][0][1]
    assert third is kept
    assert second is not kept
    assert (second[0], third[0]) == (1.0, 2.0)
