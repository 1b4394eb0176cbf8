"""The memory segment that the ranks of one host share, and the steps in which ranks write and read it.

The segment consists of a page whose first word is the *abort flag*, a control block of ``CONTROL_BYTES`` for each rank,
and a *slot* for the data of each rank. A collective runs in numbered *steps*. In a step, each rank writes its data into
its own slot, publishes the number of the step (a release store), waits until every rank has published this number, and
reads the slots of the other ranks.

A slot has two halves, for odd and even steps. A rank publishes step n + 1 after it has read the data of step n. So
after all ranks have published step n + 1, a rank may overwrite the half of step n: it does so in step n + 2. Therefore
every rank must wait for every other rank in every step, even if only one rank sends data (broadcast). In the first step
of a call, the ranks also compare the signatures (hashes) of their calls. If the calls differ, every rank raises an
error.

A waiting kernel first polls the memory, then yields its core, then sleeps (on a futex if the system has futexes). From
time to time it returns ``ATTENTION``, so that its caller can check the clock, signals and the other processes. The
caller then calls the kernel again with the same arguments, and the kernel continues from the position in ``state``.
"""

# mypy: disable-error-code="var-annotated,call-arg,unreachable,assignment,call-overload"
from __future__ import annotations

import numpy as np
from numba import types

from .atomics import FUTEX, exchange, fetch_add, load_acquire, pause, sched_yield, system_call, usleep
from .jit import njit
from .memory import load_u64, store_u64

DONE, ATTENTION, MISMATCH, ABORTED, UNREADABLE = range(5)

# The layout of a segment, in bytes.
HEADER_BYTES = 4096
ABORT, CLAIMED, STORY = 0, 8, 64  # offsets within the segment's first page
CONTROL_BYTES = 2048
STEP, SLEEPERS, SIGNATURES, NUM_STEPS, SOURCES, TARGETS, PROCESS = 0, 64, 128, 144, 160, 176, 192
LEFT, READABLE, DESCRIBED, DESCRIPTION = 200, 208, 256, 264
# Offsets within a rank's control block. The fields from SIGNATURES to TARGETS have a word for even and for odd steps.
SLOT_BYTES = 1 << 20
RESULT_BYTES = SLOT_BYTES // 2
RANK_BYTES = 2 * SLOT_BYTES + 2 * RESULT_BYTES

# Indices of the argument `plan` (uint64[PLAN_WORDS]), which is equal in all calls of a group.
SEGMENT, SIZE, RANK, DATA, SPINS, YIELDS, TABLE, SCRATCH, SCRATCH_BYTES = range(9)
PLAN_WORDS = 10

# Indices of the argument `state` (int64[STATE_WORDS]), the position at which a kernel continues.
STEPS, AT, WAITING, UNREAD, LAST = range(5)  # UNREAD: the rank whose memory could not be read
STATE_WORDS = 8

OPTIONS = {"cache": True, "nogil": True, "error_model": "numpy"}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_NAP_NS = 2_000_000
_NAPS = 5
_U = np.uint64


def segment_bytes(num_ranks: int) -> int:
    """Return the size in bytes of a segment for this number of ranks."""
    return data_offset(num_ranks) + num_ranks * RANK_BYTES


def data_offset(num_ranks: int) -> int:
    """Return the offset of the first slot in the segment, a multiple of the page size."""
    return (HEADER_BYTES + num_ranks * CONTROL_BYTES + 4095) // 4096 * 4096


@njit(**OPTIONS, inline="always")
def control_of(plan, rank):  # type: ignore[no-untyped-def]
    """Return the address of a rank's control block."""
    return plan[SEGMENT] + _U(HEADER_BYTES) + _U(rank) * _U(CONTROL_BYTES)


@njit(**OPTIONS, inline="always")
def slot_of(plan, rank, step):  # type: ignore[no-untyped-def]
    """Return the address of the half of the rank's slot that is used in `step`."""
    return plan[DATA] + _U(rank) * _U(RANK_BYTES) + _U(step & 1) * _U(SLOT_BYTES)


