"""The engine for ranks on one host: kernels on a shared segment (`kernels.shared`), and what to do when one fails.

A kernel returns here every few milliseconds while it waits; then the clock, the others' processes and signals are
looked at. The first rank that gives up writes why into the segment's header; the others read it there and raise the
same.
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

import msgspec
import numpy as np
from typing_extensions import override

from paceline.collectives.calls import Call, describe_mismatch, name_ranks
from paceline.collectives.engine import Area, Engine, Order, Reduction, copy
from paceline.collectives.shared.segment import Segment
from paceline.collectives.shared.watching import Watch, is_stopped
from paceline.errors import CollectiveError, GroupClosedError, MismatchError, RankLostError
from paceline.kernels import peer_memory, shared, steps
from paceline.transport import known

_SPINS: Final = 300
"""About 5 microseconds; then a waiting rank yields, which is nearly as quick and lets a rank on the same core work."""
_YIELDS: Final = 300
_DESCRIBE_S: Final = 2.0
_CLOSE_S: Final = 2.0
_EARLY_S: Final = 0.1
"""A rank gives up so long before the timeout, for the error to come within it."""
DYING_S: Final = 1.0
_STORY_BYTES: Final = 3000
_MAX_BLAMED: Final = 100
_SCRATCH_BYTES: Final = 1 << 18
_LINE: Final = 64
_KNOWN: Final = 0x5041_4345
_PR_SET_PTRACER: Final = 0x59616D61

DIRECT_BYTES: Final = 1 << 18
"""Below this, reading other processes' memory is never the faster way."""


class Story(msgspec.Struct, frozen=True):
    """Why a group is over."""

    kind: str
    message: str
    ranks: tuple[int, ...] = ()

    @classmethod
    def of(cls, error: BaseException) -> Story:
        """Return what others should know of an error."""
        if isinstance(error, MismatchError):
            return cls("mismatch", str(error))
        return cls("lost" if isinstance(error, RankLostError) else "error", str(error), getattr(error, "ranks", ()))

    def cut(self) -> Story:
        """Return the same, short enough for the segment."""
        text = self.message.encode()[:_STORY_BYTES].decode(errors="ignore")
        return Story(self.kind, text, self.ranks[:_MAX_BLAMED])

    def error(self) -> CollectiveError:
        """Return the error to raise."""
        if self.kind == "mismatch":
            return MismatchError(self.message)
        return RankLostError(self.message, self.ranks) if self.kind == "lost" else CollectiveError(self.message)


