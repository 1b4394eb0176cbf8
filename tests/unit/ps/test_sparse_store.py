"""A table's rows equal a dictionary: every key, every layout, growth, erasure, export."""

from __future__ import annotations

import weakref
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.random_examples import num_examples
from tests.reference import kernels as reference
from tests.reference.kernel_cases import random_keys

from paceline.errors import UsageError
from paceline.kernels import index, sparse
from paceline.kernels.hashing import mix
from paceline.protocol.placement import NUM_BUCKETS
from paceline.tables.initializers import Constant
from paceline.tables.memory.blocks import RowMemory
from paceline.tables.memory.pages import Pages
from paceline.tables.rules import FTRL, SGD, Adagrad, Adam, Momentum, UpdateRule
from paceline.tables.sparse_store import SparseStore

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # without the JIT
compiled_only = pytest.mark.skipif(numba.config.DISABLE_JIT, reason="too slow")  # type: ignore[attr-defined]

Keys = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]

# Rows of 1, 2 and 3 words are stored in the index (5, 4, 3 entries in a line), and larger rows outside. Adam's rows
# have a step count.
LAYOUTS: list[tuple[int, UpdateRule]] = [
    (1, SGD(lr=1.0)),
    (1, Momentum(lr=1.0, momentum=0.0)),
    (1, FTRL()),
    (1, Adam(lr=0.1)),
    (16, Adagrad(lr=0.1)),
]
SAME_SIZES: list[tuple[int, UpdateRule]] = [
    (3, SGD(lr=1.0)),
    (1, Adagrad(lr=0.1)),
    (1, Adagrad(lr=0.1, lr_decay=0.1)),
]
"""Layouts whose rows have as many words as the rows of other layouts."""
layouts = pytest.mark.parametrize(
    ("dim", "rule"), [*LAYOUTS, *(pytest.param(*layout, marks=pytest.mark.thorough) for layout in SAME_SIZES)]
)
MAX_KEY = 2**64 - 1


def crafted(bucket: int, count: int, line: int = 0, low_bits: int = 0) -> Keys:
    """Return keys whose hashes share bucket and home line; `line` is a 32-bit fraction of the bucket's lines."""
    hashes = (bucket << 55) | (line << 23) | np.arange(low_bits, low_bits + count, dtype=np.uint64)
    return reference.unmix(hashes.astype(np.uint64))


def pull(store: SparseStore, keys: Keys) -> Floats:
    out = np.empty((len(keys), store.dim), np.float32)
    store.pull(keys, out)
    return out


