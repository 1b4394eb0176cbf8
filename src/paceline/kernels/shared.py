"""Collectives through memory that the ranks of one host share. :mod:`.steps` describes this memory and its slots.

The size of chunks was chosen by a measurement on a 2-core AMD EPYC (1 MB L2 cache, 32 MB L3 cache). An all-reduce of
100 MB took 20 ms with parts of 16 KB, and 12 ms with parts of 256 KB. A part of 256 KB is no longer in the L2 cache
when the other core reads it. A read from L3 is faster than a read of a modified line in the other core's L2.
"""

# mypy: disable-error-code="var-annotated,call-arg,unreachable,assignment,call-overload"
from __future__ import annotations

import sys

import numpy as np

from .atomics import call_combiner, copy_bytes
from .jit import njit
from .memory import store_u64
from .peer_memory import all_reduce_direct, read_peer
from .steps import (
    AT,
    DATA,
    DONE,
    LAST,
    OPTIONS,
    PLAN_WORDS,
    RANK,
    SCRATCH,
    SCRATCH_BYTES,
    SEGMENT,
    SIZE,
    STATE_WORDS,
    STEPS,
    TABLE,
    WAITING,
    announce,
    claim,
    compare,
    data_offset,
    publish,
    publish_word,
    read_word,
    result_of,
    segment_bytes,
    slot_of,
    wait_for_all,
)

_U = np.uint64


