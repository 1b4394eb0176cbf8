"""Check the value of every row on every replica at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from paceline.ps import Client
from paceline.ps.client.records import read_records

from .ledger import (
    GROWN,
    GROWN_ACKNOWLEDGED,
    GROWN_KEYS,
    GROWN_SENT,
    LOADS,
    MOST_WORKERS,
    TICKS,
    Floats,
    Integers,
    Keys,
    Ledger,
    Load,
    grown_keys,
)

Records = dict[str, tuple[Keys, Floats]]
"""By table: its sorted keys, and the stored values and states of each key."""


def wrong_values(client: Client, ledger: Ledger) -> Iterator[str]:
    """Yield the wrong values of all tables."""
    for load in (*LOADS, TICKS):
        table = load.open(client)
        for worker in range(1 if load.is_shared else MOST_WORKERS):
            low, high = ledger.bounds(load, worker)
            if high.any():
                found = load.counts(load.pull(table, load.keys(worker)))
                yield from _compare(load.name, f"worker {worker}", found, low, high)
    table = GROWN.open(client)
    for worker in range(MOST_WORKERS):
        sent, acknowledged = ledger.board[worker, [GROWN_SENT, GROWN_ACKNOWLEDGED]]
        if sent:
            keys = np.concatenate([grown_keys(worker, push) for push in range(sent)])
            found = GROWN.counts(GROWN.pull(table, keys))
            pushes = np.repeat(np.arange(sent), GROWN_KEYS)
            yield from _compare("grown", f"worker {worker}", found, 1 * (pushes < acknowledged), np.ones_like(pushes))


def _compare(table: str, owner: str, found: Integers, low: Integers, high: Integers) -> Iterator[str]:
    wrong = np.flatnonzero((found < low) | (found > high))
    if len(wrong):
        at = wrong[0]
        lost = int(np.maximum(low - found, 0)[wrong].sum())
        yield (
            f"table {table!r}, {owner}: {len(wrong)} of {len(found)} keys are wrong, {lost} pushes of keys are lost; "
            f"the first, {at}, was applied {int(found[at])} times (-1: no such value), right is {int(low[at])} to "
            f"{int(high[at])}"
        )


def read_all(client: Client) -> Records:
    """Return all records of all tables."""
    found: Records = {}
    for spec in client.tables():
        parts = list(read_records(client, spec))
        if parts:
            keys = np.concatenate([part[0] for part in parts])
            order = np.argsort(keys)
            found[spec.name] = (keys[order], np.concatenate([part[1] for part in parts])[order])
    return found


def differences(before: Records, after: Records, ledger: Ledger) -> Iterator[str]:
    """Yield the replicas that differ, except because of unacknowledged pushes of dead workers."""
    if before.keys() != after.keys():
        yield f"there were tables {sorted(before)}, there are {sorted(after)}"
    loads = {load.name: load for load in (*LOADS, TICKS)}
    for name in before.keys() & after.keys():
        doubtful = _doubtful(loads[name], ledger) if name in loads else _doubtful_grown(ledger)
        one, other = (_without(found, doubtful) for found in (before[name], after[name]))
        if len(one[0]) != len(other[0]) or not np.array_equal(one[0], other[0]):
            yield f"table {name!r}: a replica had {len(other[0])} keys instead of {len(one[0])}"
        elif one[1].tobytes() != other[1].tobytes():
            rows = np.flatnonzero((one[1].view(np.uint32) != other[1].view(np.uint32)).any(1))
            yield (
                f"table {name!r}: a replica differed in {len(rows)} of {len(one[0])} keys; the first, "
                f"{one[0][rows[0]]}, was {one[1][rows[0]].tolist()} and is {other[1][rows[0]].tolist()}"
            )


def _without(found: tuple[Keys, Floats], keys: Keys) -> tuple[Keys, Floats]:
    keeps = ~np.isin(found[0], keys)
    return found[0][keeps], found[1][keeps]


def _doubtful(load: Load, ledger: Ledger) -> Keys:
    if load.is_shared:
        differs = (ledger.sent[load.name] != ledger.acknowledged[load.name]).any(0)
        found: Keys = load.keys(0)[differs]
        return found
    keys = [
        load.keys(worker)[ledger.sent[load.name][worker] != ledger.acknowledged[load.name][worker]]
        for worker in range(MOST_WORKERS)
    ]
    return np.concatenate(keys)


def _doubtful_grown(ledger: Ledger) -> Keys:
    keys = [np.empty(0, np.uint64)]
    for worker in range(MOST_WORKERS):
        sent, acknowledged = ledger.board[worker, [GROWN_SENT, GROWN_ACKNOWLEDGED]]
        keys += [grown_keys(worker, push) for push in range(acknowledged, sent)]
    return np.concatenate(keys)