class Model:
    """A store and a dictionary with the same operations. The value of a row is the last written value."""

    def __init__(self, dim: int, rule: UpdateRule) -> None:
        self.store = SparseStore(dim=dim, rule=rule, initializer=Constant(value=-1.0))
        self.rows: dict[int, Floats] = {}
        self.num_writes = 0

    def write(self, keys: Keys) -> None:
        words = self.store.row_words
        records = (np.arange(len(keys) * words, dtype=np.float32) + self.num_writes).reshape(-1, words)
        self.num_writes += len(keys)
        self.store.write_records(keys, records)
        self.rows.update(zip(keys.tolist(), records, strict=True))

    def push(self, keys: Keys) -> None:
        """Push zeros, which create the absent rows; the tests of the rules check existing rows."""
        absent = np.array([key not in self.rows for key in keys.tolist()], bool)
        new = np.ascontiguousarray(keys[absent])
        self.store.push(new, np.zeros(len(new) * self.store.dim, np.float32))
        for bucket in np.unique(reference.bucket_of(new)).tolist():
            bucket_keys, records = self.store.bucket(bucket)
            for key, record in zip(bucket_keys.tolist(), records, strict=True):
                if key not in self.rows:
                    assert (record[: self.store.dim] == -1).all()
                    self.rows[key] = record

    def erase(self, keys: Keys) -> None:
        num_present = sum(self.rows.pop(key, None) is not None for key in keys.tolist())
        assert self.store.erase(keys) == num_present

    def drop(self, keys: Keys) -> None:
        """Drop the bucket of the first key."""
        for bucket in reference.bucket_of(keys[:1]).tolist():
            self.store.drop_bucket(bucket)
            self.rows = {key: row for key, row in self.rows.items() if reference.bucket_of([key])[0] != bucket}
            assert self.store.counts[bucket] == 0

    def load(self, keys: Keys) -> None:
        """Replace the bucket of the first key by the keys of this bucket."""
        self.drop(keys)
        keys = keys[reference.bucket_of(keys) == reference.bucket_of(keys[:1])] if len(keys) else keys
        words = self.store.row_words
        records = np.full((len(keys), words), self.num_writes + 0.5, np.float32)
        self.store.load_bucket(int(reference.bucket_of(keys)[0]) if len(keys) else 7, keys, records)
        self.rows.update(zip(keys.tolist(), records, strict=True))

    def check(self, absent_keys: Keys) -> None:
        assert len(self.store) == len(self.rows)
        keys = np.array(list(self.rows), np.uint64)
        dim = self.store.dim
        if len(keys):
            expected = np.stack(list(self.rows.values()))
            np.testing.assert_array_equal(pull(self.store, keys), expected[:, :dim])
        absent = absent_keys[[key not in self.rows for key in absent_keys.tolist()]]
        assert (pull(self.store, absent) == -1).all()
        seen = 0
        for bucket_keys, records in self.store.items():
            assert len(bucket_keys)
            assert len(np.unique(reference.bucket_of(bucket_keys))) == 1
            seen += len(bucket_keys)
            for key, record in zip(bucket_keys.tolist(), records, strict=True):
                np.testing.assert_array_equal(record, self.rows[key])
        assert seen == len(self.rows)


def test_buckets_equal_the_buckets_of_placement() -> None:
    assert index.NUM_BUCKETS == NUM_BUCKETS


def test_unmix_is_the_inverse_of_mix() -> None:
    keys = np.concatenate([np.array([0, 1, MAX_KEY], np.uint64), random_keys(np.random.default_rng(0), 1000)])
    np.testing.assert_array_equal(reference.unmix(mix(keys)), keys)
    assert set(reference.bucket_of(crafted(77, 100, line=2**32 - 1)).tolist()) == {77}


# Few distinct keys: many in the same line, many in the last line of a bucket, and the smallest and largest key.
KEY_CHOICES = np.concatenate(
    [
        np.array([0, 1, MAX_KEY], np.uint64),
        crafted(0, 40),
        crafted(0, 90, line=2**32 - 1),
        crafted(511, 90, line=2**32 - 1),
        crafted(511, 30, line=2**31),
        random_keys(np.random.default_rng(1), 50),
    ]
)
KEY_SETS = st.lists(st.integers(0, len(KEY_CHOICES) - 1), max_size=120).map(
    lambda places: KEY_CHOICES[np.array(places, np.int64)]
)


@layouts
@num_examples(40)
@given(steps=st.lists(st.tuples(st.sampled_from(["write", "push", "erase", "drop", "load"]), KEY_SETS), max_size=8))
def test_operations_in_any_order_equal_a_dictionary(dim: int, rule: UpdateRule, steps: list[tuple[str, Keys]]) -> None:
    model = Model(dim, rule)
    for step, keys in steps:
        getattr(model, step)(keys)
    model.check(KEY_CHOICES)


@compiled_only
@layouts
def test_thousands_of_keys(dim: int, rule: UpdateRule) -> None:
    generator = np.random.default_rng(2)
    keys = random_keys(generator, 6_000)
    keys[:2] = 0, MAX_KEY
    model = Model(dim, rule)
    for _ in range(6):
        model.write(generator.choice(keys, 2000))
        model.push(generator.choice(keys, 500))
        model.erase(generator.choice(keys, 1500))
    model.check(keys)
    model.erase(keys)
    assert len(model.store) == 0
    assert not list(model.store.items())