@njit(**OPTIONS, inline="always")
def result_of(plan, rank, step):  # type: ignore[no-untyped-def]
    """Return the address at which the rank stores the part that it reduced in `step`."""
    return plan[DATA] + _U(rank) * _U(RANK_BYTES) + _U(2 * SLOT_BYTES) + _U(step & 1) * _U(RESULT_BYTES)


@njit(**OPTIONS)
def publish_word(address, value):  # type: ignore[no-untyped-def]
    """Write a word after all earlier writes of this thread have become visible (release order)."""
    exchange(address, value)


@njit(**OPTIONS)
def read_word(address):  # type: ignore[no-untyped-def]
    """Read a word. Afterwards this thread sees all writes that the word's writer made before it (acquire order)."""
    return load_acquire(address)


@njit(**OPTIONS)
def claim(address):  # type: ignore[no-untyped-def]
    """Set the word at `address`, and return whether the caller is the first process that sets it."""
    return fetch_add(address, _U(1)) == _U(0)


@njit(**OPTIONS)
def _nap(control, seen):  # type: ignore[no-untyped-def]
    """Sleep until a rank that has published step `seen` publishes another step, or for a short time."""
    if FUTEX == 0:
        usleep(types.uint32(100))
        return
    fetch_add(control + _U(SLEEPERS), _U(1))
    if load_acquire(control + _U(STEP)) == seen:
        pause_for = np.zeros(2, np.int64)  # a structure of type timespec
        pause_for[1] = _NAP_NS
        word = np.int64(seen & _U(0xFFFFFFFF))
        system_call(FUTEX, control, _FUTEX_WAIT, word, _U(pause_for.ctypes.data), _U(0), 0)
    fetch_add(control + _U(SLEEPERS), _U(0xFFFFFFFFFFFFFFFF))


@njit(**OPTIONS)
def publish(plan, step):  # type: ignore[no-untyped-def]
    """Publish that this rank has written its data of `step` and finished the previous step. Wake sleeping ranks."""
    control = control_of(plan, plan[RANK])
    exchange(control, _U(step))  # full fence: the flags of sleeping ranks must be read after this write
    if FUTEX != 0 and load_acquire(control + _U(SLEEPERS)) != _U(0):
        system_call(FUTEX, control, _FUTEX_WAKE, 1 << 30, _U(0), _U(0), 0)


@njit(**OPTIONS)
def _wait_for(plan, rank, step):  # type: ignore[no-untyped-def]
    control = control_of(plan, rank)
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
            return ATTENTION
        naps += 1
        _nap(control, seen)


@njit(**OPTIONS)
def wait_for_all(plan, step):  # type: ignore[no-untyped-def]
    """Wait until every rank has published `step`."""
    for rank in range(np.int64(plan[SIZE])):
        if rank != np.int64(plan[RANK]):
            code = _wait_for(plan, rank, step)
            if code != DONE:
                return code
    return DONE


@njit(**OPTIONS)
def compare(plan, state, step, signature):  # type: ignore[no-untyped-def]
    """Compare the signatures of all ranks in the first step of a call, and store the largest number of steps."""
    for rank in range(np.int64(plan[SIZE])):
        control = control_of(plan, rank) + _U(8) * _U(step & 1)
        if load_u64(control + _U(SIGNATURES)) != signature:
            return MISMATCH
        state[LAST] = max(state[LAST], np.int64(load_u64(control + _U(NUM_STEPS))))
    return DONE


@njit(**OPTIONS, inline="always")
def announce(plan, step, signature, num_steps):  # type: ignore[no-untyped-def]
    """Write the signature of this rank's call and its number of steps, in the first step of the call."""
    control = control_of(plan, plan[RANK]) + _U(8) * _U(step & 1)
    store_u64(control + _U(SIGNATURES), signature)
    store_u64(control + _U(NUM_STEPS), _U(num_steps))
