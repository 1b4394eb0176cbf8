"""Detect failed ranks that share a segment, and report errors to the other ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.collectives.aborts import Abort
from paceline.collectives.calls import CollectiveCall, describe_mismatch
from paceline.collectives.engine import Order
from paceline.collectives.shared.segment import Segment
from paceline.errors import CollectiveError, RankLostError, name_ranks
from paceline.kernels import steps
from paceline.meeting.watching import Watch, is_stopped
from paceline.observe.stuck.report import print_stall_soon
from paceline.transport import register_type

_DESCRIBE_S: Final = 2.0
_EARLY_S: Final = 0.1
"""A rank reports a timeout this much earlier, so that the other ranks receive the error before their own timeout."""
DYING_S: Final = 1.0
_STALL_SHARE: Final = 0.2
_STALL_S: Final = 1.5
"""A rank prints the stacks of all processes this time before a timeout, or this share of the timeout."""
_REPORT_BYTES: Final = 3000
_MAX_BLAMED: Final = 100


class SharedFaults:
    """Detects failed ranks, and exchanges errors with the other ranks through the segment.

    `state` is the array in which this rank's kernels store their progress.
    """

    def __init__(
        self,
        segment: Segment,
        rank: int,
        processes: Sequence[int],
        state: npt.NDArray[np.int64],
        name: str,
        members: Sequence[int] | None,
    ) -> None:
        self._segment, self._rank, self._size, self._name = segment, rank, len(processes), name
        self._processes = tuple(processes)
        self._members = tuple(range(len(processes))) if members is None else tuple(members)
        self._state = state
        self._watch = Watch(dict(enumerate(processes)))
        self._printed = -1
        """The last call in which this rank printed the stacks."""

    def close(self) -> None:
        self._watch.close()

    def unreadable(self, order: Order, rank: int) -> RankLostError:
        """Return the error to raise if this rank cannot read the memory of ``rank``.

        The memory of a dying process disappears before the system reports the process's end. So this method waits up to
        a second for this end.
        """
        until = time.monotonic() + min(DYING_S, order.timeout_s)
        while rank not in self._watch.dead() and time.monotonic() < until:
            time.sleep(0.001)
        try:
            self._blame_dead(order, (rank,))
        except RankLostError as error:
            return error
        return RankLostError(
            f"cannot read the memory of {self._names((rank,))} in {order.call}, call {order.sequence} of group "
            f"{self._name!r}: its process is protected, or has freed the array; set PACELINE_ALGORITHM=shared",
            self._called((rank,)),
        )

    def check_ranks(self, order: Order, start: float) -> None:
        """Raise RankLostError if a rank that this rank waits for has died or left, or if the timeout has passed."""
        late = self._late()
        self._blame_dead(order, late)
        call_text = f"{order.call}, call {order.sequence} of group {self._name!r}"
        left = [rank for rank in late if self.word(rank, steps.LEFT)]
        if left:
            raise RankLostError(f"{self._names(left)} left the group before {call_text}", self._called(left))
        waited_s = time.monotonic() - start
        if (
            waited_s > order.timeout_s - min(_STALL_S, _STALL_SHARE * order.timeout_s)
            and order.sequence != self._printed
        ):
            self._printed = order.sequence
            own = self._members[self._rank]
            print_stall_soon(f"paceline: rank {own} has waited {waited_s:.3g} s for {self._names(late)} in {call_text}")
        if time.monotonic() - start > order.timeout_s - min(_EARLY_S, order.timeout_s / 10):
            stopped = [rank for rank in late if is_stopped(self._processes[rank])]
            late = stopped or late
            reason = "is stopped (SIGSTOP)" if stopped else "did not make the call"
            raise RankLostError(
                f"{self._names(late)} {reason}: {call_text} was not done within {order.timeout_s:g} s",
                self._called(late),
            )

    def _blame_dead(self, order: Order, ranks: Sequence[int]) -> None:
        dead = [rank for rank in self._watch.dead() if rank in ranks]
        if dead:
            processes = ", ".join(f"process {self._processes[rank]}" for rank in dead)
            call_text = f"{order.call}, call {order.sequence} of group {self._name!r}"
            raise RankLostError(
                f"{self._names(dead)} ({processes}) died before or during {call_text}", self._called(dead)
            )

    def _called(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._members[rank] for rank in ranks)

    def _names(self, ranks: Sequence[int]) -> str:
        return name_ranks(self._called(ranks))

    def _late(self) -> list[int]:
        step = int(self._state[steps.STEPS]) + 1
        return [rank for rank in range(self._size) if self.word(rank, steps.STEP) < step]

    def word(self, rank: int, offset: int) -> int:
        control = self._segment.address + steps.HEADER_BYTES + rank * steps.CONTROL_BYTES
        return int(steps.read_word(np.uint64(control + offset)))

    def report(self, error: BaseException) -> None:
        header = self._segment.address
        if not steps.claim(np.uint64(header + steps.CLAIMED)):
            return
        abort = Abort.of(error)
        if not isinstance(error, CollectiveError):
            own = self._members[self._rank]
            text = f"rank {own} of group {self._name!r} failed: {type(error).__name__} {error}"
            abort = Abort("error", text.strip(), (own,))
        text = abort.message.encode()[:_REPORT_BYTES].decode(errors="ignore")
        # The segment's header has little space, so leave out the calls and limit the number of ranks.
        abort = Abort(abort.kind, text, abort.ranks[:_MAX_BLAMED])
        self._write(steps.STORY, msgspec.msgpack.encode(abort))
        steps.publish_word(np.uint64(header + steps.ABORT), np.uint64(1))

    def reported_error(self) -> CollectiveError:
        return msgspec.msgpack.decode(self._read(steps.STORY), type=register_type(Abort)).error(self._name)

    def describe(self, order: Order) -> CollectiveError:
        offset = steps.HEADER_BYTES + self._rank * steps.CONTROL_BYTES
        text = msgspec.msgpack.encode(order.call)
        assert len(text) <= steps.CONTROL_BYTES - steps.DESCRIPTION - 8
        self._write(offset + steps.DESCRIPTION, text)
        steps.publish_word(np.uint64(self._segment.address + offset + steps.DESCRIBED), np.uint64(order.sequence + 1))
        until = time.monotonic() + min(_DESCRIBE_S, order.timeout_s)
        calls: dict[int, CollectiveCall] = {}
        while len(calls) < self._size and time.monotonic() < until:
            for rank in range(self._size):
                if self._members[rank] not in calls and self.word(rank, steps.DESCRIBED):
                    text = self._read(steps.HEADER_BYTES + rank * steps.CONTROL_BYTES + steps.DESCRIPTION)
                    calls[self._members[rank]] = msgspec.msgpack.decode(text, type=register_type(CollectiveCall))
            time.sleep(0.0005)
        return describe_mismatch(calls, self._name, order.sequence)

    def _write(self, offset: int, data: bytes) -> None:
        self._segment.bytes[offset : offset + 8] = np.frombuffer(len(data).to_bytes(8, "little"), np.uint8)
        self._segment.bytes[offset + 8 : offset + 8 + len(data)] = np.frombuffer(data, np.uint8)

    def _read(self, offset: int) -> bytes:
        length = int.from_bytes(self._segment.bytes[offset : offset + 8].tobytes(), "little")
        return self._segment.bytes[offset + 8 : offset + 8 + length].tobytes()
