"""References of the kernels that apply update rules, in NumPy: readable and slow.

A reference takes its kernel's arguments. The kernels of a sparse table work on raw memory; their reference is
:class:`ReferenceTable`, a dictionary. The arithmetic of a rule is in the rule's own file.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from tests.reference.kernels import Doubles, Floats, Integers, Keys, bucket_of, initial_values
from tests.reference.update_rules import find_reference

from paceline.kernels.index import NUM_BUCKETS
from paceline.kernels.initializers import ZEROS
from paceline.kernels.parameters import COUNT_PLANE, INITIAL_A, INITIAL_B, MAXIMIZE, NUM_PARAMETERS
from paceline.tables.rules.base import RULES, UpdateRule


def rule_with(code: int) -> type[UpdateRule]:
    """Return the rule with this number in the kernels."""
    (found,) = (rule for rule in RULES.values() if rule.code == code)
    return found


def update_record(
    rule: int,
    record: Floats,
    dim: int,
    start: int,
    stop: int,
    grads: Floats,
    at: int,
    hyper: Doubles,
    per_element: bool,
) -> None:
    """Apply the gradients ``grads[at : at + stop - start]`` to elements ``[start, stop)`` of a record."""
    w, *states = (record[plane + start : plane + stop] for plane in range(0, max(dim, len(record) - dim + 1), dim))
    g = grads[at : at + stop - start].copy()
    steps = np.ones(len(w))
    if hyper[COUNT_PLANE]:
        count = states.pop() if per_element or dim == 1 else record[-1:]
        count += np.float32(1)
        steps = steps * count
    if hyper[MAXIMIZE]:
        g = -g
    with np.errstate(divide="ignore", invalid="ignore"):
        find_reference(rule_with(rule))(w, states, g, steps, hyper)


def start_state(rule: int, record: Floats, words: int, dim: int, start: int, stop: int, hyper: Doubles) -> None:
    """Set the states of elements ``[start, stop)`` to the initial states. The values are already set."""
    for plane in range(dim, words, dim):
        record[plane + start : min(plane + stop, words)] = 0
    w, *states = (record[plane + start : plane + stop] for plane in range(0, words - dim + 1, dim))
    initialize = rule_with(rule).initialize_reference
    if initialize is not None:
        initialize(w, states, hyper)


class ReferenceTable:
    """The reference of a sparse table (the twin): a dictionary of records (float32 [row_words])."""

    def __init__(
        self,
        dim: int,
        row_words: int,
        rule: int,
        parameters: Doubles,
        initializer: int = ZEROS,
        seed: int = 0,
    ) -> None:
        assert len(parameters) == NUM_PARAMETERS
        self.dim = dim
        self.row_words = row_words
        self.rule = rule
        self.parameters = parameters
        self.initializer = initializer
        self.seed = seed
        self.rows: dict[int, Floats] = {}

    def initial(self, keys: Keys) -> Floats:
        """Return the values of absent rows (float32 [n, dim])."""
        a, b = float(self.parameters[INITIAL_A]), float(self.parameters[INITIAL_B])
        return initial_values(self.initializer, self.seed, keys, self.dim, a, b)

    def gather(self, keys: Keys, out: Floats) -> None:
        """Twin of ``sparse.gather``."""
        rows = self.initial(keys)
        for i, key in enumerate(keys.tolist()):
            if key in self.rows:
                rows[i] = self.rows[key][: self.dim]
        out[:] = rows.reshape(-1)

    def push(self, keys: Keys, grads: Floats) -> None:
        """Twin of ``push``."""
        for i, key in enumerate(keys.tolist()):
            if key not in self.rows:
                record = np.zeros(self.row_words, np.float32)
                record[: self.dim] = self.initial(keys[i : i + 1])[0]
                start_state(self.rule, record, self.row_words, self.dim, 0, self.dim, self.parameters)
                self.rows[key] = record
            at = i * self.dim
            update_record(self.rule, self.rows[key], self.dim, 0, self.dim, grads, at, self.parameters, False)

    def write_records(self, keys: Keys, records: Floats) -> None:
        """Twin of ``sparse.write_records``."""
        for key, record in zip(keys.tolist(), records.reshape(-1, self.row_words), strict=True):
            self.rows[key] = record.copy()

    def erase(self, keys: Iterable[int]) -> int:
        """Twin of ``index.erase``."""
        return sum(self.rows.pop(int(key), None) is not None for key in keys)

    def bucket(self, bucket: int) -> dict[int, Floats]:
        """Twin of ``index.bucket_keys`` and ``sparse.copy_records``."""
        assert 0 <= bucket < NUM_BUCKETS
        return {key: record for key, record in self.rows.items() if int(bucket_of(key)[0]) == bucket}


def dense_start(
    rule: int,
    record: Floats,
    size: int,
    start: int,
    stop: int,
    first_key: int,
    kind: int,
    seed: Any,
    parameters: Doubles,
) -> None:
    """Set elements ``[start, stop)`` of a record to initial values and state."""
    keys = np.arange(first_key, first_key + stop - start, dtype=np.uint64)
    a, b = float(parameters[INITIAL_A]), float(parameters[INITIAL_B])
    record[start:stop] = initial_values(kind, int(seed), keys, 1, a, b)[:, 0]
    start_state(rule, record, len(record), size, start, stop, parameters)


def dense_push(
    rule: int, record: Floats, size: int, start: int, stop: int, grads: Floats, at: int, parameters: Doubles
) -> None:
    """Update elements ``[start, stop)`` with ``grads[at:]``."""
    update_record(rule, record, size, start, stop, grads, at, parameters, True)


def dense_push_at(
    rule: int, record: Floats, size: int, positions: Integers, grads: Floats, parameters: Doubles
) -> None:
    """Update the elements at `positions` with `grads`."""
    for i, position in enumerate(positions.tolist()):
        update_record(rule, record, size, position, position + 1, grads, i, parameters, True)
