"""The entries of requests are returned in the order of their operation."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch")
from paceline.horovod.entries import EntryTable, TensorEntry
from paceline.protocol.negotiation.requests import ALLREDUCE, Key, TensorRequest


def add(table: EntryTable, keys: list[Key]) -> dict[Key, TensorEntry]:
    entries = {key: TensorEntry(TensorRequest(key[1], ALLREDUCE)) for key in keys}
    table.add(keys, entries.values())
    return entries


def test_operations_that_repeat_get_the_entries_of_the_last_requests() -> None:
    keys = tuple((0, str(number)) for number in range(9))
    table, orders = EntryTable(), [random.Random(seed).sample(keys, len(keys)) for seed in range(3)]
    for order in [orders[0], orders[0], orders[1], orders[0], orders[2], orders[2]]:
        entries = add(table, order)
        assert list(table.take(keys)) == [entries[key] for key in keys]
    assert table.take_all() == [entries[key] for key in keys]
    table.operation_ended()
    assert table.take_all() == []


def test_operations_without_requests_of_this_rank() -> None:
    table, keys = EntryTable(), ((0, "a"), (0, "b"))
    entries = add(table, [(0, "b"), (0, "c")])  # as many entries as keys
    assert table.take(keys) == [None, entries[0, "b"]]
    assert table.take_all() == [entries[0, "c"], None, entries[0, "b"]]
    entries = add(table, [(0, "b"), (0, "a"), (0, "c")])
    assert table.take(keys) == [entries[0, "a"], entries[0, "b"]]
    assert table.take(((0, "c"),)) == [entries[0, "c"]]
