"""A parameter server: frames in, tables updated, answers out. One asyncio loop, one thread, no locks.

Whom it talks to: workers' clients, through a transport's :class:`Handler`; the scheduler's news (who died) comes by
:meth:`Server.members_changed`. Data frames are served here, reads that must wait are held by the
`Gatekeeper`, control is `ServerControl`'s. The rules are :mod:`paceline.protocol`'s; the tables and their kernels do
the arithmetic.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from typing_extensions import override

from paceline.errors import NonFiniteError, PacelineError, PeerError, ProtocolError, StaleEpochError, UsageError
from paceline.kernels.sparse import largest
from paceline.protocol import Consistency, DelayCompensate, DropStale, StalePolicy
from paceline.protocol.buckets import Buckets
from paceline.protocol.iterations import Iterations, Sum, Takeover
from paceline.protocol.replication import AGGREGATE
from paceline.ps import messages
from paceline.ps.fail_stop import Fail, must_succeed
from paceline.ps.messages import (
    ACK,
    CALL,
    CHECK,
    CLOCKS,
    DROPPED,
    FORWARD,
    PING,
    PULL,
    PUSH,
    PUSH_PULL,
    RANGE,
    READY,
    RESULT,
    STATE,
    SYNCED,
    TICK,
    TICKS,
    VALUES,
)
from paceline.ps.server.back_pressure import BackPressure
from paceline.ps.server.control import ServerControl, Traffic
from paceline.ps.server.gatekeeper import Gatekeeper, HeldRead, name_of
from paceline.ps.server.pushes import PUSH as PUSH_DOWN
from paceline.ps.server.pushes import ChainPush, Piece, check_range, restrict
from paceline.ps.server.replicator import Replicator
from paceline.tables.aggregation import Complete, Push, apply_sum, sum_up
from paceline.tables.bounds import MAX_CLOCK
from paceline.tables.non_finite import REFUSE, NonFinite
from paceline.tables.server_tables import ServerTable, ServerTables
from paceline.tables.sparse_part import Selection, check_finite
from paceline.tables.sparse_store import Floats
from paceline.tables.staleness import DelayCompensation
from paceline.transport import (
    HEADER,
    HEADER_BYTES,
    MAGIC,
    PROTOCOL_VERSION,
    Handler,
    Header,
    Hello,
    Limits,
    Peer,
    Transport,
    padded,
)

_logger = logging.getLogger("paceline.ps")
_VERSIONED = frozenset((PULL, PUSH, PUSH_PULL, TICK, SYNCED, FORWARD, STATE, READY, CLOCKS, CHECK))
_SAFE_SUM = 1e38  # of gradients, before the factor
_OF_MEMBERS = frozenset((TICK, SYNCED, CALL))
_HEADER_FLOATS = HEADER_BYTES // 4
_MAX_ANSWER_BYTES = Limits().max_frame_bytes
_DROPPED_KEPT = 256  # as many pushes as a client has in flight at most


_Frame: TypeAlias = tuple[Peer, Header, bytes, bytearray]


class Server(Handler):
    """The tables of one server, its place in the chains, and the gate in front of them.

    Arguments: `consistency` and `stale`, the cluster's; `expected_workers`, how many must have joined before the first
    iteration can complete; `replicas`, how many servers may die without loss; `min_replicas`, how many must have a push
    before it is acknowledged; `non_finite`, what becomes of infinities and NaN (:mod:`paceline.tables.non_finite`);
    `transport`, for connections to other servers, which a lone one does not need;
    `on_filled`, which takes what the scheduler must hear, and does not raise; `fail`, called with an exception after
    which this server must not go on (:mod:`paceline.ps.fail_stop`). If it returns, the server tells nobody of that
    exception.
    """

    def __init__(
        self,
        *,
        consistency: Consistency,
        fail: Fail,
        stale: StalePolicy | None = None,
        expected_workers: int = 1,
        replicas: int = 0,
        min_replicas: int = 0,
        non_finite: str = REFUSE,
        transport: Transport | None = None,
        on_filled: Callable[[messages.Filled], None] = lambda filled: None,
    ) -> None:
        self._tables = ServerTables(0)
        self._on_failure = fail
        self._is_sure = True
        self._non_finite = NonFinite(non_finite)
        self._gatekeeper = Gatekeeper(
            self._tables,
            consistency,
            expected_workers,
            fail=self._fail,
            answer=self._answer_held,
            on_begin=self._clocks_taken,
            first_clock=self._first_clock,
            on_complete=self._iteration_complete,
            on_stop=self._worker_stops,
            may_read=self._may_read,
            awaited=self._awaited,
            shortage=lambda: self._replicator.shortage,
        )
        self._counted = self._gatekeeper.counted
        self._ranks = self._gatekeeper.ranks
        self._buffer = self._gatekeeper.buffer
        self._replicas = replicas
        self._replicator = Replicator(
            self._tables,
            self._gatekeeper,
            transport,
            fail=self._fail,
            on_lead=self._leads,
            on_done=self._push_done,
            on_refused=self._push_refused,
            on_filled=on_filled,
            may_report=self._may_report,
            non_finite=self._non_finite,
            min_replicas=min_replicas,
        )
        self._rules = self._replicator.rules
        self._iterations: Iterations | None = None
        self._takeover = Takeover()  # where there are no iterations
        self._is_eventual = consistency.tau is None
        self._traffic = Traffic()
        self._pressure = BackPressure(self._count_held, self._count_ahead, self._is_ahead)
        self._on_map: set[int] = set()
        self._epoch = -1
        self._version = 0
        self._has_joined = False
        self._is_settled = False  # joined, and not waiting for clocks
        self._map_before: messages.ClusterMap | None = None  # one that came before the welcome
        self._early: list[_Frame] = []  # those of a map that is not here yet
        self._unnamed: list[_Frame] = []  # words of workers that are newer than the map that is here
        self._last_incarnation = 0
        self._awaits_clocks = self._has_clocks = False
        self._before_clocks: list[_Frame] = []  # workers' words to a server that does not know them yet
        self._replies: dict[Peer, np.ndarray[Any, np.dtype[np.float32]]] = {}
        self._drop_beyond: int | None = None
        self._dropped: dict[int, deque[int]] = {}  # worker → its last pushes that were dropped
        self._compensation: DelayCompensation | None = None
        if isinstance(stale, DropStale):
            self._drop_beyond = stale.beyond
        if isinstance(stale, DelayCompensate):
            self._compensation = DelayCompensation(stale.strength)
        control = ServerControl(self._tables, self._gatekeeper, self._replicator, self._traffic, self._non_finite)
        self._snapshots = control.snapshots
        replicated = self._replicator.frame_received
        self._kinds: dict[int, Callable[[Peer, Header, memoryview, memoryview], None]] = {
            PULL: self._pull, PUSH: self._push, PUSH_PULL: self._push, TICK: self._tick, CALL: control.call,
            SYNCED: self._synced, READY: self._ready, FORWARD: replicated, STATE: replicated, CLOCKS: replicated,
            CHECK: replicated, PING: replicated,
        }  # fmt: skip

    @property
    def rank(self) -> int:
        """The server's rank."""
        return self._tables.rank

    def joined(self, hello: Hello, heartbeat_s: float) -> None:
        """Take note of rank and incarnation, and of the time between heartbeats; before the first map.

        The scheduler's welcome tells them.
        """
        self._tables.rank = hello.rank
        self._replicator.joined(hello, heartbeat_s)
        self._rules = self._replicator.rules
        if self._buffer is not None:
            self._iterations = Iterations(self._rules)
        self._has_joined = self._is_settled = True
        if self._map_before is not None:
            self.members_changed(self._map_before)

    def known_tables(self) -> list[messages.KnownTable]:
        """Return the tables that this server holds, for a scheduler that has to learn them; from any thread."""
        return [
            messages.KnownTable(number=number, declared=table.declared, spec=table.spec)
            for number, table in list(self._tables.by_number.items())
        ]

    def unreachable(self) -> tuple[int, ...]:
        """Return the servers that this one cannot reach, by incarnation, for its heartbeats; from any thread."""
        return self._replicator.unreachable

    def _fail(self, error: BaseException) -> None:
        """End: this server may not be sure of its state."""
        if self._is_sure:
            self._is_sure = False
            self._on_failure(error)

    # What the transport and the scheduler's link tell.

    @must_succeed
    @override
    def connected(self, peer: Peer) -> None:
        self._traffic.connected(peer)

    @must_succeed
    def disconnected(self, peer: Peer, reason: Exception | None) -> None:
        """See :meth:`Handler.disconnected`. A cut is not a death: who is dead, the scheduler says."""
        self._replies.pop(peer, None)
        self._traffic.disconnected(peer)
        self._pressure.disconnected(peer)
        self._gatekeeper.disconnected(peer)
        self._replicator.disconnected(peer)
        if self._kept_frames():
            self._unnamed = [frame for frame in self._unnamed if frame[0] is not peer]
            self._early = [frame for frame in self._early if frame[0] is not peer]
            self._before_clocks = [frame for frame in self._before_clocks if frame[0] is not peer]

    def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        """See :meth:`Handler.frame_received`. Raises what refuses a request; of a failure nobody is told anything."""
        try:
            handle = self._kinds.get(header.kind)
            if handle is None:
                raise ProtocolError(
                    f"server {self.rank} knows no frame of kind {header.kind}; is the peer of this version?"
                )
            is_ordinary = header.epoch == self._version or header.kind not in _VERSIONED
            is_ordinary &= self._is_settled and header.clock <= MAX_CLOCK
            is_ordinary &= peer.hello.incarnation <= self._last_incarnation
            if is_ordinary or self._is_timely(peer, header, meta, body):
                handle(peer, header, meta, body)
        except PacelineError:
            if self._is_sure:
                raise
        except MemoryError:
            if self._is_sure:  # it came before anything was changed
                raise self._no_memory() from None
        except Exception as error:
            self._fail(error)

    def _no_memory(self) -> PeerError:
        return PeerError(
            f"server {self.rank} has no memory for this request: it was refused, and nothing has changed; ask for less "
            "at a time, or start more servers"
        )

    def _is_timely(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> bool:
        """Return whether a frame is to be handled now; keep it if it is early. Raises StaleEpochError if it is late."""
        if not self._has_joined:
            self._keep_frame(self._early, peer, header, meta, body)
            return False
        is_word = header.kind in _OF_MEMBERS and peer.hello.role == "worker"
        is_unnamed = peer.hello.incarnation > self._last_incarnation and peer.hello.incarnation not in self._on_map
        if is_word and is_unnamed:  # nobody joins whom no map names
            self._keep_frame(self._unnamed, peer, header, meta, body)
            return False
        if is_word and self._awaits_clocks:
            self._keep_frame(self._before_clocks, peer, header, meta, body)
            return False
        if header.clock > MAX_CLOCK:
            raise ProtocolError(f"a frame of iteration {header.clock}: they go to {MAX_CLOCK}")
        if header.epoch != self._version and header.kind in _VERSIONED:
            if header.epoch > self._version:
                self._keep_frame(self._early, peer, header, meta, body)
                return False
            if header.kind in (PULL, PUSH, PUSH_PULL, TICK):
                raise self._stale()
            if header.kind == SYNCED:  # what was sent before it was refused: it comes again by this map
                return False
        return True

    def _keep_frame(self, frames: list[_Frame], peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        frames.append((peer, header, bytes(meta), bytearray(body)))
        self._pressure.note(peer, len(meta) + len(body))

    def _kept_frames(self) -> tuple[_Frame, ...]:
        return (*self._early, *self._unnamed, *self._before_clocks)

    def _count_held(self) -> int:
        early = sum(len(meta) + len(body) for _, _, meta, body in self._kept_frames())
        return early + self._replicator.num_waiting_bytes

    def _count_ahead(self) -> int:
        return 0 if self._buffer is None else self._buffer.num_bytes

    def _is_ahead(self, peer: Peer) -> bool:
        gate = self._gatekeeper.gate
        return gate.clocks.get(peer.hello.incarnation, 0) > gate.minimum

    @must_succeed
    def members_changed(self, cluster: messages.ClusterMap) -> None:
        """Take the scheduler's new map: workers that are on it no more have left or are dead; chains may be others."""
        if not self._has_joined:
            self._map_before = cluster
            return
        if cluster.epoch < self._epoch:
            return  # overtaken by a newer one: a newcomer that is not on it has not left
        self._epoch = cluster.epoch
        self._last_incarnation = cluster.last_incarnation
        there = {member.incarnation for member in cluster.members}
        # Who joined and died between two maps was on neither; who is above the last may come yet to a new scheduler.
        absent = (self._on_map | self._counted) - there
        gone = {worker for worker in absent if worker <= cluster.last_incarnation}
        for worker in gone:
            self.worker_left(worker)
        workers = {member.incarnation for member in cluster.members if member.role == "worker"}
        self._on_map = workers | (self._on_map & absent) - gone
        self._gatekeeper.named = self._on_map
        if cluster.version > self._version:
            first, self._version = self._version == 0, cluster.version
            # Who is not there from the beginning has to hear from the server that fills it where the workers are.
            self._awaits_clocks |= first and cluster.version > 1 and not self._has_clocks
            self._is_settled = not self._awaits_clocks
            # First of all: a sum that nobody is left to have counts as safe, and what was read may be here no more.
            self._gatekeeper.refuse_held(self._stale())
            self._replicator.map_changed(cluster)
            if not self._rules.is_in_chain:
                self._forget_workers()
            early, self._early = self._early, []
            self._pressure.resume_all()
            self._receive_again(early)
        unnamed, self._unnamed = self._unnamed, []
        self._receive_again(unnamed)

    def _forget_workers(self) -> None:
        """Forget where the workers are: they do not come here while this server is in no chain."""
        for worker in list(self._ranks):
            self._forget_gradients(worker)
        self._gatekeeper.forget()
        self._takeover = Takeover()
        if self._buffer is not None:
            self._iterations = Iterations(self._rules)
        self._has_clocks, self._awaits_clocks, self._is_settled = False, True, False
        self._before_clocks = []

    def _receive_again(self, frames: Sequence[_Frame]) -> None:
        for peer, header, meta, body in frames:
            try:
                self.frame_received(peer, header, memoryview(meta), memoryview(body))
            except PacelineError as error:
                if header.kind != SYNCED:
                    peer.send_error(header, error)

    def worker_left(self, incarnation: int) -> None:
        """Stop counting a worker that left or is dead; what it pushed for an unfinished iteration is dropped."""
        joined = self._gatekeeper.leave(incarnation)
        if self._iterations is not None:
            self._push_sums(self._iterations.left(incarnation))
        else:
            self._takeover.left(incarnation)
            self._gatekeeper.look()
        if joined:
            self._forget_gradients(incarnation)

    def _forget_gradients(self, worker: int) -> None:
        self._dropped.pop(worker, None)
        for table in self._tables.by_number.values():
            table.staleness.forget(worker)
            table.refused.pop(worker, None)
        if self._compensation is not None:
            self._compensation.forget(worker)

    def close(self) -> None:
        """Stop the timer and a snapshot that is being taken, and close the connections to other servers."""
        self._gatekeeper.close()
        self._pressure.close()
        self._snapshots.close()
        self._replicator.close()

    # Chains.

    def _leads(self, buckets: Buckets, behind: frozenset[int]) -> None:
        workers = self._counted | self._on_map
        if self._version == 1:  # nobody led anything before
            workers = set()
        if self._iterations is not None:
            assert self._buffer is not None
            self._buffer.restrict({number: table.part for number, table in self._tables.by_number.items()}, buckets)
            servers = behind if self._version > 1 else frozenset()
            self._push_sums(self._iterations.lead(self._version, buckets, workers, servers))
        else:
            self._takeover.lead(self._version, buckets, workers)

    def _stale(self) -> StaleEpochError:
        return StaleEpochError(
            f"the map of the cluster has changed (server {self.rank} has version {self._version}): the request was not "
            "carried out; take the new map and send it again"
        )

    def _push_refused(self, push: ChainPush) -> None:
        if push.peer is not None and push.header is not None:
            push.peer.send_error(push.header, self._stale())

    def _push_done(self, push: ChainPush) -> None:
        """Answer a push that all servers of its chains have."""
        peer, header = push.peer, push.header
        if peer is None:
            assert self._iterations is not None
            self._iterations.acknowledged(push.sequence - 1)
            self._replicator.look()
        elif header is not None and header.kind == CALL:
            peer.send_frame(RESULT, request=header.request, meta=messages.encode(push.result))
        elif header is not None:
            clock = header.clock + (1 if header.flags & TICKS else 0)
            try:
                self._answer_push(peer, header, push.pieces[0].selection, clock, push.flags)
            except PacelineError as error:
                peer.send_error(header, error)
            except MemoryError:
                peer.send_error(header, self._no_memory())

    def _synced(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        worker = peer.hello.incarnation
        self._gatekeeper.sync(peer, header.sequence, header.clock, bool(header.flags & 1))
        if self._iterations is not None:
            self._push_sums(self._iterations.synced(worker, header.epoch))
        else:
            self._takeover.synced(worker, header.epoch, self._version)
            self._gatekeeper.look()

    def _ready(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        if self._iterations is not None:
            self._push_sums(self._iterations.synced(peer.hello.incarnation, header.epoch))

    def _clocks_taken(self, first_clock: int) -> None:
        """Begin where another server is: this one was empty, and is being filled."""
        if self._buffer is not None:
            self._iterations = Iterations(self._rules, first_clock)
        self._has_clocks, self._awaits_clocks, self._is_settled = True, False, True
        frames, self._before_clocks = self._before_clocks, []
        self._pressure.resume_all()
        asyncio.get_running_loop().call_soon(self._receive_again, frames)

    # Iterations (sequential consistency).

    def _may_read(self, clock: int) -> bool:
        if self._iterations is not None:
            return self._iterations.may_read(clock)
        return self._takeover.is_over or self._is_eventual

    def _may_report(self, buckets: Buckets) -> bool:
        return self._iterations is None or self._iterations.may_report(buckets)

    def _worker_stops(self, worker: int, clock: int) -> None:
        """Drop what a worker that retires, or is gone, has pushed for iterations that it did not finish."""
        if self._iterations is not None:
            assert self._buffer is not None
            self._buffer.forget(worker, clock)
            self._iterations.forget(worker, clock)
            self._replicator.look()  # a fill may be reported now

    def _awaited(self) -> Collection[int]:
        return self._takeover.awaited if self._iterations is None else self._iterations.awaited

    def _first_clock(self) -> int:
        return 0 if self._iterations is None else self._iterations.first_clock

    def _iteration_complete(self, iteration: int, workers: tuple[int, ...]) -> None:
        if self._iterations is not None:
            self._push_sums(self._iterations.complete(iteration, workers))
            if not self._iterations.awaited:  # else it is not applied yet
                self._snapshots.iteration_completed(iteration)

    @must_succeed
    def _push_sums(self, sums: Sequence[Sum]) -> None:
        """Apply what workers pushed in complete iterations, and send it down the chains."""
        assert self._buffer is not None
        for each in sums:
            complete = self._buffer.complete(each.iteration, each.workers)
            self._refuse_sums(complete, each)
            tables, factor = complete.tables, complete.factor
            if self._rules.has_successors or each.buckets != self._rules.primary:
                pieces = self._sum_up(tables, factor, each.buckets)
                self._replicator.push(ChainPush(PUSH_DOWN, AGGREGATE, each.iteration + 1, pieces), each.buckets)
            else:
                self._rules.admit(AGGREGATE, each.iteration + 1)
                for number, pushes in sorted(tables.items()):
                    table = self._tables.by_number[number]
                    table.staleness.histogram[0] += len(pushes)  # nothing was applied since it began
                    apply_sum(table.part, pushes, factor)
                self._buffer.recycle(tables)
                assert self._iterations is not None
                self._iterations.acknowledged(each.iteration)
            self._snapshots.iteration_completed(each.iteration)
        self._replicator.look()

    def _refuse_sums(self, complete: Complete, each: Sum) -> None:
        """Take the tables out of an iteration whose sums may not be applied; its workers will hear of it."""
        for number, pushes in list(complete.tables.items()):
            table = self._tables.by_number[number]
            top = complete.tops[number]
            if top < _SAFE_SUM and table.part.magnitudes.take(top * complete.factor):
                continue
            what = f"the sum of the gradients of iteration {each.iteration} on server {self.rank}"
            try:
                for selection, grads in sum_up(table.part, pushes, complete.factor):
                    piece = restrict(self._tables, Piece(number, selection, grads), each.buckets)
                    if piece is not None:
                        top = float(largest(piece.floats))
                        self._non_finite.check_push(table, piece.selection, piece.floats, top, what)
            except NonFiniteError as error:
                _logger.warning("%s", error)
                table.refused.update(dict.fromkeys(each.workers, str(error)))
                del complete.tables[number]

    def _sum_up(self, tables: Mapping[int, Sequence[Push]], factor: float, buckets: Buckets) -> list[Piece]:
        pieces = []
        for number, pushes in sorted(tables.items()):
            table = self._tables.by_number[number]
            table.staleness.histogram[0] += len(pushes)
            for selection, grads in sum_up(table.part, pushes, factor):
                piece = restrict(self._tables, Piece(number, selection, grads), buckets)
                if piece is not None:
                    pieces.append(piece)
        return pieces

    # Data frames.

    def _pull(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        table = self._tables.find(header.table)
        if header.flags & RANGE:
            selection = _range(table, body)
            if len(body) != 16:
                raise ProtocolError(f"a range pull has a body of 16 bytes, {len(body)} were got")
        else:
            if len(body) & 7:
                raise ProtocolError(f"a pull's body is keys of 8 bytes each, {len(body)} bytes were got")
            selection = Selection(np.frombuffer(body, np.uint64))
        self._read(peer, header, table, selection, header.clock, 0)

    def _read(
        self, peer: Peer, header: Header, table: ServerTable, selection: Selection, clock: int, flags: int
    ) -> None:
        """Answer with values as of iteration `clock`, now or when the gate opens."""
        worker = peer.hello.incarnation
        if worker not in self._counted:
            self._gatekeeper.check_member(peer)
        elif not self._gatekeeper.gate.is_open(clock) or not self._may_read(clock):
            table.part.num_values(selection)  # what is wrong with it is said now, and to the one who asked
            self._gatekeeper.hold(peer, header, selection, clock, flags)
            return
        self._answer(peer, header, table, selection, clock, flags)

    def _answer_held(self, held: HeldRead) -> None:
        table = self._tables.find(held.header.table)
        self._answer(held.peer, held.header, table, held.selection, held.clock, held.flags)

    def _answer(
        self, peer: Peer, header: Header, table: ServerTable, selection: Selection, clock: int, flags: int
    ) -> None:
        if table.refused and (refusal := table.refused.pop(peer.hello.incarnation, None)):
            raise NonFiniteError(refusal)
        count = table.part.num_values(selection)
        size = HEADER_BYTES + padded(4 * count)
        reply = self._replies.get(peer)
        if reply is None or reply.nbytes < size or peer.write_backlog_bytes:
            if size > _MAX_ANSWER_BYTES:
                raise UsageError(
                    f"{count} values of table {table.spec.name!r} were asked for at once, which take {size} bytes: at "
                    f"most {_MAX_ANSWER_BYTES} go into one answer; ask for fewer keys at a time"
                )
            reply = self._replies[peer] = np.empty(max(size, 4096) // 4, np.float32)
        values = reply[_HEADER_FLOATS : _HEADER_FLOATS + count]
        table.part.pull(selection, values)
        table.pulls += 1
        worker = peer.hello.incarnation
        if worker in self._counted:
            table.staleness.pulled(worker, clock)
            if self._compensation is not None:
                self._compensation.pulled(worker, header.table, clock, selection, values)
        frame = memoryview(reply).cast("B")  # type: ignore[arg-type]
        HEADER.pack_into(
            frame, 0, MAGIC, PROTOCOL_VERSION, VALUES, flags, header.table, header.request, header.epoch,
            self._answer_clock(clock), header.sequence, 0, 4 * count,
        )  # fmt: skip
        peer.send(frame[:size])

    def _push(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        table, flags, worker = self._tables.find(header.table), 0, peer.hello.incarnation
        whole, grads = self._split_push(table, header, body)
        selection = whole
        top = check_finite(grads, name_of(peer), table.spec.name)
        counts = worker in self._counted
        if counts:
            self._gatekeeper.check_leap(worker, header.clock)
        else:
            self._gatekeeper.check_member(peer)  # the filter has forgotten those that are gone
        if counts and self._iterations is not None:
            self._keep_for_iteration(peer, header, table, selection, grads, top)
        elif self._rules.has_successors or self._rules.short:
            self._push_down(peer, header, table, selection, grads, top)
            return
        else:
            fresh = self._rules.missing(worker, header.sequence, self._rules.primary)
            if fresh and fresh != self._rules.primary:
                selection, grads = table.part.restrict(selection, grads, fresh)
            if fresh:
                flags = self._apply(peer, header, table, selection, grads, top)
            else:  # it was applied, or dropped, when it came first
                flags = self._flags_of_duplicate(worker, header)
        self._answer_push(peer, header, whole, self._tick_of(worker, header), flags)

    def _answer_push(self, peer: Peer, header: Header, selection: Selection, clock: int, flags: int) -> None:
        """Acknowledge a push, or answer it with the values that it has asked for, as of iteration `clock`."""
        if header.kind == PUSH:
            self._acknowledge(peer, header, flags)
        else:
            self._read(peer, header, self._tables.find(header.table), selection, clock, flags)

    def _tick_of(self, worker: int, header: Header) -> int:
        """Tick, if the push ends its iteration; return the clock of what may be read behind it."""
        if not header.flags & TICKS:
            return header.clock
        self._gatekeeper.tick(worker, header.clock + 1)
        return header.clock + 1

    def _flags_of_duplicate(self, worker: int, header: Header) -> int:
        return DROPPED if header.sequence in self._dropped.get(worker, ()) else 0

    def _keep_for_iteration(
        self, peer: Peer, header: Header, table: ServerTable, selection: Selection, grads: Floats, top: float
    ) -> None:
        """Keep a new push for the end of its iteration."""
        assert self._buffer is not None
        buckets = table.part.buckets_of(selection) if self._replicas else self._rules.primary
        if buckets & ~self._rules.primary:
            raise self._stale()
        self._keep(peer.hello.incarnation, header, table, self._buffer.copy(selection, grads), top, buckets)
        self._pressure.note(peer, grads.nbytes)

    @must_succeed
    def _keep(self, worker: int, header: Header, table: ServerTable, kept: Push, top: float, buckets: Buckets) -> None:
        assert self._iterations is not None
        assert self._buffer is not None
        fresh = self._iterations.admit(worker, header.sequence, header.clock, buckets)
        if fresh:
            table.pushes += 1
            if fresh != buckets:
                kept = table.part.restrict(*kept, fresh)
            self._buffer.add(header.clock, worker, self._ranks[worker], header.table, kept, top)

    def _push_down(
        self, peer: Peer, header: Header, table: ServerTable, selection: Selection, grads: Floats, top: float
    ) -> None:
        """Apply a push here, and answer it when the servers behind have it too."""
        worker, clock = peer.hello.incarnation, header.clock
        buckets = table.part.buckets_of(selection)
        fresh = self._rules.missing(worker, header.sequence, buckets)
        if fresh:
            if worker in self._counted:
                dropped, grads, top = self._look_at_staleness(worker, header, table, selection, grads, top)
                if dropped:
                    self._answer_push(peer, header, selection, self._tick_of(worker, header), DROPPED)
                    return
            new = selection, grads
            if fresh != buckets:
                new = table.part.restrict(selection, grads, fresh)
                top = float(largest(new[1]))
            self._non_finite.check_push(table, *new, top, self._name(peer))
        table.pushes += 1
        flags = self._flags_of_duplicate(worker, header)
        pieces = [Piece(header.table, selection, grads)]
        push = ChainPush(PUSH_DOWN, worker, header.sequence, pieces, peer, header, flags)
        push.own()
        table.part.reserve(selection)
        self._replicator.push(push, buckets)
        self._pressure.note(peer, push.num_bytes)
        table.staleness.applied(worker, clock)
        self._tick_of(worker, header)

    def _look_at_staleness(
        self, worker: int, header: Header, table: ServerTable, selection: Selection, grads: Floats, top: float
    ) -> tuple[bool, Floats, float]:
        """Return whether a gradient is too stale, what it is after compensation, and its greatest magnitude."""
        staleness = table.staleness.observe(worker, header.clock)
        if self._drop_beyond is not None and staleness > self._drop_beyond:
            table.dropped += 1
            self._dropped.setdefault(worker, deque(maxlen=_DROPPED_KEPT)).append(header.sequence)
            return True, grads, top
        if self._compensation is not None and staleness:
            grads = self._compensation.compensate(worker, header.table, header.clock, table.part, selection, grads)
            top = float(largest(grads))
        return False, grads, top

    def _name(self, peer: Peer) -> str:
        return f"a push of {name_of(peer)} to server {self.rank}"

    def _split_push(self, table: ServerTable, header: Header, body: memoryview) -> tuple[Selection, Floats]:
        part, at = table.part, 16
        if header.flags & RANGE:
            selection = _range(table, body)
        else:
            count = len(body) // (8 + 4 * part.dim)
            selection, at = Selection(np.frombuffer(body, np.uint64, count)), 8 * count
        if len(body) != at + 4 * part.num_values(selection):
            raise ProtocolError(
                f"a push to table {table.spec.name!r} ({table.spec}) has a body of {len(body)} bytes, which is no "
                "whole number of keys with their gradients"
            )
        return selection, np.frombuffer(body, np.float32, offset=at)

    def _apply(
        self, peer: Peer, header: Header, table: ServerTable, selection: Selection, grads: Floats, top: float
    ) -> int:
        """Apply a new push; return the flags of the answer."""
        worker, dropped = peer.hello.incarnation, False
        if worker in self._counted:
            dropped, grads, top = self._look_at_staleness(worker, header, table, selection, grads, top)
        if not dropped:
            self._non_finite.check_push(table, selection, grads, top, self._name(peer))
            table.part.reserve(selection)  # what may fail does before the filter takes the push for applied
        table.pushes += 1
        try:
            self._rules.admit(worker, header.sequence)
            if not dropped:
                table.part.push(selection, grads)
                table.staleness.applied(worker, header.clock)
        except Exception as error:
            self._fail(error)
            raise
        return DROPPED if dropped else 0

    def _tick(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        if peer.hello.incarnation in self._counted:
            self._gatekeeper.check_leap(peer.hello.incarnation, header.clock)
        self._gatekeeper.tick(peer.hello.incarnation, header.clock + 1)
        self._acknowledge(peer, header, 0)

    def _acknowledge(self, peer: Peer, header: Header, flags: int) -> None:
        peer.send(
            HEADER.pack(
                MAGIC, PROTOCOL_VERSION, ACK, flags, header.table, header.request, header.epoch,
                self._answer_clock(header.clock), header.sequence, 0, 0,
            )
        )  # fmt: skip

    def _answer_clock(self, clock: int) -> int:
        """Return the clock of an answer: under sequential consistency, how many iterations are complete and safe."""
        return clock if self._iterations is None else self._iterations.durable


def _range(table: ServerTable, body: memoryview) -> Selection:
    if table.spec.kind != "dense" or len(body) < 16:
        raise ProtocolError(
            f"a request for a range of table {table.spec.name!r} ({table.spec}) has a body of {len(body)} bytes: a "
            "range is two numbers of 8 bytes, and of a dense table"
        )
    start, stop = np.frombuffer(body, np.uint64, 2).tolist()
    check_range(table.spec, start, stop)
    return Selection(None, start, stop)
