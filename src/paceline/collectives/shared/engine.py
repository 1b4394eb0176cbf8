"""Run collectives on one host with compiled kernels that exchange data through a segment of shared memory.

A kernel (`kernels.shared`) that waits for other ranks returns every few milliseconds, so that the engine can check the
timeout, the other processes and signals. The first rank that fails writes its error into the header of the segment, and
the other ranks raise this error too.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from typing_extensions import override

from paceline.collectives.engine import Area, Engine, Order, Reduction, copy
from paceline.collectives.shared.faults import SharedFaults
from paceline.collectives.shared.segment import Segment
from paceline.errors import GroupClosedError
from paceline.kernels import peer_memory, shared, steps

_SPINS: Final = 300
"""A waiting rank checks this often (about 5 microseconds) before it yields its core to other processes."""
_YIELDS: Final = 300
_CLOSE_S: Final = 2.0
_SCRATCH_BYTES: Final = 1 << 18
_LINE: Final = 64
_PROBE: Final = 0x5041_4345
_PR_SET_PTRACER: Final = 0x59616D61

_DIRECT_PART_BYTES: Final = 1 << 20
_NO_PUTS: Final = np.zeros((0, 2), np.uint64)
_NO_TAKES: Final = np.zeros((0, 4), np.uint64)

DIRECT_BYTES: Final = 1 << 18
"""Below this number of bytes, a direct read of another process's memory is always slower than two copies through the
shared segment.
"""


class SharedMemory(Engine):
    """The engine for ranks of one host. All ranks map one segment of shared memory."""

    def __init__(
        self,
        segment: Segment,
        rank: int,
        processes: Sequence[int],
        *,
        name: str,
        num_cores: int,
        members: Sequence[int] | None = None,
    ) -> None:
        """`processes` has the process id of each rank. `members` has each rank's number in error messages (default: 0,
        1, ...).
        """
        size = len(processes)
        self.rank, self.size, self.name = rank, size, name
        self._segment = segment
        self._table = np.zeros(size, np.uint64)
        self._scratch = np.zeros(_SCRATCH_BYTES + _LINE, np.uint8)
        self._plan = np.zeros(steps.PLAN_WORDS, np.uint64)
        self._state = np.zeros(steps.STATE_WORDS, np.int64)
        crowded = size > num_cores
        plan = self._plan
        plan[steps.SEGMENT], plan[steps.SIZE], plan[steps.RANK] = segment.address, size, rank
        plan[steps.DATA] = segment.address + steps.data_offset(size)
        plan[steps.TABLE] = self._table.ctypes.data
        plan[steps.SCRATCH] = self._scratch.ctypes.data + -self._scratch.ctypes.data % _LINE
        plan[steps.SCRATCH_BYTES] = _SCRATCH_BYTES // size // _LINE * _LINE * size
        plan[steps.SPINS], plan[steps.YIELDS] = (20 if crowded else _SPINS), _YIELDS
        self._faults = SharedFaults(segment, rank, processes, self._state, name, members)
        self.control = segment.address + steps.HEADER_BYTES + rank * steps.CONTROL_BYTES
        steps.publish_word(np.uint64(self.control + steps.PROCESS), np.uint64(os.getpid()))
        self.reads_peers = False
        """Whether each rank can read the memory of all other ranks' processes; see :meth:`test_peer_reads`."""
        self._in_use = threading.Lock()
        self._mapping = threading.Lock()
        """A lock for writes to the segment, which :meth:`close` unmaps. A thread that needs `_in_use` too must acquire
        `_in_use` first.
        """
        self._is_closing = False

    def test_peer_reads(self, order: Order) -> None:
        """Test whether each rank can read the memory of the other ranks' processes, and set :attr:`reads_peers`.

        All ranks must call this method.
        """
        if sys.platform != "linux":
            return
        _let_peers_read()
        offset = steps.TARGETS
        word = np.array([_PROBE + self.rank, 0], np.uint64)
        steps.publish_word(np.uint64(self.control + offset), np.uint64(word.ctypes.data))
        self.barrier(order)
        can_read = True
        for peer in self._peers():
            probe_address = np.uint64(self._faults.word(peer, offset))
            found = np.uint64(word.ctypes.data + 8)
            can_read = can_read and bool(peer_memory.read_peer(self._plan, peer, found, probe_address, 8))
            can_read = can_read and int(word[1]) == _PROBE + peer
        steps.publish_word(np.uint64(self.control + steps.READABLE), np.uint64(can_read))
        self.barrier(order)
        self.reads_peers = all(self._faults.word(rank, steps.READABLE) for rank in range(self.size))

    @override
    def barrier(self, order: Order) -> None:
        self._move(order, _NO_PUTS, _NO_TAKES, steps.SLOT_BYTES)

    @override
    def all_reduce(self, order: Order, source: Area, target: Area, reduction: Reduction) -> None:
        num_bytes = source.num_bytes
        source_at, target_at = source.address, target.address
        plan, state, signature = self._plan, self._state, order.signature
        item_bytes, combiner, op, scale = (
            reduction.item_bytes, reduction.combiner, reduction.op, reduction.scale,
        )  # fmt: skip
        if num_bytes <= _small_bytes(self.size):
            small = (plan, state, signature, source_at, target_at, num_bytes, item_bytes, combiner, op, scale)
            self._run(order, shared.all_reduce_small, small)
        elif order.algorithm == "direct" and self.reads_peers:
            part = _part(num_bytes, self.size, _DIRECT_PART_BYTES)
            large = (plan, state, signature, source_at, target_at, num_bytes, item_bytes, part, combiner, op, scale)
            self._run(order, peer_memory.all_reduce_direct, large)
        else:
            part = _part(num_bytes, self.size, self._block())
            large = (plan, state, signature, source_at, target_at, num_bytes, item_bytes, part, combiner, op, scale)
            self._run(order, shared.all_reduce, large)

    @override
    def reduce(self, order: Order, source: Area, target: Area | None, reduction: Reduction, root: int) -> None:
        if self.rank == root:
            assert target is not None
            takes = _table((0, 0, target.address, target.num_bytes))
            self._move(order, _NO_PUTS, takes, steps.SLOT_BYTES, source.address, reduction)
        else:
            self._move(order, _table(source), _NO_TAKES, steps.SLOT_BYTES, source.address, reduction)

    @override
    def reduce_scatter(self, order: Order, sources: Sequence[Area], target: Area, reduction: Reduction) -> None:
        puts = _table(*self._without_own(sources))
        takes = _table((0, self.rank, target.address, target.num_bytes))
        self._move(order, puts, takes, self._block(), sources[self.rank].address, reduction)

    @override
    def broadcast(self, order: Order, area: Area, root: int) -> None:
        block = steps.SLOT_BYTES // 4
        if self.rank == root:
            self._move(order, _table(area), _NO_TAKES, block)
        else:
            self._move(order, _NO_PUTS, _table((root, 0, *area)), block)

    @override
    def all_gather(self, order: Order, source: Area, targets: Sequence[Area]) -> None:
        copy(source, targets[self.rank])
        takes = [(rank, 0, *targets[rank]) for rank in self._peers()]
        self._move(order, _table(source), _table(*takes), steps.SLOT_BYTES // 2)

    @override
    def gather(self, order: Order, source: Area, targets: Sequence[Area], root: int) -> None:
        block = steps.SLOT_BYTES // 2
        if self.rank == root:
            copy(source, targets[root])
            takes = [(rank, 0, *targets[rank]) for rank in self._peers()]
            self._move(order, _NO_PUTS, _table(*takes), block)
        else:
            self._move(order, _table(source), _NO_TAKES, block)

    @override
    def scatter(self, order: Order, sources: Sequence[Area], target: Area, root: int) -> None:
        if self.rank == root:
            copy(sources[root], target)
            self._move(order, _table(*self._without_own(sources)), _NO_TAKES, self._block())
        else:
            self._move(order, _NO_PUTS, _table((root, self.rank, *target)), self._block())

    @override
    def all_to_all(self, order: Order, sources: Sequence[Area], targets: Sequence[Area], *, equal: bool) -> None:
        copy(sources[self.rank], targets[self.rank])
        takes = [(rank, self.rank, *targets[rank]) for rank in self._peers()]
        self._move(order, _table(*self._without_own(sources)), _table(*takes), self._block())

    @override
    def close(self) -> None:
        with self._mapping:
            if self._is_closing:
                return
            self._is_closing = True
        steps.publish_word(np.uint64(self.control + steps.LEFT), np.uint64(1))
        if self._in_use.acquire(timeout=_CLOSE_S):  # wait until a running kernel returns
            with self._mapping:
                self._segment.close()
            self._faults.close()
            self._in_use.release()

    def _block(self) -> int:
        return steps.SLOT_BYTES // self.size // _LINE * _LINE

    def _peers(self) -> list[int]:
        return [(self.rank + distance) % self.size for distance in range(1, self.size)]

    def _without_own(self, areas: Sequence[Area]) -> list[Area]:
        return [Area(area.address, 0) if rank == self.rank else area for rank, area in enumerate(areas)]

    def _move(
        self,
        order: Order,
        puts: Any,
        takes: Any,
        block: int,
        own: int = 0,
        reduction: Reduction = Reduction(0, 0, 1.0, 1),  # noqa: B008  (immutable)
    ) -> None:
        arguments = (
            self._plan, self._state, order.signature, puts, takes, block, own,
            reduction.item_bytes, reduction.combiner, reduction.op, reduction.scale,
        )  # fmt: skip
        self._run(order, shared.move, arguments)

    def _run(self, order: Order, kernel: Callable[..., int], arguments: tuple[Any, ...]) -> None:
        with self._in_use:
            if self._is_closing:
                raise GroupClosedError(f"group {self.name!r} was closed")
            code = kernel(*arguments)
            if code:
                self._resume(code, order, kernel, arguments)

    def _resume(self, code: int, order: Order, kernel: Callable[..., int], arguments: tuple[Any, ...]) -> None:
        start = time.monotonic()
        spins = self._plan[steps.SPINS]
        try:
            while code == steps.ATTENTION:
                if self._is_closing:
                    raise GroupClosedError(f"group {self.name!r} was closed during {order.call}")
                self._faults.check_ranks(order, start)
                self._plan[steps.SPINS] = 0
                code = kernel(*arguments)
            if code == steps.MISMATCH:
                raise self._faults.describe(order)
            if code == steps.ABORTED:
                raise self._faults.reported_error()
            if code == steps.UNREADABLE:
                raise self._faults.unreadable(order, int(self._state[steps.UNREAD]))
        except BaseException as error:
            self.abort(error)
            raise
        finally:
            self._plan[steps.SPINS] = spins

    def abort(self, error: BaseException) -> None:
        """Make the other ranks raise ``error`` in their current or next call."""
        with self._mapping:
            if not self._is_closing:
                self._faults.report(error)


def _small_bytes(size: int) -> int:
    """Return the largest size in bytes of an array that every rank reduces completely, from the data of all ranks.

    If an array is larger, each rank reduces only one part of it. This needs fewer reads but more waits.
    """
    return 1 << 15 if size == 2 else (1 << 13 if size <= 8 else 1 << 10)


def _part(num_bytes: int, size: int, most: int) -> int:
    """Return the number of bytes that each rank reduces per chunk of the array, at most `most`."""
    return min(most, -(-num_bytes // size // _LINE) * _LINE + _LINE)


def _table(*rows: tuple[int, ...]) -> Any:
    return np.array(rows, np.uint64)


def _let_peers_read() -> None:
    """Allow other processes of this user to read this process's memory.

    By default, the security module Yama of Linux allows this only to the parent process.
    """
    try:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
    except OSError:
        return
    if scope == "1":
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)
