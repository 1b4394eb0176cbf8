"""The state of a table at one moment is read while the table changes. Changes since a snapshot are recorded."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.protocol.buckets import ALL, buckets_in
from paceline.ps import SGD, Adagrad, Uniform, to_fields
from paceline.ps.messages import TableSpec
from paceline.tables.part import Selection
from paceline.tables.server_tables import ServerTable
from paceline.tables.snapshot_part import Moment, WatchedPart, watch
from paceline.tables.sparse_part import make_part
from paceline.tables.types import Floats, Keys

SIZE = 3_000


def table_of(kind: str, dim: int) -> ServerTable:
    spec = TableSpec(
        name=kind,
        kind=kind,
        dim=dim,
        size=SIZE if kind == "dense" else 0,
        update=to_fields(Adagrad(lr=0.1) if dim != 2 else SGD(lr=0.1)),
        initializer=to_fields(Uniform(low=-1, high=1)),
        seed=4,
    )
    return ServerTable(spec, make_part(spec, ALL))


def everything(part: WatchedPart) -> dict[int, bytes]:
    found = {}
    for bucket in range(512):
        for key, record in zip(*part.part.read_bucket(bucket), strict=True):
            found[int(key)] = record.tobytes()
    return found


def push(part: WatchedPart, random: np.random.Generator, keys: Keys) -> None:
    if part.part.spec.kind == "dense" and random.random() < 0.5:
        start = int(random.integers(0, SIZE - len(keys)))
        selection = Selection(None, start, start + len(keys))
    else:
        selection = Selection(keys)
    grads = random.standard_normal(part.part.num_values(selection)).astype(np.float32)
    if random.random() < 0.5:
        part.push(selection, grads)
    else:
        half: list[Floats] = [grads, grads]
        part.push_sum(selection, half, 0.5)


@pytest.mark.parametrize(("kind", "dim"), [("sparse", 1), ("sparse", 2), ("sparse", 5), ("dense", 1)])
def test_the_state_at_one_moment_is_read_while_the_table_changes(kind: str, dim: int) -> None:
    random = np.random.default_rng(dim)
    table = table_of(kind, dim)
    part = watch(table)
    assert watch(table) is part
    keys = random.permutation(SIZE if kind == "dense" else 40_000)[:3_000].astype(np.uint64)
    for _ in range(20):
        push(part, random, random.choice(keys[:2_000], 200, replace=False))
    expected = everything(part)
    moment = part.moment = Moment(part.part, ALL)
    found: dict[int, bytes] = {}
    for bucket in random.permutation(512):
        if random.random() < 0.3:
            push(part, random, random.choice(keys, 100, replace=False))
        if random.random() < 0.05 and kind == "sparse":
            part.erase(random.choice(keys, 50, replace=False))
        if random.random() < 0.05:
            subset = random.choice(keys, 10, replace=False)
            part.write_records(subset, random.random((10, part.part.record_words)).astype(np.float32))
        if random.random() < 0.03:
            lost = int(random.integers(0, 512))
            rows = part.part.read_bucket(lost)
            part.drop(1 << lost)
            if random.random() < 0.5:
                part.load_bucket(lost, *rows)
            else:
                part.hold(1 << lost)
        for key, record in zip(*moment.read(int(bucket)), strict=True):
            found[int(key)] = record.tobytes()
    assert found == expected
    assert everything(part) != expected


def test_changed_buckets_are_recorded() -> None:
    part = watch(table_of("sparse", 1))
    keys = np.arange(10_000, dtype=np.uint64)
    part.push(Selection(keys), np.ones(len(keys), np.float32))
    assert part.unchanged_since(("d", 1)) == 0
    part.record_written(("d", 1), ALL)
    assert part.unchanged_since(("d", 1)) == ALL
    touched = part.part.buckets_of(Selection(keys[:3]))
    part.push(Selection(keys[:3]), np.ones(3, np.float32))
    assert part.unchanged_since(("d", 1)) == ALL & ~touched
    part.record_written(("d", 2), touched)
    assert part.unchanged_since(("d", 1)) | part.unchanged_since(("d", 2)) == ALL
    assert part.unchanged_since(("d", 1)) & part.unchanged_since(("d", 2)) == 0
    assert part.unchanged_since(("other", 1)) == 0
    part.record_written(("other", 1), ALL)
    assert part.unchanged_since(("d", 2)) == touched
    first = next(buckets_in(touched))
    part.load_bucket(first, *part.part.read_bucket(first))
    assert not part.unchanged_since(("d", 2)) >> first & 1
    part.erase(keys)
    assert part.unchanged_since(("d", 1)) | part.unchanged_since(("d", 2)) == 0
    assert part.num_rows == part.part.num_rows == 0  # the watched part has the attributes of the part