@layouts
@pytest.mark.parametrize("line", [0, 2**31, 2**32 - 1])
def test_keys_crafted_to_share_a_line(dim: int, rule: UpdateRule, line: int) -> None:
    model, keys = Model(dim, rule), crafted(300, 400, line)
    model.write(keys)
    model.check(crafted(300, 20, line, low_bits=1000))
    assert model.store.num_bytes < 400_000  # the tail grows, and the bucket does not grow without limit
    model.erase(keys[::2].copy())
    model.check(keys)
    model.write(keys)
    model.check(keys)


@layouts
def test_a_full_tail_of_a_formerly_larger_bucket(dim: int, rule: UpdateRule) -> None:
    model = Model(dim, rule)
    many, few = crafted(9, 3000, line=2**20), crafted(9, 200, line=2**32 - 1)
    spread = reference.unmix(
        (9 << 55) + np.linspace(0, 2**55 - 1, 3000).astype(np.uint64)  # these keys fill the bucket evenly
    )
    model.write(spread)
    model.erase(spread[:-300].copy())
    model.write(few)
    model.check(many[:50])
    model.write(spread)
    model.check(few)


@layouts
def test_a_dropped_bucket_returns_the_memory(dim: int, rule: UpdateRule) -> None:
    store = SparseStore(dim=dim, rule=rule)
    empty, keys = store.num_bytes, np.concatenate([crafted(3, 300, line=2**29), crafted(0, 300), KEY_CHOICES[:3]])
    for _ in range(3):
        store.write_records(keys, np.ones(len(keys) * store.row_words, np.float32))
        full = store.num_bytes
        assert full > empty + 12 * len(keys)
        store.drop_bucket(3)
        assert store.num_bytes < full - 12 * 300
        for bucket in range(NUM_BUCKETS):
            store.drop_bucket(bucket)
        assert (len(store), store.num_bytes) == (0, empty)
        assert (pull(store, keys) == 0).all()
        assert not list(store.items())


@compiled_only
@layouts
def test_a_loaded_bucket_equals_the_read_bucket(dim: int, rule: UpdateRule, monkeypatch: pytest.MonkeyPatch) -> None:
    store, copy = SparseStore(dim=dim, rule=rule), SparseStore(dim=dim, rule=rule)
    hashes = np.random.default_rng(8).integers(0, 1 << 55, 30_000, dtype=np.uint64) | np.uint64(5 << 55)
    keys = reference.unmix(hashes)
    store.push(keys, np.random.default_rng(9).standard_normal(len(keys) * dim).astype(np.float32))
    copy.push(
        keys[:10_000] ^ np.uint64(1), np.ones(10_000 * dim, np.float32)
    )  # the store has other rows in this bucket and in other buckets
    elsewhere = int(len(copy) - copy.counts[5])
    rehashed = []
    rehash = index.rehash

    def count_and_rehash(*arguments: object) -> object:
        rehashed.append(arguments)
        return rehash(*arguments)

    monkeypatch.setattr(index, "rehash", count_and_rehash)
    copy.load_bucket(5, *store.bucket(5))
    assert len(rehashed) == 1  # room for all keys is reserved in one step
    assert (len(store), len(copy)) == (len(keys), len(keys) + elsewhere)
    np.testing.assert_array_equal(pull(copy, keys), pull(store, keys))
    copy.push(keys, np.ones(len(keys) * dim, np.float32))
    store.push(keys, np.ones(len(keys) * dim, np.float32))
    np.testing.assert_array_equal(pull(copy, keys), pull(store, keys))
    copy.load_bucket(5, keys[:0], np.empty(0, np.float32))
    assert len(copy) == elsewhere


