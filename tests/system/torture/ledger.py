"""The pushes of a run's workers and their acknowledgements, in memory that outlives the workers, and the right values.

All gradients are -1 (1 for rules with a state), so a value shows the number of pushes of its key under every rule. SGD
counts. The results of FTRL and Adam after a number of equal gradients are computed in advance by the reference
implementations.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.reference.rules import update_record

import paceline
from paceline.kernels.parameters import NUM_PARAMETERS

MOST_WORKERS = 48
MOST_PUSHES = 5_000
"""Pushes to one key of each worker."""
NONE, LIVE, GOING, LEFT = 0, 1, 2, 3
"""States of a worker: not started; counting; about to leave; ended, or not awaited."""
STATE, JOINED, CLOCK, BUSY_SINCE, OPERATIONS, GROWN_SENT, GROWN_ACKNOWLEDGED = range(7)
_COLUMNS = 8
GROWN_KEYS = 32
"""The number of new keys per push to the growing table."""

Integers = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Load:
    """A table, and the keys to which each worker pushes."""

    name: str
    rule: paceline.UpdateRule
    num_keys: int
    """The keys of one worker, or of all workers together if `is_shared`."""
    dim: int = 1
    is_dense: bool = False
    is_shared: bool = False

    @property
    def sign(self) -> float:
        """Return the value of every gradient."""
        return -1.0 if isinstance(self.rule, paceline.SGD) else 1.0

    @property
    def size(self) -> int:
        """Return the number of elements of a dense table."""
        return self.num_keys * (1 if self.is_shared else MOST_WORKERS)

    def keys(self, worker: int) -> Keys:
        """Return a worker's keys, spread over all buckets."""
        numbers = np.arange(self.num_keys, dtype=np.uint64)
        if self.is_dense:
            return numbers + np.uint64(0 if self.is_shared else worker * self.num_keys)
        return (numbers * np.uint64(256) + np.uint64(0 if self.is_shared else worker + 1)) * _SPREAD

    def open(self, client: paceline.Client) -> paceline.SparseTable | paceline.DenseTable:
        """Declare the table."""
        if self.is_dense:
            return client.dense_table(self.name, size=self.size, update=self.rule)
        return client.sparse_table(self.name, dim=self.dim, update=self.rule)

    def grads(self, count: int) -> Floats:
        """Return one gradient for each key."""
        shape = (count,) if self.is_dense else (count, self.dim)
        return np.full(shape, self.sign, np.float32)

    def push(self, table: Any, keys: Keys) -> Any:
        """Push to keys once, as a range if they are consecutive; return the ticket."""
        if not self.is_dense:
            return table.push(keys, self.grads(len(keys)))
        if is_range(keys):
            return table.push(self.grads(len(keys)), start=int(keys[0]))
        return table.push(self.grads(len(keys)), keys=keys)

    def pull(self, table: Any, keys: Keys) -> Floats:
        """Return the values of keys."""
        if not self.is_dense:
            values: Floats = table.pull(keys)
        elif is_range(keys):
            values = table.pull(start=int(keys[0]), stop=int(keys[-1]) + 1)
        else:
            values = table.pull(keys=keys)
        return values

    def counts(self, values: Floats) -> Integers:
        """Return the number of pushes of each key; -1 for a value that no number of pushes gives."""
        rows = values.reshape(-1, self.dim) * -self.sign
        truth = truths(self.rule)
        found = np.clip(np.searchsorted(truth, rows[:, 0] - _half_gap(self.rule)), 0, len(truth) - 1)
        right = np.abs(rows - truth[found, None]) <= 1e-5 * truth[found, None]
        return np.where(right.all(1) & np.isfinite(rows).all(1), found, -1)


_SPREAD = np.uint64(0x9E3779B97F4A7C15)


def is_range(keys: Keys) -> bool:
    """Whether the keys are consecutive."""
    return bool((np.diff(keys) == 1).all())


LOADS = (
    Load("counts", paceline.SGD(lr=1.0), 256),
    Load("wide", paceline.SGD(lr=1.0), 64, dim=16, is_shared=True),
    Load("dense", paceline.SGD(lr=1.0), 4096, is_dense=True, is_shared=True),
    Load("ftrl", paceline.FTRL(alpha=0.5), 128),
    Load("adam", paceline.Adam(lr=0.01), 64, dim=4),
    Load("weights", paceline.Adam(lr=0.01), 64, is_dense=True),
)
TICKS = Load("ticks", paceline.SGD(lr=1.0), 1)
"""Each worker pushes to its own key once in every iteration, so the value shows the staleness of a read."""
GROWN = Load("grown", paceline.SGD(lr=1.0), 1, dim=16)
"""Each key gets one push, so the table grows."""


def grown_keys(worker: int, push: int) -> Keys:
    """Return the new keys of a worker's push number `push`."""
    numbers = np.arange(push * GROWN_KEYS, (push + 1) * GROWN_KEYS, dtype=np.uint64)
    return (numbers * np.uint64(256) + np.uint64(worker + 1)) * _SPREAD


@functools.cache
def truths(rule: paceline.UpdateRule) -> Floats:
    """Return the negated values of a row after 0, 1, 2, … gradients. The values increase."""
    if isinstance(rule, paceline.SGD):
        return np.arange(MOST_WORKERS * MOST_PUSHES, dtype=np.float32)
    record, one = np.zeros(1 + rule.num_states + rule.has_count, np.float32), np.ones(1, np.float32)
    hyper = np.zeros(NUM_PARAMETERS, np.float64)
    hyper[: len(rule.hyper)] = rule.hyper
    found = np.zeros(MOST_PUSHES + 1, np.float32)
    for push in range(1, MOST_PUSHES + 1):
        update_record(rule.code, record, 1, 0, 1, one, 0, hyper, per_element=False)
        found[push] = -record[0]
    assert (np.diff(found) > 0).all()
    return found


@functools.cache
def _half_gap(rule: paceline.UpdateRule) -> float:
    return float(np.diff(truths(rule)).min() / 2)


class Ledger:
    """Shared memory with the states of workers, and for each table the number of pushes of each worker to each key."""

    def __init__(self, path: Path) -> None:
        total = sum(load.num_keys for load in (*LOADS, TICKS))
        shape = (MOST_WORKERS, 2, total)
        num_board = MOST_WORKERS * _COLUMNS + 1
        size = num_board + MOST_WORKERS * 2 * total
        if not path.exists():
            with open(path, "wb") as file:
                file.truncate(size * 8)
        memory: Integers = np.memmap(path, np.int64, "r+", shape=(size,))
        self.stop = memory[:1]
        """Whether workers must end."""
        self.board = memory[1:num_board].reshape(MOST_WORKERS, _COLUMNS)
        counts = memory[num_board:].reshape(shape)
        self.sent: dict[str, Integers] = {}
        """Arrays [worker, key] by table."""
        self.acknowledged: dict[str, Integers] = {}
        start = 0
        for load in (*LOADS, TICKS):
            self.sent[load.name] = counts[:, 0, start : start + load.num_keys]
            self.acknowledged[load.name] = counts[:, 1, start : start + load.num_keys]
            start += load.num_keys

    def bounds(self, load: Load, worker: int) -> tuple[Integers, Integers]:
        """Return the bounds of the number of a worker's applied pushes: its acknowledged and its sent pushes."""
        if load.is_shared:
            return self.acknowledged[load.name].sum(0), self.sent[load.name].sum(0)
        return self.acknowledged[load.name][worker].copy(), self.sent[load.name][worker].copy()