@njit(**OPTIONS)
def all_reduce_small(plan, state, signature, source, target, num_bytes, item_bytes, combiner, op, scale):  # type: ignore[no-untyped-def]
    """Reduce a small array over all ranks in one step: every rank reads the data of all ranks."""
    signature, source, target, combiner = _U(signature), _U(source), _U(target), _U(combiner)
    step = state[STEPS] + 1
    rank, size = np.int64(plan[RANK]), np.int64(plan[SIZE])
    if state[WAITING] == 0:
        announce(plan, step, signature, 1)
        copy_bytes(slot_of(plan, rank, step), source, num_bytes)
        publish(plan, step)
        state[WAITING] = 1
    code = wait_for_all(plan, step)
    if code != DONE:
        return code
    state[WAITING] = 0
    state[STEPS] = step
    code = compare(plan, state, step, signature)
    if code != DONE:
        return code
    for other in range(size):
        store_u64(plan[TABLE] + _U(8 * other), source if other == rank else slot_of(plan, other, step))
    call_combiner(combiner, target, plan[TABLE], size, num_bytes // item_bytes, op, scale)
    return DONE


@njit(**OPTIONS)
def _reduce_part(plan, source, target, at, part, num_bytes, item_bytes, step, combiner, op, scale):  # type: ignore[no-untyped-def]
    """Reduce this rank's part of the chunk that the ranks published in `step`. Store the result for the other ranks."""
    rank, size = np.int64(plan[RANK]), np.int64(plan[SIZE])
    start = at + rank * part
    length = min(part, num_bytes - start)
    if length <= 0:
        return
    for other in range(size):
        place = source + _U(start) if other == rank else slot_of(plan, other, step) + _U(rank * part)
        store_u64(plan[TABLE] + _U(8 * other), place)
    call_combiner(combiner, target + _U(start), plan[TABLE], size, length // item_bytes, op, scale)
    copy_bytes(result_of(plan, rank, step), target + _U(start), length)


@njit(**OPTIONS)
def _take_results(plan, target, at, part, num_bytes, step):  # type: ignore[no-untyped-def]
    rank, size = np.int64(plan[RANK]), np.int64(plan[SIZE])
    for distance in range(1, size):
        other = (rank + distance) % size
        start = at + other * part
        length = min(part, num_bytes - start)
        if length > 0:
            copy_bytes(target + _U(start), result_of(plan, other, step), length)


@njit(**OPTIONS)
def _give(plan, source, at, part, num_bytes, step):  # type: ignore[no-untyped-def]
    """Write the parts of this rank's chunk that the other ranks must reduce into this rank's slot."""
    rank, size = np.int64(plan[RANK]), np.int64(plan[SIZE])
    for distance in range(1, size):
        other = (rank + distance) % size
        start = at + other * part
        length = min(part, num_bytes - start)
        if length > 0:
            copy_bytes(slot_of(plan, rank, step) + _U(other * part), source + _U(start), length)


@njit(**OPTIONS)
def all_reduce(plan, state, signature, source, target, num_bytes, item_bytes, part, combiner, op, scale):  # type: ignore[no-untyped-def]
    """Run an all-reduce in chunks. A chunk has a part of `part` bytes (whole items) for each rank to reduce.

    The three phases of successive chunks overlap: in step n a rank writes chunk n into its slot, reduces its part of
    chunk n - 1, and reads the results of chunk n - 2. So a rank waits only once for each chunk.
    """
    signature, source, target, combiner = _U(signature), _U(source), _U(target), _U(combiner)
    chunk = part * np.int64(plan[SIZE])
    num_chunks = (num_bytes + chunk - 1) // chunk
    while state[AT] < num_chunks + 2:
        at, step = state[AT], state[STEPS] + 1
        if state[WAITING] == 0:
            if at >= 2:
                _take_results(plan, target, (at - 2) * chunk, part, num_bytes, step - 2)
            if 1 <= at <= num_chunks:
                place = (at - 1) * chunk
                _reduce_part(plan, source, target, place, part, num_bytes, item_bytes, step - 1, combiner, op, scale)
            if at == num_chunks + 1:
                break
            if at < num_chunks:
                _give(plan, source, at * chunk, part, num_bytes, step)
            if at == 0:
                announce(plan, step, signature, 1)
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
    state[AT] = 0
    state[LAST] = 0
    return DONE


@njit(**OPTIONS)
def _put_blocks(plan, puts, at, block, step):  # type: ignore[no-untyped-def]
    for j in range(puts.shape[0]):
        length = min(block, np.int64(puts[j, 1]) - at * block)
        if length > 0:
            place = slot_of(plan, np.int64(plan[RANK]), step) + _U(j * block)
            copy_bytes(place, puts[j, 0] + _U(at * block), length)


@njit(**OPTIONS)
def _take_blocks(plan, takes, at, block, step):  # type: ignore[no-untyped-def]
    for j in range(takes.shape[0]):
        length = min(block, np.int64(takes[j, 3]) - at * block)
        if length > 0:
            place = slot_of(plan, np.int64(takes[j, 0]), step) + takes[j, 1] * _U(block)
            copy_bytes(takes[j, 2] + _U(at * block), place, length)


@njit(**OPTIONS)
def _combine_blocks(plan, takes, own, at, block, step, item_bytes, combiner, op, scale):  # type: ignore[no-untyped-def]
    for j in range(takes.shape[0]):
        length = min(block, np.int64(takes[j, 3]) - at * block)
        if length > 0:
            for other in range(np.int64(plan[SIZE])):
                place = own + _U(at * block)
                if other != np.int64(plan[RANK]):
                    place = slot_of(plan, other, step) + takes[j, 1] * _U(block)
                store_u64(plan[TABLE] + _U(8 * other), place)
            target = takes[j, 2] + _U(at * block)
            call_combiner(combiner, target, plan[TABLE], np.int64(plan[SIZE]), length // item_bytes, op, scale)


@njit(**OPTIONS)
def move(plan, state, signature, puts, takes, block, own, item_bytes, combiner, op, scale):  # type: ignore[no-untyped-def]
    """Run a collective other than all-reduce. In each step a rank writes blocks to its slot and reads other slots.

    `puts` (uint64[n, 2]) has the (address, bytes) of the data that this rank sends in block 0, 1, ... of its slot.
    `takes` (uint64[m, 4]) has the (rank, block, target address, bytes) of the data that this rank reads from other
    slots. Data longer than a block needs several steps. `block` is the size of a block in bytes, equal on all ranks.
    If `combiner` is not 0, each block that is read is reduced over all ranks. This rank's own data are at address
    `own`.
    """
    signature, own, combiner = _U(signature), _U(own), _U(combiner)
    if state[AT] == 0 and state[WAITING] == 0:
        most = 0
        for j in range(puts.shape[0]):
            most = max(most, np.int64(puts[j, 1]))
        for j in range(takes.shape[0]):
            most = max(most, np.int64(takes[j, 3]))
        state[LAST] = 0
        announce(plan, state[STEPS] + 1, signature, (most + block - 1) // block)
    while True:
        at, step = state[AT], state[STEPS] + 1
        if state[WAITING] == 0:
            _put_blocks(plan, puts, at, block, step)
            publish(plan, step)
            state[WAITING] = 1
        code = wait_for_all(plan, step)
        if code != DONE:
            return code
        state[WAITING] = 0
        state[STEPS] = step
        if at == 0:
            code = compare(plan, state, step, signature)
            if code != DONE:
                return code
        if combiner != _U(0):
            _combine_blocks(plan, takes, own, at, block, step, item_bytes, combiner, op, scale)
        else:
            _take_blocks(plan, takes, at, block, step)
        state[AT] = at + 1
        if at + 1 >= state[LAST]:
            state[AT] = 0
            return DONE


KERNELS = (publish_word, read_word, claim, read_peer, all_reduce_small, all_reduce, all_reduce_direct, move)
"""All kernels that are called from Python."""
if sys.platform != "linux":  # two more kernels on Linux, because they call process_vm_readv
    KERNELS = (publish_word, read_word, claim, all_reduce_small, all_reduce, move)


def compile_kernels(combiner: int) -> None:
    """Compile the kernels by running them on shared memory of a single rank."""
    memory = np.zeros(segment_bytes(1), np.uint8)
    array = np.zeros(64, np.uint8)
    plan, state = np.zeros(PLAN_WORDS, np.uint64), np.zeros(STATE_WORDS, np.int64)
    plan[SEGMENT], plan[SIZE], plan[DATA] = memory.ctypes.data, 1, memory.ctypes.data + data_offset(1)
    table = np.zeros(1, np.uint64)
    plan[TABLE] = table.ctypes.data
    word = np.zeros(1, np.uint64)
    place, address = np.uint64(word.ctypes.data), array.ctypes.data
    publish_word(place, np.uint64(0))
    read_word(place)
    claim(place)
    all_reduce_small(plan, state, 1, address, address, 64, 1, combiner, 0, 1.0)
    all_reduce(plan, state, 1, address, address, 64, 1, 64, combiner, 0, 1.0)
    move(plan, state, 1, np.zeros((0, 2), np.uint64), np.zeros((0, 4), np.uint64), 64, address, 1, 0, 0, 1.0)
    if sys.platform == "linux":
        scratch = np.zeros(64, np.uint8)
        plan[SCRATCH], plan[SCRATCH_BYTES] = scratch.ctypes.data, 64
        all_reduce_direct(plan, state, 1, address, address, 64, 1, 64, combiner, 0, 1.0)
        read_peer(plan, 0, place, place, 0)
