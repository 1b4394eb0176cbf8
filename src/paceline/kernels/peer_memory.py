"""An all-reduce that reads other ranks' arrays in the memory of their processes (``process_vm_readv``, Linux only)."""

# mypy: disable-error-code="var-annotated,call-arg,unreachable,assignment,call-overload"
from __future__ import annotations

import numpy as np
from numba import types

from .atomics import call_combiner, process_vm_readv
from .jit import njit
from .memory import load_u64, store_u64
from .steps import (
    AT,
    DONE,
    OPTIONS,
    PROCESS,
    RANK,
    SCRATCH,
    SCRATCH_BYTES,
    SIZE,
    SOURCES,
    STEPS,
    TABLE,
    TARGETS,
    UNREAD,
    UNREADABLE,
    WAITING,
    announce,
    compare,
    control_of,
    publish,
    wait_for_all,
)

_U = np.uint64


@njit(**OPTIONS)
def read_peer(plan, rank, target, source, num_bytes):  # type: ignore[no-untyped-def]
    """Copy `num_bytes` from the memory of the process of `rank`, and return whether all bytes were read."""
    vectors = np.empty(4, np.uint64)  # two structures of type iovec: the target and the source
    vectors[0], vectors[1], vectors[2], vectors[3] = target, _U(num_bytes), source, _U(num_bytes)
    place = _U(vectors.ctypes.data)
    process = types.int32(load_u64(control_of(plan, rank) + _U(PROCESS)))
    return process_vm_readv(process, place, _U(1), place + _U(16), _U(1), _U(0)) == num_bytes


@njit(**OPTIONS, inline="always")
def _announced(plan, rank, word, step):  # type: ignore[no-untyped-def]
    return load_u64(control_of(plan, rank) + _U(word) + _U(8) * _U(step & 1))


@njit(**OPTIONS)
def _reduce_peers(plan, state, source, target, start, length, item_bytes, first, combiner, op, scale):  # type: ignore[no-untyped-def]
    rank, size = np.int64(plan[RANK]), np.int64(plan[SIZE])
    piece = np.int64(plan[SCRATCH_BYTES]) // size
    while length > 0:
        num_bytes = min(piece, length)
        for other in range(size):
            place = plan[SCRATCH] + _U(other * piece)
            if other == rank:
                place = source + _U(start)
            elif not read_peer(plan, other, place, _announced(plan, other, SOURCES, first) + _U(start), num_bytes):
                state[UNREAD] = other
                return False
            store_u64(plan[TABLE] + _U(8 * other), place)
        call_combiner(combiner, target + _U(start), plan[TABLE], size, num_bytes // item_bytes, op, scale)
        start += num_bytes
        length -= num_bytes
    return True


@njit(**OPTIONS)
def _take_from_peers(plan, state, target, at, part, num_bytes, first):  # type: ignore[no-untyped-def]
    rank, size = np.int64(plan[RANK]), np.int64(plan[SIZE])
    for distance in range(1, size):
        other = (rank + distance) % size
        start = at + other * part
        length = min(part, num_bytes - start)
        if length > 0:
            place = _announced(plan, other, TARGETS, first) + _U(start)
            if not read_peer(plan, other, target + _U(start), place, length):
                state[UNREAD] = other
                return False
    return True


@njit(**OPTIONS)
def all_reduce_direct(plan, state, signature, source, target, num_bytes, item_bytes, part, combiner, op, scale):  # type: ignore[no-untyped-def]
    """Run an all-reduce that reads the other ranks' arrays directly in the memory of their processes.

    Each byte is copied once, instead of twice through shared memory. The chunks have the sizes of :func:`all_reduce`.
    In the last step every rank waits until the other ranks have read its array.
    """
    signature, source, target, combiner = _U(signature), _U(source), _U(target), _U(combiner)
    chunk = part * np.int64(plan[SIZE])
    num_chunks = (num_bytes + chunk - 1) // chunk
    while True:
        at, step = state[AT], state[STEPS] + 1
        first = step - at
        if state[WAITING] == 0:
            if at == 0:
                announce(plan, step, signature, 1)
                control = control_of(plan, plan[RANK]) + _U(8) * _U(step & 1)
                store_u64(control + _U(SOURCES), source)
                store_u64(control + _U(TARGETS), target)
            if at >= 2 and not _take_from_peers(plan, state, target, (at - 2) * chunk, part, num_bytes, first):
                return UNREADABLE
            if 1 <= at <= num_chunks:
                start = (at - 1) * chunk + np.int64(plan[RANK]) * part
                length = min(part, num_bytes - start)
                if not _reduce_peers(
                    plan, state, source, target, start, length, item_bytes, first, combiner, op, scale
                ):
                    return UNREADABLE
            publish(plan, step)
            state[WAITING] = 1
        code = wait_for_all(plan, step)
        if code != DONE:
            return code
        state[WAITING] = 0
        state[STEPS] = step
        state[AT] = at + 1
        if at == 0:
            code = compare(plan, state, step, signature)
            if code != DONE:
                return code
        elif at == num_chunks + 1:
            state[AT] = 0
            return DONE
