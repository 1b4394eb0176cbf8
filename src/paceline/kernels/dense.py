"""Kernels of a dense table: they update its values by range or by position.

The table is one long array, the *record*: all values, then all first state numbers of the update rule, and so on. The
kernels that update elements receive the kernel `update`, which applies an update rule. :mod:`paceline.tables.rules`
compiles them.
"""

from __future__ import annotations

import numpy as np

from .initializers import initial_row
from .jit import njit
from .parameters import INITIAL_A, INITIAL_B, hyper_of


@njit(nogil=True, inline="always")
def start_range(rule, record, size, start, stop, first_key, kind, seed, parameters, start_state):  # type: ignore[no-untyped-def]
    """Set elements ``[start, stop)`` of a record of `size` values to initial values and state.

    `first_key` is the key of element `start` in the table. Initial values depend on the key only, not on the position
    in this server's record.
    """
    for j in range(start, stop):
        key = np.uint64(first_key + j - start)
        initial_row(kind, seed, key, record, j, 1, parameters[INITIAL_A], parameters[INITIAL_B])
    start_state(rule, record, len(record), size, start, stop, parameters)


@njit(nogil=True, inline="always")
def push_range(rule, record, size, start, stop, grads, at, parameters, update):  # type: ignore[no-untyped-def]
    """Update elements ``[start, stop)`` with the gradients ``grads[at:]``."""
    # For slices the compiler infers that no index is negative, and vectorizes the loops: SGD on 25 million elements
    # takes 6 ms instead of 21.
    length = stop - start
    update(rule, record[start:], size, 0, length, grads[at : at + length], 0, hyper_of(parameters), True)


@njit(nogil=True, inline="always")
def push_at(rule, record, size, positions, grads, parameters, update):  # type: ignore[no-untyped-def]
    """Update the elements at `positions` (int64 [n]) with `grads` (float32 [n])."""
    hyper = hyper_of(parameters)
    for i in range(len(positions)):
        update(rule, record, size, positions[i], positions[i] + 1, grads, i, hyper, True)


@njit(cache=True, nogil=True)
def dense_pull(record, start, stop, out, at):  # type: ignore[no-untyped-def]
    """Write the values of elements ``[start, stop)`` to ``out[at:]``."""
    # A loop is used instead of NumPy's copy, which takes 30 to 40% longer (195 KB) if the alignments of source and
    # target differ.
    source, target = record[start:stop], out[at : at + stop - start]
    for j in range(stop - start):
        target[j] = source[j]
