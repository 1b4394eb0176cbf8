"""The age of rows in passes equals the age in a dictionary, with growth, erasure and all layouts."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.protocol.buckets import ALL
from paceline.ps.messages import TableSpec
from paceline.tables.bounds import MAX_PASS, MAX_PASSES
from paceline.tables.initializers import Zeros
from paceline.tables.memory.blocks import RowBlock, RowMemory
from paceline.tables.part import Selection
from paceline.tables.rules import FTRL, SGD, Adagrad, UpdateRule
from paceline.tables.settings import to_fields
from paceline.tables.sparse_part import SparsePart

RULES = [
    (1, SGD(lr=0.1)),
    pytest.param(1, FTRL(alpha=0.05), marks=pytest.mark.thorough),
    pytest.param(1, Adagrad(lr=0.1), marks=pytest.mark.thorough),
    (8, Adagrad(lr=0.1)),
]


def part_of(dim: int, rule: UpdateRule) -> SparsePart:
    spec = TableSpec(name="t", kind="sparse", dim=dim, update=to_fields(rule), initializer=to_fields(Zeros()))
    return SparsePart(spec, ALL)


def push(part: SparsePart, keys: np.ndarray) -> None:
    part.push(Selection(keys), np.ones(part.dim * len(keys), np.float32))


def unseen(part: SparsePart, num_passes: int) -> set[int]:
    return {int(key) for bucket in range(512) for key in part.unseen_keys(bucket, num_passes)}


@pytest.mark.parametrize(("dim", "rule"), RULES)
def test_the_age_of_a_row_is_the_age_of_the_last_push(dim: int, rule: UpdateRule) -> None:
    random, last = np.random.default_rng(dim), {}
    part, plain = part_of(dim, rule), part_of(dim, rule)
    every = np.concatenate([[0], random.integers(0, 2**64, 20_000, np.uint64)]).astype(np.uint64)
    for store in (part, plain):
        push(store, every[:6000])
    assert unseen(part, 1) == set()  # no pass is recorded yet
    last.update(dict.fromkeys(every[:6000].tolist(), 3))
    for number in range(4, 12):
        part.begin_pass(number, 3)
        size = 2000 if number < 8 else 400
        keys = np.unique(random.choice(every if number > 5 else every[6000:], size))
        for store in (part, plain):
            push(store, keys)
        last.update(dict.fromkeys(keys.tolist(), number))
        if number % 3 == 0:
            erased = random.choice(np.array(list(last), np.uint64), 300, replace=False)
            assert part.erase(erased) == plain.erase(erased) == 300
            for key in erased.tolist():
                del last[key]
        for passes in (1, 2, 5):
            assert unseen(part, passes) == {key for key, seen in last.items() if number - seen >= passes}
    for bucket in range(512):
        keys, records = part.read_bucket(bucket)
        same, expected = plain.read_bucket(bucket)
        np.testing.assert_array_equal(np.sort(keys), np.sort(same))
        np.testing.assert_array_equal(records[np.argsort(keys)], expected[np.argsort(same)])
    keys, records = plain.read_bucket(7)
    part.load_bucket(7, keys, records)  # loaded rows count as pushed in this pass
    assert len(part.unseen_keys(7, 1)) == 0
    assert unseen(part, MAX_PASSES) == set()


def test_pass_numbers_wrap_around() -> None:
    part = part_of(1, FTRL(alpha=0.05))
    keys = np.arange(3, dtype=np.uint64)  # also key 0, whose row is stored separately
    for number in range(1, 200):
        part.begin_pass(number, 0)
        push(part, keys[: 1 + (number % 61 == 1) * 2])
        expected = (number - 1) % 61
        assert unseen(part, 60) == ({1, 2} if expected == 60 else set())


def test_rows_are_unchanged_if_memory_for_pass_numbers_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    part, keys = part_of(1, Adagrad(lr=0.1)), np.arange(20_000, dtype=np.uint64)
    push(part, keys)
    before = [part.read_bucket(bucket) for bucket in range(512)]
    zeros, num_calls = RowMemory.zeros, iter(range(200))

    def first_zeros(memory: RowMemory, num_bytes: int) -> RowBlock:
        if next(num_calls, None) is None:
            raise MemoryError("full")
        return zeros(memory, num_bytes)

    with monkeypatch.context() as patched:
        patched.setattr(RowMemory, "zeros", first_zeros)
        with pytest.raises(MemoryError, match="full"):
            part.begin_pass(2, 1)
    for bucket, (bucket_keys, records) in enumerate(before):
        np.testing.assert_array_equal(part.read_bucket(bucket)[0], bucket_keys)
        np.testing.assert_array_equal(part.read_bucket(bucket)[1], records)
    part.begin_pass(2, 1)  # memory is available again
    push(part, keys[:5000])
    assert unseen(part, 1) == set(range(5000, 20_000))


def test_the_highest_pass_numbers_are_sent_exactly() -> None:
    part, other, keys = part_of(1, FTRL(alpha=0.05)), part_of(1, FTRL(alpha=0.05)), np.arange(60, dtype=np.uint64)
    for age in reversed(range(60)):
        part.begin_pass(MAX_PASS - age, 1)
        push(part, keys[age : age + 1])
    for bucket in range(512):
        held, records = part.read_bucket(bucket)
        other.load_with_passes(bucket, held, part.with_passes(bucket, held, records))
    for age in range(1, 60):
        assert unseen(other, age) == set(range(age, 60))


@pytest.mark.parametrize(("dim", "rule"), RULES)
def test_rows_keep_their_passes_on_another_server_and_after_a_rollback(dim: int, rule: UpdateRule) -> None:
    every = (np.arange(6001, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    part, other = part_of(dim, rule), part_of(dim, rule)
    last = {int(key): 2 for key in every}
    push(part, every)
    for number in range(3, 8):
        part.begin_pass(number, 2)
        seen = every[:: number + 1].copy()  # kernels are compiled for arrays without gaps
        push(part, seen)
        last.update(dict.fromkeys(seen.tolist(), number))
    expired = every[5:9]
    for bucket in range(512):
        keys, records = part.read_bucket(bucket)
        chosen = np.isin(expired, keys)
        is_expired = np.isin(keys, expired)
        part.erase(expired[chosen])  # erase the rows after they were read
        other.load_with_passes(bucket, keys, part.with_passes(bucket, keys, records))
        np.testing.assert_array_equal(other.read_bucket(bucket)[1].shape, records.shape)
        assert not is_expired.any() or set(keys[is_expired].tolist()) <= unseen(other, MAX_PASSES)
    last.update(dict.fromkeys(expired.tolist(), 7 - MAX_PASSES))
    for passes in (1, 2, 5):
        assert unseen(other, passes) == {key for key, seen in last.items() if 7 - seen >= passes}
    other.begin_pass(5, 4)
    for passes in (1, 2, 3):
        assert unseen(other, passes) == {key for key, seen in last.items() if 5 - min(seen, 5) >= passes}
    records = part.read_bucket(3)[1]
    assert part_of(dim, rule).with_passes(3, every[:0], records) is records


def test_filled_rows_keep_their_passes_in_any_order_of_messages() -> None:
    """The receiver may start its pass before or after it is filled."""
    keys = np.arange(64, dtype=np.uint64)
    for order in (("load", "begin"), ("begin", "load")):
        sender, receiver = part_of(1, Adagrad(lr=0.1)), part_of(1, Adagrad(lr=0.1))
        push(sender, keys)
        for step in order:
            if step == "begin":
                receiver.begin_pass(3, 1)
            else:
                for bucket in range(512):
                    found, records = sender.read_bucket(bucket)
                    records = sender.with_passes(bucket, found, records)
                    receiver.load_with_passes(bucket, found, records, receiver.rows_of)
        assert unseen(receiver, 2) == set(keys.tolist())
        assert unseen(receiver, 3) == set()


def test_a_receiver_uses_the_newest_pass_of_its_buckets() -> None:
    sender, receiver = part_of(1, Adagrad(lr=0.1)), part_of(1, Adagrad(lr=0.1))
    buckets = [sender.buckets_of(Selection(np.array([key], np.uint64))).bit_length() - 1 for key in range(2)]
    for number, key in enumerate(sorted(range(2), key=lambda key: buckets[key]), start=4):
        sender.begin_pass(number, 0)
        push(sender, np.array([key], np.uint64))
    for bucket in range(512):
        found, records = sender.read_bucket(bucket)
        receiver.load_with_passes(bucket, found, sender.with_passes(bucket, found, records))
    assert receiver.pass_number == 5
    assert unseen(receiver, 1) == unseen(sender, 1)
    assert unseen(receiver, 2) == set()