def test_a_repeated_key_is_updated_twice() -> None:
    for dim, rule in LAYOUTS[:1] + SAME_SIZES[:1] + [(16, SGD(lr=1.0))]:
        keys = np.repeat(np.array([0, MAX_KEY, 17, 0, 17], np.uint64), 200)
        store = SparseStore(dim=dim, rule=rule)
        store.push(keys, np.ones(len(keys) * dim, np.float32))
        found = pull(store, np.array([0, MAX_KEY, 17, 5], np.uint64))
        assert found.tolist() == [[-400.0] * dim, [-200.0] * dim, [-400.0] * dim, [0.0] * dim]
        assert len(store) == 3


def test_batches_of_no_keys() -> None:
    for dim, rule in LAYOUTS:
        store, keys, rows = SparseStore(dim=dim, rule=rule), np.empty(0, np.uint64), np.empty(0, np.float32)
        store.push(keys, rows)
        store.pull(keys, rows)
        store.write_records(keys, rows)
        assert store.erase(keys) == len(store) == 0
        assert [len(part) for part in store.bucket(0)] == [0, 0]


@layouts
def test_export_and_import(dim: int, rule: UpdateRule) -> None:
    keys = np.unique(np.concatenate([KEY_CHOICES, random_keys(np.random.default_rng(3), 2000)]))
    grads = np.random.default_rng(4).standard_normal((3, len(keys) * dim)).astype(np.float32)
    store, copy = SparseStore(dim=dim, rule=rule), SparseStore(dim=dim, rule=rule)
    store.push(keys, grads[0])
    store.push(keys, grads[1])
    for bucket_keys, records in store.items():
        assert records.shape == (len(bucket_keys), store.row_words)
        copy.write_records(bucket_keys, records)
    assert len(copy) == len(keys)
    for table in (store, copy):
        table.push(keys, grads[2])  # this depends on the exported state of the rule
    np.testing.assert_array_equal(pull(copy, keys), pull(store, keys))
    whole = np.concatenate([bucket_keys for bucket_keys, _ in store.items()])
    np.testing.assert_array_equal(np.sort(whole), keys)


@compiled_only
@pytest.mark.parametrize(("dim", "rule"), [(1, Adam(lr=0.1)), (16, Adagrad(lr=0.1))])
def test_memory_of_erased_rows_is_reused(dim: int, rule: UpdateRule) -> None:
    store, generator = SparseStore(dim=dim, rule=rule), np.random.default_rng(5)
    keys = random_keys(generator, 20_000)
    store.push(keys, np.ones(len(keys) * dim, np.float32))
    num_bytes, room = store.num_bytes, len(keys) // 2
    for _ in range(10):
        assert store.erase(keys[:room]) == room
        assert (pull(store, keys[:room]) == 0).all()
        keys = np.concatenate([keys[room:], random_keys(generator, room)])
        store.push(keys[-room:], np.ones(room * dim, np.float32))
    assert len(store) == len(keys)
    assert store.num_bytes < 1.3 * num_bytes


@compiled_only
@pytest.mark.parametrize(
    ("dim", "rule", "limit", "num_keys"),
    [
        (1, SGD(lr=0.1), 2.2, 1_000_000),
        pytest.param(1, FTRL(), 2.2, 1_000_000, marks=pytest.mark.thorough),
        (16, Adagrad(lr=0.1), 1.3, 400_000),
    ],
)
def test_bytes_per_row(dim: int, rule: UpdateRule, limit: float, num_keys: int) -> None:
    store, keys = SparseStore(dim=dim, rule=rule), random_keys(np.random.default_rng(6), num_keys)
    bare = 8 + 4 * dim * (1 + rule.num_states)
    for start in range(0, len(keys), 100_000):
        batch = keys[start : start + 100_000]
        store.reserve(batch)
        store.push(batch, np.ones(len(batch) * dim, np.float32))
        per_row = store.num_bytes / len(store)
        assert per_row < limit * bare or start < num_keys - 100_000
    assert len(store) == len(np.unique(keys))
    store.reserve(keys[:100_000])
    assert store.num_bytes / len(store) < limit * bare
    assert (pull(store, keys[::1000].copy()) < 0).all()


