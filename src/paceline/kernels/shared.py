"""Collectives through memory that the ranks of one host share.

The segment: a page whose first word is the *abort flag*, then ``CONTROL_BYTES`` per rank, then the ranks' slots. Each
rank counts its *steps*. In a step it writes into its own slot, publishes the step's number (a release store), waits
until every rank has published it, and reads the others' slots. A slot has two halves, used by odd and even steps: who
publishes step n + 1 has finished reading step n, so when all have published n + 1, the half of step n is free for
n + 2. That holds because *every* step waits for *every* rank, even where its data come from one (broadcast); it also
lets every rank compare every other's signature in the first step of a call, and makes a mismatch raise everywhere.

A kernel waits by spinning, then yielding, then sleeping (futex where there is one), and returns ``ATTENTION`` from time
to time so that its caller can look at the clock, at signals and at whether its peers live; it is called again with the
same arguments and goes on where it was (``state``).

Chunk sizes were measured on a 2-core AMD EPYC (1 MB L2, 32 MB L3): parts of 16 KB moved 100 MB in 20 ms, parts of
256 KB in 12 ms: a line that has gone to L3 is cheaper to fetch than one that is dirty in the other core's L2.
"""

# mypy: disable-error-code="var-annotated,call-arg,unreachable,assignment,call-overload"
from __future__ import annotations

import sys

import numpy as np
from numba import types

from .atomics import (
    FUTEX,
    call_combiner,
    copy_bytes,
    exchange,
    fetch_add,
    load_acquire,
    pause,
    process_vm_readv,
    sched_yield,
    system_call,
    usleep,
)
from .jit import njit
from .memory import load_u64, store_u64

DONE, ATTENTION, MISMATCH, ABORTED, UNREADABLE = range(5)

# The layout of a segment, in bytes.
HEADER_BYTES = 4096
ABORT, CLAIMED, STORY = 0, 8, 64  # within the header
CONTROL_BYTES = 2048
STEP, SLEEPERS, SIGNATURES, NUM_STEPS, SOURCES, TARGETS, PROCESS = 0, 64, 128, 144, 160, 176, 192
LEFT, READABLE, DESCRIBED, DESCRIPTION = 200, 208, 256, 264
# Within a rank's control block; from SIGNATURES to TARGETS there are pairs, for even and odd steps.
SLOT_BYTES = 1 << 20
RESULT_BYTES = SLOT_BYTES // 2
RANK_BYTES = 2 * SLOT_BYTES + 2 * RESULT_BYTES

# plan: uint64[PLAN_WORDS], what does not change between calls
SEGMENT, SIZE, RANK, DATA, SPINS, YIELDS, TABLE, SCRATCH, SCRATCH_BYTES = range(9)
PLAN_WORDS = 10

# state: int64[STATE_WORDS], what a kernel remembers
STEPS, AT, WAITING, AWAITED, LAST = range(5)
STATE_WORDS = 8

_OPTIONS = {"cache": True, "nogil": True, "error_model": "numpy"}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_NAP_NS = 2_000_000
_NAPS = 5
_U = np.uint64


def segment_bytes(num_ranks: int) -> int:
    """Return how large a segment for so many ranks is."""
    return data_offset(num_ranks) + num_ranks * RANK_BYTES


def data_offset(num_ranks: int) -> int:
    """Return where the first slot begins: on a page."""
    return (HEADER_BYTES + num_ranks * CONTROL_BYTES + 4095) // 4096 * 4096


@njit(**_OPTIONS, inline="always")
def _control(plan, rank):  # type: ignore[no-untyped-def]
    return plan[SEGMENT] + _U(HEADER_BYTES) + _U(rank) * _U(CONTROL_BYTES)


@njit(**_OPTIONS, inline="always")
def _slot(plan, rank, step):  # type: ignore[no-untyped-def]
    return plan[DATA] + _U(rank) * _U(RANK_BYTES) + _U(step & 1) * _U(SLOT_BYTES)


@njit(**_OPTIONS, inline="always")
def _result(plan, rank, step):  # type: ignore[no-untyped-def]
    return plan[DATA] + _U(rank) * _U(RANK_BYTES) + _U(2 * SLOT_BYTES) + _U(step & 1) * _U(RESULT_BYTES)


@njit(**_OPTIONS)
def publish_word(address, value):  # type: ignore[no-untyped-def]
    """Write a word after everything that was written before."""
    exchange(address, value)


@njit(**_OPTIONS)
def read_word(address):  # type: ignore[no-untyped-def]
    """Return a word; what was written before it can then be read."""
    return load_acquire(address)


@njit(**_OPTIONS)
def claim(address):  # type: ignore[no-untyped-def]
    """Return whether the caller is the first to claim this word."""
    return fetch_add(address, _U(1)) == _U(0)


