"""Compile all kernels, or load them from Numba's cache on disk, before they are needed.

The launcher calls :func:`compile_kernels` once before it starts other processes. So no server or worker compiles
kernels during training, and no two processes compile the same kernel. This module calls the kernels with the argument
types of their real callers: C-contiguous, writable arrays, Python integers, and unsigned NumPy scalars for seeds and
addresses.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.kernels import (
    checksum,
    columns,
    combine,
    csr,
    dedup,
    dense,
    filters,
    index,
    shared,
    sparse,
)
from paceline.kernels.features import interactions, scaling, sketch
from paceline.kernels.jit import is_cached
from paceline.kernels.parameters import NUM_PARAMETERS
from paceline.kernels.text import csv, json_lines, lines, vw
from paceline.tables import logistic_pass
from paceline.tables.rules import SGD
from paceline.tables.rules import kernels as rule_kernels

KERNELS: tuple[Any, ...] = (
    csr.add_field_interactions,
    csr.add_interactions,
    csr.csr_dot,
    csr.csr_dot_rows,
    csr.csr_transposed_dot,
    csr.csr_transposed_dot_rows,
    csr.field_interaction_gradients,
    csr.interaction_gradients,
    csr.logistic,
    dedup.dedup,
    dedup.put_rows,
    dedup.select,
    dedup.split,
    dedup.sum_rows,
    dedup.take_keys,
    dedup.take_rows,
    dense.dense_pull,
    index.bucket_keys,
    index.bucket_words,
    index.buckets_of,
    index.erase,
    index.mark,
    index.mark_all,
    index.old_keys,
    index.is_run_too_long,
    index.rehash,
    sparse.copy_records,
    sparse.count_absent,
    sparse.digest_records,
    sparse.gather,
    sparse.has_room,
    sparse.largest,
    sparse.read_records,
    sparse.write_records,
    *columns.KERNELS,
    *filters.KERNELS,
    *logistic_pass.KERNELS,
    *rule_kernels.KERNELS,
    *checksum.KERNELS,
    *interactions.KERNELS,
    *scaling.KERNELS,
    *sketch.KERNELS,
    *shared.KERNELS,
    *csv.KERNELS,
    *json_lines.KERNELS,
    *vw.KERNELS,
    *lines.KERNELS,
)
"""All kernels that Python calls."""


def is_compiled() -> bool:
    """Return whether Numba's cache has every kernel of :func:`compile_kernels`. The check takes milliseconds."""
    return all(is_cached(kernel) for kernel in KERNELS)


def count_compiled() -> int:
    """Return the number of :data:`KERNELS` that Numba's cache has."""
    return sum(map(is_cached, KERNELS))


def compile_kernels() -> None:
    """Compile all kernels for the argument types of their callers, or load them from Numba's cache."""
    compile_values()
    compile_remaining()


def compile_common() -> None:
    """Compile or load the kernels that almost every process of a training uses."""
    compile_values()
    _compile_growth()
    _compile_batch()


def compile_values() -> None:
    """Compile the kernels that read and update sparse rows.

    They contain all update rules, and their compilation takes half of the time.
    """
    table = _EmptyTable()
    floats = np.zeros(1, np.float32)
    sparse.gather(table.directory, table.layout, table.parameters, table.keys, floats)
    assert rule_kernels.push(table.directory, table.layout, table.parameters, table.keys, floats, 0) == 0


def compile_remaining() -> None:
    _compile_growth()
    _compile_index()
    _compile_dense()
    _compile_batch()
    logistic_pass.compile_kernels()
    checksum.compile_kernels()
    interactions.compile_kernels()
    scaling.compile_kernels()
    sketch.compile_kernels()
    lines.compile_kernels()
    csv.compile_kernels()
    json_lines.compile_kernels()
    vw.compile_kernels()
    columns.compile_kernels()
    filters.compile_kernels()
    shared.compile_kernels(combine.combiner("uint8"))


class _EmptyTable:
    """The arrays of an empty hash index. All buckets share one empty line, and no bucket has space for a row."""

    def __init__(self) -> None:
        num_lines = 1 + 1 + index.TAIL_LINES  # for key 0, for all other keys, and spare lines
        self._memory = np.zeros((num_lines + 1) * index.LINE_BYTES, np.uint8)
        address = self._memory.ctypes.data
        self.directory = np.zeros(index.DIRECTORY_WORDS, np.uint64)
        self.directory[index.LINES : index.ROWS : 2] = address + -address % index.LINE_BYTES + index.LINE_BYTES
        self.directory[index.LINES + 1 : index.ROWS : 2] = 1
        self.directory[index.TAIL : index.SALT] = index.TAIL_LINES
        self.directory[index.SALT :] = index.FIRST_SALT
        self.layout = np.zeros(index.LAYOUT_WORDS, np.int64)
        self.layout[[index.ENTRY_WORDS, index.SLOTS, index.INLINE, index.DIM, index.ROW_WORDS]] = 3, 5, 1, 1, 1
        self.parameters = np.zeros(NUM_PARAMETERS, np.float64)
        self.keys = np.ones(1, np.uint64)