class SharedMemory(Engine):
    """All ranks of a group on one host, in one segment."""

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
        """`processes`: the process id of every rank; `members`: what errors call the ranks, if not by their numbers."""
        size = len(processes)
        self.rank, self.size, self.name = rank, size, name
        self._members = tuple(range(size)) if members is None else tuple(members)
        self._segment = segment
        self._processes = tuple(processes)
        self._watch = Watch(dict(enumerate(processes)))
        self._table = np.zeros(size, np.uint64)
        self._scratch = np.zeros(_SCRATCH_BYTES + _LINE, np.uint8)
        self._plan = np.zeros(steps.PLAN_WORDS, np.uint64)
        self._state = np.zeros(steps.STATE_WORDS, np.int64)
        self._nothing_put = np.zeros((0, 2), np.uint64)
        self._nothing_taken = np.zeros((0, 4), np.uint64)
        crowded = size > num_cores
        plan = self._plan
        plan[steps.SEGMENT], plan[steps.SIZE], plan[steps.RANK] = segment.address, size, rank
        plan[steps.DATA] = segment.address + steps.data_offset(size)
        plan[steps.TABLE] = self._table.ctypes.data
        plan[steps.SCRATCH] = self._scratch.ctypes.data + -self._scratch.ctypes.data % _LINE
        plan[steps.SCRATCH_BYTES] = _SCRATCH_BYTES // size // _LINE * _LINE * size
        plan[steps.SPINS], plan[steps.YIELDS] = (20 if crowded else _SPINS), _YIELDS
        self.control = segment.address + steps.HEADER_BYTES + rank * steps.CONTROL_BYTES
        steps.publish_word(np.uint64(self.control + steps.PROCESS), np.uint64(os.getpid()))
        self.reads_peers = False
        """Whether every rank can read every other's memory; see :meth:`find_out_about_peers`."""
        self._in_use = threading.Lock()
        self._mapping = threading.Lock()
        """Held, inside of `_in_use` if that is too, by who unmaps the segment or writes into it out of turn."""
        self._is_closing = False

    def find_out_about_peers(self, order: Order) -> None:
        """Find out, together with the others, whether every rank can read every other's memory."""
        if sys.platform != "linux":
            return
        _let_peers_read()
        offset = steps.TARGETS
        word = np.array([_KNOWN + self.rank, 0], np.uint64)
        steps.publish_word(np.uint64(self.control + offset), np.uint64(word.ctypes.data))
        self.barrier(order)
        can_read = True
        for other in self._others():
            place = np.uint64(self._word(other, offset))
            found = np.uint64(word.ctypes.data + 8)
            can_read = can_read and bool(peer_memory.read_peer(self._plan, other, found, place, 8))
            can_read = can_read and int(word[1]) == _KNOWN + other
        steps.publish_word(np.uint64(self.control + steps.READABLE), np.uint64(can_read))
        self.barrier(order)
        self.reads_peers = all(self._word(rank, steps.READABLE) for rank in range(self.size))

    # the calls

    @override
    def barrier(self, order: Order) -> None:
        self._move(order, self._nothing_put, self._nothing_taken, steps.SLOT_BYTES)

    @override
    def all_reduce(self, order: Order, source: Area, target: Area, reduction: Reduction) -> None:
        num_bytes = source.num_bytes
        given, taken = source.address, target.address
        plan, state, signature = self._plan, self._state, order.signature
        item_bytes, combiner, op, scale = (
            reduction.item_bytes, reduction.combiner, reduction.op, reduction.scale,
        )  # fmt: skip
        if num_bytes <= self._small_bytes():
            small = (plan, state, signature, given, taken, num_bytes, item_bytes, combiner, op, scale)
            self._run(order, shared.all_reduce_small, small)
        elif order.algorithm == "direct" and self.reads_peers:
            part = self._direct_part(num_bytes)
            large = (plan, state, signature, given, taken, num_bytes, item_bytes, part, combiner, op, scale)
            self._run(order, peer_memory.all_reduce_direct, large)
        else:
            part = self._part(num_bytes)
            large = (plan, state, signature, given, taken, num_bytes, item_bytes, part, combiner, op, scale)
            self._run(order, shared.all_reduce, large)

    @override
    def reduce(self, order: Order, source: Area, target: Area | None, reduction: Reduction, root: int) -> None:
        if self.rank == root:
            assert target is not None
            takes = _table((0, 0, target.address, target.num_bytes))
            self._move(order, self._nothing_put, takes, steps.SLOT_BYTES, source.address, reduction)
        else:
            self._move(order, _table(source), self._nothing_taken, steps.SLOT_BYTES, source.address, reduction)

    @override
    def reduce_scatter(self, order: Order, sources: Sequence[Area], target: Area, reduction: Reduction) -> None:
        puts = _table(*self._without_own(sources))
        takes = _table((0, self.rank, target.address, target.num_bytes))
        self._move(order, puts, takes, self._block(), sources[self.rank].address, reduction)

    @override
    def broadcast(self, order: Order, area: Area, root: int) -> None:
        block = steps.SLOT_BYTES // 4
        if self.rank == root:
            self._move(order, _table(area), self._nothing_taken, block)
        else:
            self._move(order, self._nothing_put, _table((root, 0, *area)), block)

    @override
    def all_gather(self, order: Order, source: Area, targets: Sequence[Area]) -> None:
        copy(source, targets[self.rank])
        takes = [(rank, 0, *targets[rank]) for rank in self._others()]
        self._move(order, _table(source), _table(*takes), steps.SLOT_BYTES // 2)

    @override
    def gather(self, order: Order, source: Area, targets: Sequence[Area], root: int) -> None:
        block = steps.SLOT_BYTES // 2
        if self.rank == root:
            copy(source, targets[root])
            takes = [(rank, 0, *targets[rank]) for rank in self._others()]
            self._move(order, self._nothing_put, _table(*takes), block)
        else:
            self._move(order, _table(source), self._nothing_taken, block)

    @override
    def scatter(self, order: Order, sources: Sequence[Area], target: Area, root: int) -> None:
        if self.rank == root:
            copy(sources[root], target)
            self._move(order, _table(*self._without_own(sources)), self._nothing_taken, self._block())
        else:
            self._move(order, self._nothing_put, _table((root, self.rank, *target)), self._block())

    @override
    def all_to_all(self, order: Order, sources: Sequence[Area], targets: Sequence[Area], *, equal: bool) -> None:
        copy(sources[self.rank], targets[self.rank])
        takes = [(rank, self.rank, *targets[rank]) for rank in self._others()]
        self._move(order, _table(*self._without_own(sources)), _table(*takes), self._block())

    @override
    def close(self) -> None:
        with self._mapping:
            if self._is_closing:
                return
            self._is_closing = True
        steps.publish_word(np.uint64(self.control + steps.LEFT), np.uint64(1))
        if self._in_use.acquire(timeout=_CLOSE_S):  # a kernel that is still running looks up every few milliseconds
            with self._mapping:
                self._segment.close()
            self._watch.close()
            self._in_use.release()

    # how much at once

    def _small_bytes(self) -> int:
        """Up to here everybody reads everything: fewer waits, but every rank reads from all."""
        return 1 << 15 if self.size == 2 else (1 << 13 if self.size <= 8 else 1 << 10)

    def _part(self, num_bytes: int) -> int:
        """Return the bytes of a chunk that one rank reduces: one chunk in all, if a slot can hold it."""
        most = steps.SLOT_BYTES // self.size // _LINE * _LINE
        return min(most, -(-num_bytes // self.size // _LINE) * _LINE + _LINE)

    def _direct_part(self, num_bytes: int) -> int:
        return min(1 << 20, -(-num_bytes // self.size // _LINE) * _LINE + _LINE)

    def _block(self) -> int:
        """Return the bytes of a slot's block where it has one for every rank."""
        return steps.SLOT_BYTES // self.size // _LINE * _LINE

    def _others(self) -> list[int]:
        return [(self.rank + distance) % self.size for distance in range(1, self.size)]

    def _without_own(self, areas: Sequence[Area]) -> list[Area]:
        return [Area(area.address, 0) if rank == self.rank else area for rank, area in enumerate(areas)]

    # running a kernel to its end

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
                self._go_on(code, order, kernel, arguments)

    def _go_on(self, code: int, order: Order, kernel: Callable[..., int], arguments: tuple[Any, ...]) -> None:
        """Call a kernel again until it is done; leave the group for good if anything goes wrong."""
        start = time.monotonic()
        spins = self._plan[steps.SPINS]
        try:
            while code == steps.ATTENTION:
                self._look_around(order, start)
                self._plan[steps.SPINS] = 0
                code = kernel(*arguments)
            if code == steps.MISMATCH:
                raise self._describe(order)
            if code == steps.ABORTED:
                raise self._read_story().error()
            if code == steps.UNREADABLE:
                raise self._unreadable(order, int(self._state[steps.UNREAD]))
        except BaseException as error:
            self.abort(error)
            raise
        finally:
            self._plan[steps.SPINS] = spins

    def _unreadable(self, order: Order, rank: int) -> RankLostError:
        """Return the error for a rank whose memory cannot be read. It is gone shortly before its process is dead."""
        until = time.monotonic() + min(DYING_S, order.timeout_s)
        while rank not in self._watch.dead() and time.monotonic() < until:
            time.sleep(0.001)
        try:
            self._blame_dead(order, (rank,))
        except RankLostError as error:
            return error
        return RankLostError(
            f"cannot read the memory of {self._names((rank,))} in {order.call}, call {order.sequence} of group "
            f"{self.name!r}: its process is protected, or has freed the array; PACELINE_ALGORITHM=shared does without",
            self._called((rank,)),
        )

    def _look_around(self, order: Order, start: float) -> None:
        """Raise if somebody awaited is dead or has left, or if it has taken too long."""
        if self._is_closing:
            raise GroupClosedError(f"group {self.name!r} was closed while {order.call} was under way")
        late = self._late()
        self._blame_dead(order, late)
        where = f"{order.call}, call {order.sequence} of group {self.name!r}"
        left = [rank for rank in late if self._word(rank, steps.LEFT)]
        if left:
            raise RankLostError(f"{self._names(left)} left the group before {where}", self._called(left))
        if time.monotonic() - start > order.timeout_s - min(_EARLY_S, order.timeout_s / 10):
            stopped = [rank for rank in late if is_stopped(self._processes[rank])]
            late = stopped or late
            reason = "is stopped (SIGSTOP)" if stopped else "did not come"
            raise RankLostError(
                f"{self._names(late)} {reason}: {where} was not done within {order.timeout_s:g} s", self._called(late)
            )

    def _blame_dead(self, order: Order, ranks: Sequence[int]) -> None:
        dead = [rank for rank in self._watch.dead() if rank in ranks]
        if dead:
            told = ", ".join(f"process {self._processes[rank]}" for rank in dead)
            where = f"{order.call}, call {order.sequence} of group {self.name!r}"
            raise RankLostError(f"{self._names(dead)} ({told}) died before or during {where}", self._called(dead))

    def _called(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._members[rank] for rank in ranks)

    def _names(self, ranks: Sequence[int]) -> str:
        return name_ranks(self._called(ranks))

    def _late(self) -> list[int]:
        """Return the ranks that have not published the step that is awaited."""
        step = int(self._state[steps.STEPS]) + 1
        return [rank for rank in range(self.size) if self._word(rank, steps.STEP) < step]

    def _word(self, rank: int, offset: int) -> int:
        control = self._segment.address + steps.HEADER_BYTES + rank * steps.CONTROL_BYTES
        return int(steps.read_word(np.uint64(control + offset)))

    # telling the others

    def abort(self, error: BaseException) -> None:
        """Make every rank that waits in a call, or makes another one, raise what this one raises."""
        header = self._segment.address
        with self._mapping:
            if self._is_closing or not steps.claim(np.uint64(header + steps.CLAIMED)):
                return
            story = Story.of(error)
            if story.kind == "error" and not isinstance(error, CollectiveError):
                text = f"rank {self._members[self.rank]} of group {self.name!r} failed: {type(error).__name__} {error}"
                story = Story("error", text.strip(), (self._members[self.rank],))
            self._write(steps.STORY, msgspec.msgpack.encode(story.cut()))
            steps.publish_word(np.uint64(header + steps.ABORT), np.uint64(1))

    def _read_story(self) -> Story:
        text = self._read(steps.STORY)
        return msgspec.msgpack.decode(text, type=known(Story))

    def _describe(self, order: Order) -> CollectiveError:
        """Tell the others what this rank called, and return the error that names all calls."""
        offset = self.control - self._segment.address
        text = msgspec.msgpack.encode(order.call)
        assert len(text) <= steps.CONTROL_BYTES - steps.DESCRIPTION - 8
        self._write(offset + steps.DESCRIPTION, text)
        steps.publish_word(np.uint64(self.control + steps.DESCRIBED), np.uint64(order.sequence + 1))
        until = time.monotonic() + min(_DESCRIBE_S, order.timeout_s)
        calls: dict[int, Call] = {}
        while len(calls) < self.size and time.monotonic() < until:
            for rank in range(self.size):
                if self._members[rank] not in calls and self._word(rank, steps.DESCRIBED):
                    text = self._read(steps.HEADER_BYTES + rank * steps.CONTROL_BYTES + steps.DESCRIPTION)
                    calls[self._members[rank]] = msgspec.msgpack.decode(text, type=known(Call))
            time.sleep(0.0005)
        return describe_mismatch(calls, self.name, order.sequence)

    def _write(self, offset: int, data: bytes) -> None:
        self._segment.bytes[offset : offset + 8] = np.frombuffer(len(data).to_bytes(8, "little"), np.uint8)
        self._segment.bytes[offset + 8 : offset + 8 + len(data)] = np.frombuffer(data, np.uint8)

    def _read(self, offset: int) -> bytes:
        length = int.from_bytes(self._segment.bytes[offset : offset + 8].tobytes(), "little")
        return self._segment.bytes[offset + 8 : offset + 8 + length].tobytes()


def _table(*rows: tuple[int, ...]) -> Any:
    return np.array(rows, np.uint64)


def _let_peers_read() -> None:
    """Where only a parent may read a process (Yama's scope 1), let this user's others do so too, as OpenMPI does."""
    try:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
    except OSError:
        return
    if scope == "1":
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)