@njit(**_OPTIONS)
def _nap(control, seen):  # type: ignore[no-untyped-def]
    """Sleep until a rank that has published `seen` publishes more, or a little while."""
    if FUTEX == 0:
        usleep(types.uint32(100))
        return
    fetch_add(control + _U(SLEEPERS), _U(1))
    if load_acquire(control + _U(STEP)) == seen:
        pause_for = np.zeros(2, np.int64)  # struct timespec
        pause_for[1] = _NAP_NS
        word = np.int64(seen & _U(0xFFFFFFFF))
        system_call(FUTEX, control, _FUTEX_WAIT, word, _U(pause_for.ctypes.data), _U(0), 0)
    fetch_add(control + _U(SLEEPERS), _U(0xFFFFFFFFFFFFFFFF))


@njit(**_OPTIONS)
def _publish(plan, step):  # type: ignore[no-untyped-def]
    control = _control(plan, plan[RANK])
    exchange(control, _U(step))  # a full fence: the look at the sleepers must not come before it
    if FUTEX != 0 and load_acquire(control + _U(SLEEPERS)) != _U(0):
        system_call(FUTEX, control, _FUTEX_WAKE, 1 << 30, _U(0), _U(0), 0)


@njit(**_OPTIONS)
def _wait_for(plan, state, rank, step):  # type: ignore[no-untyped-def]
    control = _control(plan, rank)
    spins, yields, naps = np.int64(plan[SPINS]), np.int64(plan[YIELDS]), 0
    while True:
        seen = load_acquire(control)
        if seen >= _U(step):
            return DONE
        if spins > 0:
            spins -= 1
            pause()
            continue
        if load_acquire(plan[SEGMENT]) != _U(0):
            return ABORTED
        if yields > 0:
            yields -= 1
            sched_yield()
            continue
        if naps == _NAPS:
            state[AWAITED] = rank
            return ATTENTION
        naps += 1
        _nap(control, seen)


@njit(**_OPTIONS)
def _wait_for_all(plan, state, step):  # type: ignore[no-untyped-def]
    """Wait until every rank has published a step."""
    for rank in range(np.int64(plan[SIZE])):
        if rank != np.int64(plan[RANK]):
            code = _wait_for(plan, state, rank, step)
            if code != DONE:
                return code
    return DONE


@njit(**_OPTIONS)
def _compare(plan, state, step, signature):  # type: ignore[no-untyped-def]
    """Look at what the others said of this call in its first step; note the most steps that one of them needs."""
    for rank in range(np.int64(plan[SIZE])):
        control = _control(plan, rank) + _U(8) * _U(step & 1)
        if load_u64(control + _U(SIGNATURES)) != signature:
            return MISMATCH
        state[LAST] = max(state[LAST], np.int64(load_u64(control + _U(NUM_STEPS))))
    return DONE


@njit(**_OPTIONS, inline="always")
def _announce(plan, step, signature, num_steps):  # type: ignore[no-untyped-def]
    control = _control(plan, plan[RANK]) + _U(8) * _U(step & 1)
    store_u64(control + _U(SIGNATURES), signature)
    store_u64(control + _U(NUM_STEPS), _U(num_steps))


