"""The gate of one server: who takes part in the iterations, and the reads that wait for others to be through.

:class:`paceline.protocol.Gate` decides; the gatekeeper does as it bids. It completes iterations (under sequential
consistency), has held reads answered when the gate opens, and answers those whose deadline passes with the reason.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Any

from paceline.errors import DeadlineError, PacelineError, PeerError, ProtocolError, StaleEpochError
from paceline.protocol import Consistency, Gate, Sequential, clocks
from paceline.ps.fail_stop import Fail, must_succeed
from paceline.ps.messages import ClocksInfo, TableSpec
from paceline.tables.aggregation import IterationBuffer
from paceline.tables.server_tables import ServerTables
from paceline.tables.sparse_part import Selection
from paceline.transport import Header, Peer

_EXPIRY_PERIOD_S = 0.25
_MAX_TIMEOUT_MS = 30 * 24 * 3600 * 1000
_MAX_LEAP = 1 << 16  # iterations by which one frame may advance a worker's clock: more than it has frames under way
_MAX_AHEAD = 1 << 20  # iterations by which one worker may be ahead of another, as a server tells


class HeldRead:
    """A read that waits at the gate."""

    __slots__ = ("clock", "deadline", "expired", "flags", "header", "peer", "selection")

    def __init__(
        self, peer: Peer, header: Header, selection: Selection, clock: int, flags: int, deadline: float
    ) -> None:
        self.peer = peer
        self.header = header
        self.selection = selection
        self.clock = clock
        self.flags = flags
        self.deadline = deadline
        self.expired = False


class Gatekeeper:
    """Keeps the gate in front of `tables`; `answer` is called with a held read that may now be served.

    `on_complete` is called with each iteration that is complete under sequential consistency, and who ticked it;
    `on_stop` with a worker that retires or leaves, and its clock;
    `may_read` says whether, the gate apart, values of an iteration may be read (a chain may not have all of it yet);
    `first_clock` where a worker that joins begins at least, `awaited` which workers a takeover waits for, `shortage` in
    words a bucket with too few replicas, if there is one; `on_begin` is called with the clock at which a server that
    joins a running cluster begins; `fail` with an exception after which the server must not go on.

    `gate`, `counted`, `ranks` and `buffer` are for the server to look at, in every frame; only the gatekeeper changes
    who is in them.
    """

    def __init__(
        self,
        tables: ServerTables,
        consistency: Consistency,
        expected_workers: int,
        *,
        fail: Fail,
        answer: Callable[[HeldRead], None],
        on_complete: Callable[[int, tuple[int, ...]], None],
        on_stop: Callable[[int, int], None],
        may_read: Callable[[int], bool],
        on_begin: Callable[[int], None],
        first_clock: Callable[[], int],
        awaited: Callable[[], Collection[int]],
        shortage: Callable[[], str],
    ) -> None:
        self._tables = tables
        self._fail = fail
        self._answer = answer
        self._on_complete = on_complete
        self._on_stop = on_stop
        self._may_read = may_read
        self._on_begin = on_begin
        self._first_clock = first_clock
        self._awaited = awaited
        self._shortage = shortage
        self.gate = Gate(consistency, expected_workers)
        self.ranks: dict[int, int] = {}
        """Incarnation → rank of workers that have joined the iterations."""
        self.counted: set[int] = set()
        """Those of them that take part now."""
        self.buffer: IterationBuffer | None = None
        """What was pushed for iterations that are not complete; None unless consistency is sequential."""
        if isinstance(consistency, Sequential):
            self.buffer = IterationBuffer(consistency.aggregate == "mean")
        self.named: Collection[int] = ()
        """The workers that are members by the newest map: nobody else joins."""
        self._gone: set[int] = set()  # incarnations that left or are dead: they never come back
        self._held: set[HeldRead] = set()
        self._unsafe: list[HeldRead] = []  # of them, those whose gate is open
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def num_held(self) -> int:
        """How many reads wait now."""
        return len(self._held)

    # Who takes part.

    def clocks_info(self, tables: tuple[tuple[int, TableSpec, TableSpec], ...]) -> ClocksInfo:
        """Return what a server that is being filled has to know of the workers."""
        workers = tuple(
            (worker, self.ranks[worker], clock, worker in self.counted)
            for worker, clock in self.gate.clocks.items()
            if worker in self.ranks
        )
        return ClocksInfo(tables, workers, self.gate.num_missing, self.gate.minimum)

    def take_clocks(self, info: ClocksInfo) -> None:
        """Begin where another server is: this one leads nothing yet. Raises ProtocolError, and has changed nothing."""
        highest = max((clock for _, _, clock, _ in info.workers), default=0)
        if self.buffer is not None and highest > info.minimum + _MAX_AHEAD:
            raise ProtocolError(
                f"clocks from a server say that a worker is in iteration {highest}, and others in {info.minimum}: at "
                f"most {_MAX_AHEAD} iterations can be under way"
            )
        if not self.ranks:
            self.gate = Gate(self.gate.consistency, info.num_missing, first_clock=info.minimum)
            self._on_begin(info.minimum)
        # Those who count first, the lowest first: the first who joins an empty gate says where it stands.
        for worker, rank, clock, counts in sorted(info.workers, key=lambda each: (not each[3], each[2])):
            if worker in self._gone or worker in self.ranks:
                continue
            self.ranks[worker] = rank
            self._obey(self.gate.handle(clocks.Join(worker, clock)))
            if counts:
                self.counted.add(worker)
            else:
                self._obey(self.gate.handle(clocks.Finish(worker)))

    def forget(self) -> None:
        """Forget where the workers are, and what they pushed: this server is in no chain, and hears of them no more.

        When it is filled again :meth:`take_clocks` says where they are by then.
        """
        self.gate = Gate(self.gate.consistency, 0)
        self.ranks.clear()
        self.counted.clear()
        if self.buffer is not None:
            self.buffer.clear()

    def sync(self, peer: Peer, rank: int, clock: int, counts: bool) -> None:
        """Take a worker's word for its clock, and for whether it takes part, after a change of the map."""
        self.check_member(peer)
        worker = peer.hello.incarnation
        self.check_leap(worker, clock)
        if worker not in self.gate.clocks:
            if not counts:
                return
            self._check_named(peer)
            self.ranks[worker] = rank
            self.counted.add(worker)
            self._obey(self.gate.handle(clocks.Join(worker, clock)))
        elif counts and worker not in self.counted:
            self.counted.add(worker)
            self._obey(self.gate.handle(clocks.Resume(worker)))
        self._obey(self.gate.handle(clocks.Tick(worker, clock)))
        if not counts:
            self.retire(worker)

    def join(self, peer: Peer, rank: int, clock: int) -> int:
        """Have a worker take part from iteration `clock` or later; return its clock.

        Raises as `check_member` and `check_leap`.
        """
        self.check_member(peer)
        self._check_named(peer)
        worker = peer.hello.incarnation
        self.check_leap(worker, clock)
        self.ranks[worker] = rank
        self.counted.add(worker)
        self._obey(self.gate.handle(clocks.Resume(worker)))
        self._obey(self.gate.handle(clocks.Join(worker, max(clock, self._first_clock()))))
        return int(self.gate.clocks[worker])

    def retire(self, worker: int) -> None:
        """Wait for a worker no more until it joins again."""
        if worker not in self.counted:
            return
        self.counted.discard(worker)
        self._on_stop(worker, self.gate.clocks[worker])
        self._obey(self.gate.handle(clocks.Finish(worker)))

    def leave(self, incarnation: int) -> bool:
        """Wait for a process never again, and refuse what it still sends; return whether it had joined."""
        self._gone.add(incarnation)
        if incarnation not in self.ranks:  # it died on its way here: the others must not wait for it to join
            self._obey(self.gate.handle(clocks.Join(incarnation)))
            self._obey(self.gate.handle(clocks.Leave(incarnation)))
            return False
        self.counted.discard(incarnation)
        self._on_stop(incarnation, self.gate.clocks.get(incarnation, 0))
        for held in [held for held in self._held if held.peer.hello.incarnation == incarnation]:
            self._drop(held)
            held.peer.send_error(held.header, self._not_a_member(held.peer))
        self._obey(self.gate.handle(clocks.Leave(incarnation)))
        del self.ranks[incarnation]
        return True

    def check_member(self, peer: Peer) -> None:
        """Raise PeerError if a process has left or is dead, or never was one: sums of iterations go by number 0."""
        if peer.hello.incarnation < 1:
            raise PeerError(
                f"{name_of(peer)} is no member of the cluster (incarnation {peer.hello.incarnation}): server "
                f"{self._tables.rank} takes nothing from it; connect to the scheduler first"
            )
        if peer.hello.incarnation in self._gone:
            raise self._not_a_member(peer)

    def check_leap(self, worker: int, clock: int) -> None:
        """Raise ProtocolError if a worker says that it has finished iterations that it cannot have begun.

        Each of them is completed by itself under sequential consistency, and so many at once would hold up everybody.
        """
        if self.buffer is None:
            return
        known = max(self.gate.clocks.get(worker, 0), self.gate.minimum, self._first_clock())
        if clock > known + _MAX_LEAP:
            raise ProtocolError(
                f"a worker (incarnation {worker}) went from iteration {known} to {clock} at once: at most {_MAX_LEAP} "
                "iterations can be under way"
            )

    def _check_named(self, peer: Peer) -> None:
        if peer.hello.incarnation not in self.named:
            raise self._not_a_member(peer)

    def _not_a_member(self, peer: Peer) -> PeerError:
        return PeerError(
            f"{name_of(peer)} (incarnation {peer.hello.incarnation}) left the cluster or was declared dead: server "
            f"{self._tables.rank} takes nothing more from it; connect again"
        )

    # Iterations.

    def tick(self, worker: int, clock: int) -> None:
        """Note that a worker has finished `clock` iterations."""
        if worker in self.counted:
            self._obey(self.gate.handle(clocks.Tick(worker, clock)))

    @must_succeed
    def _obey(self, instructions: list[Any]) -> None:
        for instruction in instructions:
            if isinstance(instruction, clocks.Complete):
                self._on_complete(instruction.iteration, instruction.workers)
            elif isinstance(instruction, clocks.Release):
                held = instruction.ticket
                assert isinstance(held, HeldRead)
                if not held.expired:
                    self._release(held)

    # Held reads.

    def hold(self, peer: Peer, header: Header, selection: Selection, clock: int, flags: int) -> None:
        """Have a read wait until the gate is open for iteration `clock`, or its deadline has passed."""
        held = HeldRead(peer, header, selection.copy(), clock, flags, time.monotonic() + timeout_s(peer))
        self._held.add(held)
        self._obey(self.gate.handle(clocks.Ask(peer.hello.incarnation, clock, held)))
        if self._expiry is None:
            self._expiry = asyncio.get_running_loop().call_later(_EXPIRY_PERIOD_S, self._expire)

    def look(self) -> None:
        """Serve the reads that had to wait, their gate apart, and need not any more."""
        waiting, self._unsafe = self._unsafe, []
        for held in waiting:
            if not held.expired:
                self._release(held)

    def refuse_held(self, error: StaleEpochError) -> None:
        """Answer all held reads with this: who sent them asks again by the new map."""
        for held in list(self._held):
            self._drop(held)
            held.peer.send_error(held.header, error)
        self._unsafe = []

    def disconnected(self, peer: Peer) -> None:
        """Forget the reads that came on a connection: nobody hears an answer."""
        for held in [held for held in self._held if held.peer is peer]:
            self._drop(held)

    def close(self) -> None:
        """Stop the timer."""
        if self._expiry is not None:
            self._expiry.cancel()

    def _release(self, held: HeldRead) -> None:
        if not self._may_read(held.clock):
            self._unsafe.append(held)
            return
        self._held.discard(held)
        try:
            self._answer(held)
        except (PacelineError, MemoryError) as error:  # its own: whose tick has opened the gate is not concerned
            refusal = error if isinstance(error, PacelineError) else self._no_memory()
            held.peer.send_error(held.header, refusal)

    def _no_memory(self) -> PeerError:
        return PeerError(f"server {self._tables.rank} has no memory for the values that were asked for")

    def _drop(self, held: HeldRead) -> None:
        held.expired = True
        self._held.discard(held)

    def _expire(self) -> None:
        """Answer held reads whose deadline has passed with the reason."""
        self._expiry = None
        now = time.monotonic()
        for held in [held for held in self._held if held.deadline <= now]:
            self._drop(held)
            held.peer.send_error(held.header, self._too_late(held))
        if self._held:
            self._expiry = asyncio.get_running_loop().call_later(_EXPIRY_PERIOD_S, self._expire)

    def _too_late(self, held: HeldRead) -> DeadlineError:
        late = [f"worker {self.ranks.get(worker, worker)}" for worker in self.gate.lagging(held.clock)]
        late += [f"worker {self.ranks.get(worker, worker)}" for worker in self._awaited() if worker in self.ranks]
        if not late and self.gate.is_open(held.clock) and not self._may_read(held.clock):
            late.append(self._shortage() or "the servers that replicate this one")
        missing = self.gate.num_missing
        if missing:
            late.append(f"{missing} {'worker that has' if missing == 1 else 'workers that have'} not joined yet")
        return DeadlineError(
            f"{name_of(held.peer)} waited {timeout_s(held.peer):g} s to begin iteration {held.clock} under "
            f"{self.gate.consistency} consistency: server {self._tables.rank} still awaits {' and '.join(late)}"
        )


def name_of(peer: Peer) -> str:
    """Return who a peer is, for messages."""
    return f"{peer.hello.role} {peer.hello.rank}"


def timeout_s(peer: Peer) -> float:
    """Return how long a peer waits for an answer: a minute, unless it has said a number of milliseconds."""
    told = peer.hello.extra.get("timeout_ms")
    return min(max(told, 0), _MAX_TIMEOUT_MS) / 1000.0 if isinstance(told, int) else 60.0