def fails(*arguments: object, **options: object) -> None:
    raise MemoryError


class ScarceMemory(RowMemory):
    """Memory that may be refused, so a store reserves memory before a push."""

    def may_refuse(self) -> bool:
        return True


@layouts
@pytest.mark.parametrize("num_old", [0, 3, 5000])
@pytest.mark.parametrize("num_new", [0, 1, 64, 65, 4000])
def test_the_reserved_memory_suffices(
    dim: int, rule: UpdateRule, num_old: int, num_new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(num_old + num_new)
    old, new = random_keys(rng, num_old), random_keys(rng, num_new)
    keys = np.concatenate([old[: num_old // 2], new, new[: num_new // 2]])
    store = SparseStore(dim=dim, rule=rule, memory=ScarceMemory())
    store.push(old, np.ones(num_old * dim, np.float32))
    before = pull(store, keys)
    store.reserve(keys)
    assert len(store) == len(np.unique(old))
    assert pull(store, keys).tobytes() == before.tobytes()
    monkeypatch.setattr(store, "resize", fails)
    store.push(keys, np.ones(len(keys) * dim, np.float32))
    assert len(store) == len(np.unique(np.concatenate([old, new])))


@layouts
def test_existing_rows_need_no_further_memory(dim: int, rule: UpdateRule, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = random_keys(np.random.default_rng(8), 5000)
    store = SparseStore(dim=dim, rule=rule, memory=ScarceMemory())
    store.push(keys, np.ones(5000 * dim, np.float32))
    with monkeypatch.context() as short_of_memory:
        short_of_memory.setattr(store, "resize", fails)
        store.reserve(keys)
        store.reserve(np.concatenate([keys, keys]))
        with pytest.raises(MemoryError):
            store.reserve(random_keys(np.random.default_rng(9), 5000))
    store.reserve(keys)
    monkeypatch.setattr(index, "rehash", fails)
    monkeypatch.setattr(sparse, "count_absent", fails)
    store.reserve(keys)  # a further call does not count or rehash


@layouts
def test_existing_keys_need_no_memory_of_the_new_keys(
    dim: int, rule: UpdateRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory suffices for the absent rows, but not for as many rows as there are keys."""
    old, new = random_keys(np.random.default_rng(10), 20_000), random_keys(np.random.default_rng(11), 100)
    keys = np.concatenate([old[::2], new])
    store, other = (SparseStore(dim=dim, rule=rule, memory=ScarceMemory()) for _ in range(2))
    for table in (store, other):
        table.push(old, np.ones(len(old) * dim, np.float32))
    other.push(new, np.ones(len(new) * dim, np.float32))
    budget = sum(lines.num_bytes for lines in other.lines) + (1 << 14)
    allocate = store.memory.zeros
    allocated: list[weakref.ref[Any]] = []

    def count_bytes() -> int:  # in a separate frame, because the frame of an error keeps its references
        every = [*store.lines, *(reference() for reference in allocated)]
        return sum(memory.num_bytes for memory in {id(block): block for block in every if block is not None}.values())

    def allocate_within_budget(num_bytes: int) -> Any:
        if count_bytes() + num_bytes > budget:
            raise MemoryError
        found = allocate(num_bytes)
        allocated.append(weakref.ref(found))
        return found

    def enlarge(pages: Pages, num_bytes: int) -> None:
        assert num_bytes > pages.num_bytes
        resize(pages, num_bytes)

    resize = Pages.resize
    monkeypatch.setattr(Pages, "resize", enlarge)
    monkeypatch.setattr(store.memory, "zeros", allocate_within_budget)
    before = pull(store, keys)
    store.reserve(keys)
    assert pull(store, keys).tobytes() == before.tobytes()
    store.push(keys, np.ones(len(keys) * dim, np.float32))
    assert len(store) == len(other)


def test_arrays_of_the_wrong_size_are_refused() -> None:
    store, keys = SparseStore(dim=4), np.arange(3, dtype=np.uint64)
    for call in (store.pull, store.push, store.write_records):
        with pytest.raises(UsageError, match=r"11 .* for 3 keys: expected 4"):
            call(keys, np.zeros(11, np.float32))
    with pytest.raises(UsageError, match="contiguous"):
        store.pull(keys, np.zeros((4, 3), np.float32).T)
    assert len(store) == 0


def crafted_keys(count: int, bucket: int = 5) -> Keys:
    """Return keys that the hash function puts into one line of one bucket. The function is invertible."""
    hashes = np.uint64((bucket << 55) | (12345 << 23)) + np.arange(count, dtype=np.uint64)
    return np.asarray(reference.unmix(hashes))


def test_rows_are_not_counted_if_memory_is_never_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "has_room", fails)
    store = SparseStore(dim=1)
    monkeypatch.setattr(store.memory, "may_refuse", lambda: False)
    store.reserve(random_keys(np.random.default_rng(8), 5000))
    monkeypatch.setattr(store.memory, "may_refuse", lambda: True)
    with pytest.raises(MemoryError):
        store.reserve(random_keys(np.random.default_rng(8), 5000))


@pytest.mark.parametrize("dim", [1, 2, 8])
def test_crafted_keys_cost_no_more_than_random_keys(dim: int) -> None:
    """If all keys were in one line, a lookup would visit all keys, which took seconds for 40,000 keys."""
    keys = crafted_keys(20_000)
    store = SparseStore(dim=dim, rule=SGD(lr=1.0))
    store.push(keys, np.ones(dim * len(keys), np.float32))
    assert store.directory[index.SALT + 5] != index.FIRST_SALT
    assert (np.delete(store.directory[index.SALT :], 5) == index.FIRST_SALT).all()
    lines = np.array([index.home_line(store.directory, key) for key in keys])
    assert np.unique(lines, return_counts=True)[1].max() < 1_000  # of 20,000; depends on the random salt
    assert not any(index.is_run_too_long(store.directory, key, store.layout) for key in keys[::50])
    out = np.empty(dim * len(keys), np.float32)
    store.pull(keys, out)
    assert (out == -1).all()
    assert store.erase(keys[::2].copy()) == 10_000
    store.pull(keys, out)
    assert (out.reshape(-1, dim)[::2] == 0).all()
    assert (out.reshape(-1, dim)[1::2] == -1).all()


def test_a_bucket_of_crafted_keys_can_be_moved() -> None:
    keys = crafted_keys(5_000)
    store, other = SparseStore(dim=1), SparseStore(dim=1)
    store.push(keys, np.arange(len(keys), dtype=np.float32))
    moved, records = store.bucket(5)
    other.load_bucket(5, moved, records)
    again, values = other.bucket(5)
    assert dict(zip(again.tolist(), values[:, 0].tolist(), strict=True)) == dict(
        zip(moved.tolist(), records[:, 0].tolist(), strict=True)
    )
    store.drop_bucket(5)
    assert store.directory[index.SALT + 5] == index.FIRST_SALT


def test_tables_with_the_same_pushes_have_the_same_layout() -> None:
    """A bucket gets a random salt only if crafted keys require one. So saved models are the same in every run."""
    keys = np.random.default_rng(1).integers(0, 2**64, 300_000, np.uint64)
    stores = [SparseStore(dim=1) for _ in range(2)]
    for store in stores:
        store.push(keys, np.ones(len(keys), np.float32))
        assert (store.directory[index.SALT :] == index.FIRST_SALT).all()
    for bucket in range(0, 512, 50):
        assert np.array_equal(stores[0].bucket(bucket)[0], stores[1].bucket(bucket)[0])
