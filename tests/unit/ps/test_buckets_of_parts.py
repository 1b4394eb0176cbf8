"""A part of a table gains and loses buckets, and serves requests for some buckets, like a dictionary."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.random_examples import num_examples
from tests.reference import kernels as reference
from tests.reference.kernel_cases import random_keys

from paceline.errors import UsageError
from paceline.protocol.buckets import ALL, Buckets, bucket_set, buckets_in
from paceline.ps.messages import TableSpec
from paceline.tables.bucket_arrays import bucket_bounds
from paceline.tables.initializers import Constant
from paceline.tables.part import Selection, TablePart
from paceline.tables.rules import FTRL, RULES, Adagrad, UpdateRule
from paceline.tables.settings import to_fields
from paceline.tables.sparse_part import make_part

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # without the JIT

Keys = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]

SIZE = 1200  # three elements in a bucket: 400 buckets have elements
START = 0.25
FEW = (0, 1, 2, 5, 6, 99, 399, 400, 511)  # sets of few buckets, so that the sets overlap
EVERY_RULE = [
    rule() if rule is FTRL else rule(lr=0.1)  # type: ignore[call-arg]
    for rule in RULES.values()
    if rule.row_dim is None
]
BUCKET_SETS = st.sets(st.sampled_from(FEW)).map(bucket_set)


def part_of(
    kind: str, buckets: Buckets, *, dim: int = 1, size: int = SIZE, rule: UpdateRule | None = None
) -> TablePart:
    spec = TableSpec(
        name="t",
        kind=kind,
        dim=dim,
        size=size if kind == "dense" else 0,
        update=to_fields(rule or Adagrad(lr=1.0, initial_accumulator=0.5)),
        initializer=to_fields(Constant(value=START)),
    )
    return make_part(spec, buckets)


def keys_of_bucket(kind: str, bucket: int) -> Keys:
    if kind == "dense":
        return np.arange(*bucket_bounds(SIZE, bucket), dtype=np.uint64)
    return reference.unmix((np.uint64(bucket) << np.uint64(55)) + np.arange(3, dtype=np.uint64))


def keys_in(kind: str, buckets: Buckets) -> Keys:
    return np.concatenate([np.empty(0, np.uint64), *(keys_of_bucket(kind, bucket) for bucket in buckets_in(buckets))])


def read(part: TablePart, selection: Selection) -> Floats:
    out = np.empty(part.num_values(selection), np.float32)
    part.pull(selection, out)
    return out


# Buckets that a part gains and loses.

ACTIONS = ("hold", "drop", "push", "load", "load some", "primary")


@pytest.mark.parametrize("kind", ["sparse", "dense"])
@num_examples(150)
@given(
    first=BUCKET_SETS,
    steps=st.lists(st.tuples(st.sampled_from(ACTIONS), BUCKET_SETS, st.integers(1, 9)), max_size=12),
)
def test_changes_in_any_order_equal_a_dictionary(
    kind: str, first: Buckets, steps: list[tuple[str, Buckets, int]]
) -> None:
    part, held, primary = part_of(kind, first), first, first
    fresh: Floats = np.array([START, 0.5], np.float32)
    rows: dict[int, Floats] = dict.fromkeys(keys_in("dense", first).tolist(), fresh) if kind == "dense" else {}

    def forget(buckets: Buckets) -> None:
        for key in keys_in(kind, buckets).tolist():
            rows.pop(key, None)

    for action, buckets, number in steps:
        if action == "hold":
            part.hold(buckets)
            if kind == "dense":
                rows |= dict.fromkeys(keys_in(kind, buckets & ~held).tolist(), fresh)
            held |= buckets
        elif action == "drop":
            part.drop(buckets)
            forget(buckets)
            held, primary = held & ~buckets, primary & ~buckets
        elif action == "push":
            keys = keys_in(kind, buckets & held)
            part.push(Selection(keys), np.full(len(keys), number, np.float32))
            for key in keys.tolist():
                value, total = rows.get(key, fresh)
                total = np.float32(total + number * number)
                rows[key] = np.array([value - np.float32(number) / (np.sqrt(total) + np.float32(1e-10)), total])
        elif action == "primary":
            primary = held & buckets
            part.set_primary(primary)
        else:
            for bucket in buckets_in(buckets):
                keys = keys_of_bucket(kind, bucket)[: 2 if action == "load some" else None]
                records = np.arange(number, number + 2 * len(keys), dtype=np.float32).reshape(-1, 2)
                part.load_bucket(bucket, keys, records)
                forget(1 << bucket)
                if kind == "dense":
                    rows |= dict.fromkeys(keys_of_bucket(kind, bucket).tolist(), fresh)
                rows |= dict(zip(keys.tolist(), records, strict=True))
            held |= buckets
        assert (part.held, part.primary) == (held, primary)

    assert part.num_rows == part.rows_in(ALL) == len(rows)
    assert part.rows_in(0b11) == sum(key in rows for key in keys_in(kind, 0b11).tolist())
    for bucket in buckets_in(held):
        keys, records = part.read_bucket(bucket)
        expected = {key: rows[key] for key in keys_of_bucket(kind, bucket).tolist() if key in rows}
        assert sorted(keys.tolist()) == sorted(expected)
        for key, record in zip(keys.tolist(), records, strict=True):
            np.testing.assert_allclose(record, expected[key], rtol=1e-6)
    every = keys_in(kind, held)
    values = np.array([rows.get(key, fresh)[0] for key in every.tolist()], np.float32)
    np.testing.assert_allclose(read(part, Selection(every)), values, rtol=1e-6)
    if kind == "dense":
        assert part.num_bytes == 8 * len(rows)
        own = keys_in(kind, primary)
        whole = Selection(None, 0, SIZE)
        values = np.array([rows[key][0] for key in own.tolist()], np.float32)
        np.testing.assert_allclose(read(part, whole), values, rtol=1e-6)
        np.testing.assert_array_equal(part.keys_of(whole), own)


@pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize(("kind", "dim"), [("dense", 1), ("sparse", 1), ("sparse", 3)])
@num_examples(10)
@given(bucket=st.sampled_from(FEW[:7]), seed=st.integers(0, 99))
def test_a_read_bucket_is_a_copy(kind: str, dim: int, rule: UpdateRule, bucket: int, seed: int) -> None:
    """The copy waits in the queue of a connection while pushes continue.

    A view would contain these pushes, and the other server would apply them twice.
    """
    part, keys = part_of(kind, ALL, dim=dim, rule=rule), keys_of_bucket(kind, bucket)
    chance = np.random.default_rng(seed)

    def push() -> None:
        part.push(Selection(keys), chance.uniform(0.5, 1.0, len(keys) * dim).astype(np.float32))

    push()
    names, records = part.read_bucket(bucket)
    assert records.flags.c_contiguous
    kept_names, kept_records = names.copy(), records.copy()
    push()
    np.testing.assert_array_equal(names, kept_names)
    np.testing.assert_array_equal(records, kept_records)
    changed = part.read_bucket(bucket)[1]
    assert not np.array_equal(changed, records)
    records[:] = 0  # the caller may write to the copy
    np.testing.assert_array_equal(part.read_bucket(bucket)[1], changed)


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_records_of_another_bucket_are_refused(kind: str) -> None:
    part = part_of(kind, 0b110)
    keys = keys_of_bucket(kind, 1)
    part.push(Selection(keys), np.ones(3, np.float32))
    before = part.read_bucket(1)
    for wrong in (keys_of_bucket(kind, 2), np.concatenate([keys[:2], keys_of_bucket(kind, 2)[:1]])):
        with pytest.raises(UsageError, match=f"records for bucket 1 of {kind} table 't'"):
            part.load_bucket(1, wrong, np.ones((3, 2), np.float32))
    for array, now in zip(before, part.read_bucket(1), strict=True):
        np.testing.assert_array_equal(array, now)


def test_a_dense_part_uses_memory_only_for_owned_buckets() -> None:
    psutil = pytest.importorskip("psutil")
    process = psutil.Process()
    read(part_of("dense", ALL), Selection(np.zeros(1, np.uint64)))  # compile the kernels of the calls below
    size = 512 << 14  # 64 KiB in a bucket and plane, 32 MiB in a plane
    part = part_of("dense", 0, size=size)
    before = process.memory_info().rss
    half = bucket_set(range(0, 512, 2))
    part.hold(half)
    full = process.memory_info().rss - before
    assert part.num_bytes == 32 << 20
    if full < 24 << 20:
        pytest.skip("this system does not count memory that was written")
    assert full < 44 << 20
    for bucket in range(0, 512, 2):
        part.drop(1 << bucket)
    assert part.num_bytes == 0
    assert process.memory_info().rss - before < 8 << 20
    part.hold(1 << 7)
    assert (read(part, Selection(np.arange(7 << 14, 8 << 14, dtype=np.uint64))) == START).all()


# Requests for some of the buckets.


@settings(deadline=None)
@given(seed=st.integers(0, 99), count=st.integers(0, 300), dim=st.sampled_from([1, 3]), chosen=st.integers(0, ALL))
def test_keys_of_a_sparse_table_are_restricted_in_order(seed: int, count: int, dim: int, chosen: Buckets) -> None:
    keys = random_keys(np.random.default_rng(seed), count, distinct=2**40 if seed % 2 else 100)
    check_restricted_keys(part_of("sparse", ALL, dim=dim), keys, reference.bucket_of(keys).astype(np.int64), chosen)


@settings(deadline=None)
@given(keys=st.lists(st.integers(0, SIZE - 1), max_size=200), chosen=st.integers(0, ALL) | BUCKET_SETS)
def test_keys_of_a_dense_table_are_restricted_in_order(keys: list[int], chosen: Buckets) -> None:
    array = np.array(keys, np.uint64)
    check_restricted_keys(part_of("dense", ALL), array, array.astype(np.int64) // 3, chosen)


def check_restricted_keys(part: TablePart, keys: Keys, buckets: npt.NDArray[np.int64], chosen: Buckets) -> None:
    grads = np.arange(len(keys) * part.dim, dtype=np.float32)
    selection = Selection(keys)
    assert part.buckets_of(selection) == bucket_set(buckets)
    restricted, rows = part.restrict(selection, grads, chosen)
    is_chosen = np.array([chosen >> int(bucket) & 1 for bucket in buckets], bool)
    assert restricted.keys is not None
    np.testing.assert_array_equal(restricted.keys, keys[is_chosen])
    np.testing.assert_array_equal(rows, grads.reshape(-1, part.dim)[is_chosen].reshape(-1))
    assert (restricted is selection and rows is grads) == bool(is_chosen.all())


@settings(deadline=None)
@given(
    bounds=st.lists(st.integers(0, SIZE), min_size=2, max_size=2),
    held=st.integers(0, ALL) | BUCKET_SETS,
    own=st.integers(0, ALL),
    chosen=st.lists(st.integers(0, ALL) | BUCKET_SETS, min_size=1, max_size=3),
)
def test_ranges_are_restricted_to_the_elements_of_the_buckets(
    bounds: list[int], held: Buckets, own: Buckets, chosen: list[Buckets]
) -> None:
    part = part_of("dense", held)
    part.set_primary(held & own)
    replica = part_of("dense", held)
    selection = Selection(None, *sorted(bounds))
    grads = np.array([e for e in range(*sorted(bounds)) if held & own & 1 << e // 3], np.float32)
    assert part.num_values(selection) == len(grads)
    for buckets in chosen:
        restricted, rows = part.restrict(selection, grads, buckets)
        expected = [int(e) for e in grads if buckets & 1 << int(e) // 3]
        assert rows.tolist() == expected
        assert part.keys_of(restricted).tolist() == expected
        assert part.buckets_of(restricted) == bucket_set(e // 3 for e in expected)
        assert (restricted is selection and rows is grads) == (len(expected) == len(grads))
        assert replica.num_values(restricted.copy()) == len(expected)  # other buckets of the replica do not count
        selection, grads = restricted, rows  # next, restrict the restricted selection
    replica.push(selection, grads)
    part.push(selection, grads)
    every = Selection(keys_in("dense", held))
    np.testing.assert_array_equal(read(part, every), read(replica, every))


def test_a_range_keeps_the_buckets_of_its_first_use() -> None:
    part = part_of("dense", 0b1111)
    part.set_primary(0b0101)
    counted, kept = Selection(None, 0, SIZE), Selection(None, 0, SIZE)
    assert part.num_values(counted) == 6
    part.set_primary(0b0111)
    assert part.num_values(counted) == 6
    assert part.keys_of(counted.copy()).tolist() == [0, 1, 2, 6, 7, 8]
    assert part.num_values(kept) == 9
    part.drop(0b100)
    for selection in (counted, kept):
        with pytest.raises(UsageError, match=r"range \[0, 1200\) of dense table 't' includes bucket 2, which"):
            part.num_values(selection)
    assert part.num_values(Selection(None, 0, 6, 0b0111)) == 6  # this range has no element of bucket 2
    assert part.num_values(Selection(None, 0, SIZE)) == 6