def _compile_growth() -> None:
    """Compile the kernels for the first pushes to a table and for saving it."""
    table = _EmptyTable()
    directory, layout, keys = table.directory, table.layout, table.keys
    assert not sparse.has_room(directory, keys, np.zeros(index.NUM_BUCKETS, np.uint64))
    sparse.count_absent(directory, layout, keys, np.zeros(index.NUM_BUCKETS, np.uint64))
    sparse.largest(np.zeros(1, np.float32))
    index.bucket_keys(directory, layout, 0, keys, keys)
    sparse.copy_records(np.zeros(0, np.uint64), 1, np.zeros(1, np.float32))
    index.rehash(directory[0], 1 + index.TAIL_LINES, layout, 0, directory)


def _compile_index() -> None:
    table = _EmptyTable()
    directory, layout, keys = table.directory, table.layout, table.keys
    floats, buckets = np.zeros(1, np.float32), np.zeros(1, np.uint16)
    assert sparse.write_records(directory, layout, keys, floats, 0) == 0
    sparse.read_records(directory, layout, keys, floats, np.zeros(1, np.uint8))
    sparse.digest_records(keys, floats.view(np.uint32).reshape(1, 1))
    index.erase(directory, layout, keys)
    index.mark(directory, layout, keys)
    index.mark_all(directory, layout)
    index.old_keys(directory, layout, 0, 1, keys)
    index.is_run_too_long(directory, keys[0], layout)
    index.buckets_of(keys, buckets)
    index.bucket_words(keys, np.zeros(index.NUM_BUCKETS // 64, np.uint64))


def _compile_dense() -> None:
    record, parameters = np.zeros(1, np.float32), np.zeros(NUM_PARAMETERS, np.float64)
    grads, positions = np.zeros(1, np.float32), np.zeros(1, np.int64)
    rule_kernels.dense_start(SGD.code, record, 1, 0, 1, 0, 0, np.uint64(0), parameters)
    rule_kernels.dense_push(SGD.code, record, 1, 0, 1, grads, 0, parameters)
    dense.dense_pull(record, 0, 1, grads, 0)
    rule_kernels.dense_push_at(SGD.code, record, 1, positions, grads, parameters)


def _compile_batch() -> None:
    keys, taken, scratch = np.zeros(1, np.uint64), np.zeros(1, np.uint64), np.zeros(16, np.int32)
    inverse, indices = np.zeros(1, np.int32), np.zeros(1, np.int32)
    rows, out = np.zeros(1, np.float32), np.zeros(1, np.float32)
    owners, starts, order = (
        np.zeros(index.NUM_BUCKETS, np.int32),
        np.zeros(2, np.int64),
        np.zeros(1, np.int64),
    )
    dedup.dedup(keys, scratch, taken, inverse)
    dedup.sum_rows(inverse, rows, 1, out)
    dedup.split(keys, owners, starts, order)
    dedup.select(keys, np.zeros(index.NUM_BUCKETS // 64, np.uint64), order)
    dedup.take_keys(keys, order, taken)
    dedup.take_rows(rows, order, 1, out)
    dedup.put_rows(rows, order, 1, out)
    indptr, labels = np.array([0, 1], np.int64), np.zeros(1, np.float32)
    csr.csr_dot(indptr, indices, rows, rows, out)
    csr.csr_transposed_dot(indptr, indices, rows, labels, out)
    csr.logistic(out, labels, rows, np.zeros(1, np.float32))
    wide, wide_out = np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32)
    csr.csr_dot_rows(indptr, indices, rows, wide, wide_out)
    csr.csr_transposed_dot_rows(indptr, indices, rows, wide, wide_out)
    csr.add_interactions(indptr, indices, rows, wide, wide_out, out)
    csr.interaction_gradients(indptr, indices, rows, wide, wide_out, out, np.zeros((1, 1), np.float32))
    active = np.ones(1, np.uint8)
    csr.add_field_interactions(indptr, indices, rows, indices, active, wide, 1, out)
    csr.field_interaction_gradients(indptr, indices, rows, indices, active, wide, 1, out, np.zeros((1, 1), np.float32))