@njit(**_OPTIONS)
def all_reduce_small(plan, state, signature, source, target, num_bytes, item_bytes, combiner, op, scale):  # type: ignore[no-untyped-def]
    """All-reduce what fits in one slot: every rank reads every slot. One step."""
    signature, source, target, combiner = _U(signature), _U(source), _U(target), _U(combiner)
    step = state[STEPS] + 1
    rank, size = np.int64(plan[RANK]), np.int64(plan[SIZE])
    if state[WAITING] == 0:
        _announce(plan, step, signature, 1)
        copy_bytes(_slot(plan, rank, step), source, num_bytes)
        _publish(plan, step)
        state[WAITING] = 1
    code = _wait_for_all(plan, state, step)
    if code != DONE:
        return code
    state[WAITING] = 0
    state[STEPS] = step
    code = _compare(plan, state, step, signature)
    if code != DONE:
        return code
    for other in range(size):
        store_u64(plan[TABLE] + _U(8 * other), source if other == rank else _slot(plan, other, step))
    call_combiner(combiner, target, plan[TABLE], size, num_bytes // item_bytes, op, scale)
    return DONE


@njit(**_OPTIONS)
def _reduce_part(plan, source, target, at, part, num_bytes, item_bytes, step, combiner, op, scale):  # type: ignore[no-untyped-def]
    """Reduce this rank's part of the chunk that was published in `step`, and leave the result for the others."""
    rank, size = np.int64(plan[RANK]), np.int64(plan[SIZE])
    start = at + rank * part
    length = min(part, num_bytes - start)
    if length <= 0:
        return
    for other in range(size):
        place = source + _U(start) if other == rank else _slot(plan, other, step) + _U(rank * part)
        store_u64(plan[TABLE] + _U(8 * other), place)
    call_combiner(combiner, target + _U(start), plan[TABLE], size, length // item_bytes, op, scale)
    copy_bytes(_result(plan, rank, step), target + _U(start), length)


@njit(**_OPTIONS)
def _take_results(plan, target, at, part, num_bytes, step):  # type: ignore[no-untyped-def]
    rank, size = np.int64(plan[RANK]), np.int64(plan[SIZE])
    for distance in range(1, size):
        other = (rank + distance) % size
        start = at + other * part
        length = min(part, num_bytes - start)
        if length > 0:
            copy_bytes(target + _U(start), _result(plan, other, step), length)


@njit(**_OPTIONS)
def _give(plan, source, at, part, num_bytes, step):  # type: ignore[no-untyped-def]
    """Write the others' parts of a chunk into this rank's slot."""
    rank, size = np.int64(plan[RANK]), np.int64(plan[SIZE])
    for distance in range(1, size):
        other = (rank + distance) % size
        start = at + other * part
        length = min(part, num_bytes - start)
        if length > 0:
            copy_bytes(_slot(plan, rank, step) + _U(other * part), source + _U(start), length)


@njit(**_OPTIONS)
def all_reduce(plan, state, signature, source, target, num_bytes, item_bytes, part, combiner, op, scale):  # type: ignore[no-untyped-def]
    """All-reduce in chunks of one `part` (bytes, whole items) per rank: reduce-scatter, then all-gather, in a pipeline.

    In one step a rank takes the results of the chunk before last, reduces its part of the last one and gives away the
    next: one wait per chunk.
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
                _announce(plan, step, signature, 1)
            _publish(plan, step)
            state[WAITING] = 1
        code = _wait_for_all(plan, state, step)
        if code != DONE:
            return code
        state[WAITING] = 0
        state[STEPS] = step
        state[AT] = at + 1
        if at == 0:
            code = _compare(plan, state, step, signature)
            if code != DONE:
                return code
    state[AT] = 0
    state[LAST] = 0
    return DONE


@njit(**_OPTIONS)
def _put_blocks(plan, puts, at, block, step):  # type: ignore[no-untyped-def]
    for j in range(puts.shape[0]):
        length = min(block, np.int64(puts[j, 1]) - at * block)
        if length > 0:
            place = _slot(plan, np.int64(plan[RANK]), step) + _U(j * block)
            copy_bytes(place, puts[j, 0] + _U(at * block), length)


@njit(**_OPTIONS)
def _take_blocks(plan, takes, at, block, step):  # type: ignore[no-untyped-def]
    for j in range(takes.shape[0]):
        length = min(block, np.int64(takes[j, 3]) - at * block)
        if length > 0:
            place = _slot(plan, np.int64(takes[j, 0]), step) + takes[j, 1] * _U(block)
            copy_bytes(takes[j, 2] + _U(at * block), place, length)


@njit(**_OPTIONS)
def _combine_blocks(plan, takes, own, at, block, step, item_bytes, combiner, op, scale):  # type: ignore[no-untyped-def]
    for j in range(takes.shape[0]):
        length = min(block, np.int64(takes[j, 3]) - at * block)
        if length > 0:
            for other in range(np.int64(plan[SIZE])):
                place = own + _U(at * block)
                if other != np.int64(plan[RANK]):
                    place = _slot(plan, other, step) + takes[j, 1] * _U(block)
                store_u64(plan[TABLE] + _U(8 * other), place)
            target = takes[j, 2] + _U(at * block)
            call_combiner(combiner, target, plan[TABLE], np.int64(plan[SIZE]), length // item_bytes, op, scale)


@njit(**_OPTIONS)
def move(plan, state, signature, puts, takes, block, own, item_bytes, combiner, op, scale):  # type: ignore[no-untyped-def]
    """Every collective but all-reduce: in each step put a block of every part to give, then take what others put.

    `puts` is uint64[n, 2]: (address, bytes) of this rank's part for block 0, 1, ... of its slot; `takes` is
    uint64[m, 4]: (rank, block of its slot, address, bytes). `block` is in bytes, the same on all ranks. With a
    `combiner` (else 0), a taken block is the reduction of that block over all ranks, this one's being at `own`.
    """
    signature, own, combiner = _U(signature), _U(own), _U(combiner)
    if state[AT] == 0 and state[WAITING] == 0:
        most = 0
        for j in range(puts.shape[0]):
            most = max(most, np.int64(puts[j, 1]))
        for j in range(takes.shape[0]):
            most = max(most, np.int64(takes[j, 3]))
        state[LAST] = 0
        _announce(plan, state[STEPS] + 1, signature, (most + block - 1) // block)
    while True:
        at, step = state[AT], state[STEPS] + 1
        if state[WAITING] == 0:
            _put_blocks(plan, puts, at, block, step)
            _publish(plan, step)
            state[WAITING] = 1
        code = _wait_for_all(plan, state, step)
        if code != DONE:
            return code
        state[WAITING] = 0
        state[STEPS] = step
        if at == 0:
            code = _compare(plan, state, step, signature)
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


@njit(**_OPTIONS)
def read_peer(plan, rank, target, source, num_bytes):  # type: ignore[no-untyped-def]
    """Copy from the memory of another rank's process; return whether all was read."""
    vectors = np.empty(4, np.uint64)  # two struct iovec
    vectors[0], vectors[1], vectors[2], vectors[3] = target, _U(num_bytes), source, _U(num_bytes)
    place = _U(vectors.ctypes.data)
    process = types.int32(load_u64(_control(plan, rank) + _U(PROCESS)))
    return process_vm_readv(process, place, _U(1), place + _U(16), _U(1), _U(0)) == num_bytes


@njit(**_OPTIONS, inline="always")
def _announced(plan, rank, word, step):  # type: ignore[no-untyped-def]
    return load_u64(_control(plan, rank) + _U(word) + _U(8) * _U(step & 1))


@njit(**_OPTIONS)
def _reduce_peers(plan, source, target, start, length, item_bytes, first, combiner, op, scale):  # type: ignore[no-untyped-def]
    rank, size = np.int64(plan[RANK]), np.int64(plan[SIZE])
    piece = np.int64(plan[SCRATCH_BYTES]) // size
    while length > 0:
        num_bytes = min(piece, length)
        for other in range(size):
            place = plan[SCRATCH] + _U(other * piece)
            if other == rank:
                place = source + _U(start)
            elif not read_peer(plan, other, place, _announced(plan, other, SOURCES, first) + _U(start), num_bytes):
                return False
            store_u64(plan[TABLE] + _U(8 * other), place)
        call_combiner(combiner, target + _U(start), plan[TABLE], size, num_bytes // item_bytes, op, scale)
        start += num_bytes
        length -= num_bytes
    return True


@njit(**_OPTIONS)
def _take_from_peers(plan, target, at, part, num_bytes, first):  # type: ignore[no-untyped-def]
    rank, size = np.int64(plan[RANK]), np.int64(plan[SIZE])
    for distance in range(1, size):
        other = (rank + distance) % size
        start = at + other * part
        length = min(part, num_bytes - start)
        if length > 0:
            place = _announced(plan, other, TARGETS, first) + _U(start)
            if not read_peer(plan, other, target + _U(start), place, length):
                return False
    return True


@njit(**_OPTIONS)
def all_reduce_direct(plan, state, signature, source, target, num_bytes, item_bytes, part, combiner, op, scale):  # type: ignore[no-untyped-def]
    """All-reduce that reads the others' arrays where they lie (``process_vm_readv``): one copy instead of two.

    Chunks as in :func:`all_reduce`. The last step is there so that nobody goes on while another still reads its array.
    """
    signature, source, target, combiner = _U(signature), _U(source), _U(target), _U(combiner)
    chunk = part * np.int64(plan[SIZE])
    num_chunks = (num_bytes + chunk - 1) // chunk
    while True:
        at, step = state[AT], state[STEPS] + 1
        first = step - at
        if state[WAITING] == 0:
            if at == 0:
                _announce(plan, step, signature, 1)
                control = _control(plan, plan[RANK]) + _U(8) * _U(step & 1)
                store_u64(control + _U(SOURCES), source)
                store_u64(control + _U(TARGETS), target)
            if at >= 2 and not _take_from_peers(plan, target, (at - 2) * chunk, part, num_bytes, first):
                return UNREADABLE
            if 1 <= at <= num_chunks:
                start = (at - 1) * chunk + np.int64(plan[RANK]) * part
                length = min(part, num_bytes - start)
                if not _reduce_peers(plan, source, target, start, length, item_bytes, first, combiner, op, scale):
                    return UNREADABLE
            _publish(plan, step)
            state[WAITING] = 1
        code = _wait_for_all(plan, state, step)
        if code != DONE:
            return code
        state[WAITING] = 0
        state[STEPS] = step
        state[AT] = at + 1
        if at == 0:
            code = _compare(plan, state, step, signature)
            if code != DONE:
                return code
        elif at == num_chunks + 1:
            state[AT] = 0
            return DONE


KERNELS = (publish_word, read_word, claim, read_peer, all_reduce_small, all_reduce, all_reduce_direct, move)
"""Every kernel that is called from Python."""
if sys.platform != "linux":  # the others call process_vm_readv, which is found nowhere else
    KERNELS = (publish_word, read_word, claim, all_reduce_small, all_reduce, move)


def compile_kernels(combiner: int) -> None:
    """Compile the kernels, on a segment of one rank."""
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
