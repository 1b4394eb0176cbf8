"""A parameter server: frames in, tables updated, answers out.

The server runs in one asyncio loop and one thread, without locks. The core decides when a frame is handled. `Requests`
(for clients), `Replicator` (for servers) or `ServerControl` then decodes the frame. The resulting event goes to the
`Runtime`, which carries out the instructions of :class:`~paceline.protocol.server.ServerCore`.
"""

from __future__ import annotations

from collections.abc import Callable

from typing_extensions import override

from paceline.errors import NonFiniteError, PacelineError, ProtocolError
from paceline.filters.chain import UnknownKeysError
from paceline.protocol import ServerCore, parse_consistency, parse_stale_policy
from paceline.protocol.server import Timing, TimingClass, events
from paceline.protocol.server.progress import POSTPONED
from paceline.ps import messages
from paceline.ps.fail_stop import Fail, must_succeed
from paceline.ps.messages import (
    CALL,
    CHECK,
    CLOCKS,
    FILTERED_PULL,
    FILTERED_PUSH,
    FILTERED_PUSH_PULL,
    FORWARD,
    PING,
    PULL,
    PUSH,
    PUSH_PULL,
    READY,
    RESULT,
    STATE,
    SYNCED,
    TICK,
    TICKS,
)
from paceline.ps.server.answers import Answers
from paceline.ps.server.back_pressure import BackPressure
from paceline.ps.server.control import ServerControl, Traffic
from paceline.ps.server.filtered import UNFILTERED, PeerFilters
from paceline.ps.server.replica_checks import ReplicaChecks
from paceline.ps.server.requests import Requests
from paceline.ps.server.runtime import Runtime
from paceline.ps.server.snapshots import ServerSnapshots
from paceline.ps.server.stale_gradients import StaleGradients
from paceline.tables.bounds import MAX_CLOCK
from paceline.tables.memory.blocks import RowMemory
from paceline.tables.memory.limit import MemoryLimit
from paceline.tables.non_finite import NonFinite
from paceline.tables.server_tables import ServerTables
from paceline.transport import Handler, Header, Hello, Peer, Transport, frame_parts

_KINDS = {
    **dict.fromkeys((PULL, PUSH, PUSH_PULL, FILTERED_PULL, FILTERED_PUSH, FILTERED_PUSH_PULL), TimingClass.DATA),
    **dict.fromkeys((FORWARD, STATE, READY, CLOCKS, CHECK), TimingClass.CHAIN),
    TICK: TimingClass.TICK,
    SYNCED: TimingClass.SYNCED,
    CALL: TimingClass.CALL,
    PING: TimingClass.OTHER,
}
_CALL, _IMMEDIATE = TimingClass.CALL, Timing.IMMEDIATE


class Server(Handler):
    """The tables of one server, its place in the chains, and its gate.

    Rows beyond the `memory_limit` are stored in files. The `transport` is for connections to other servers; a single
    server needs none. `on_filled` receives the messages for the scheduler, and does not raise. `fail` is called with an
    exception after which this server must not continue (:mod:`paceline.ps.fail_stop`). If `fail` returns, the server
    reports the exception to no peer.
    """

    def __init__(
        self,
        settings: messages.ClusterSettings,
        *,
        fail: Fail,
        memory_limit: MemoryLimit | None = None,
        transport: Transport | None = None,
        on_filled: Callable[[messages.Filled], None] = lambda filled: None,
    ) -> None:
        self._on_failure = fail
        self._is_sure = True
        self.tables = ServerTables(0, RowMemory(memory_limit))
        self.core = ServerCore(
            parse_consistency(settings.consistency),
            expected_workers=settings.num_workers,
            replicas=settings.replicas,
            min_replicas=settings.min_replicas,
        )
        policy = StaleGradients(parse_stale_policy(settings.stale))
        self.filters = PeerFilters()
        self._answers = Answers(self.tables, self.core, policy, settings.min_replicas, self.filters)
        guard = NonFinite(settings.non_finite)
        checks = ReplicaChecks(self.tables)
        self.snapshots = ServerSnapshots(self.tables, self.core, guard, checks.orders)
        self.runtime = Runtime(
            self.core,
            self.tables,
            answers=self._answers,
            stale=policy,
            non_finite=guard,
            snapshots=self.snapshots,
            checks=checks,
            transport=transport,
            on_filled=on_filled,
            fail=self._fail,
        )
        self.replicator = self.runtime.replicator
        sums = self.runtime.sums
        self.pressure = BackPressure(self.core, None if sums is None else sums.buffer)
        self._traffic = Traffic()
        self._control = ServerControl(self.runtime, self._traffic, guard, self.snapshots)
        requests = self._requests = Requests(self.runtime, self.pressure, guard)
        self._handlers: dict[int, Callable[[Peer, Header, memoryview, memoryview], None]] = {
            PULL: requests.pull, PUSH: requests.push, PUSH_PULL: requests.push, TICK: requests.tick, CALL: self._call,
            SYNCED: requests.synced, READY: self._ready, FORWARD: self._chain, STATE: self._chain, CLOCKS: self._chain,
            CHECK: self._chain, PING: self._chain,
        }  # fmt: skip
        self._handlers.update(dict.fromkeys(UNFILTERED, self._decode))
        self._closed: set[Peer] = set()  # peers whose connections this server has closed, until `disconnected`

    @property
    def rank(self) -> int:
        return self.tables.rank

    @must_succeed
    def joined(self, hello: Hello, heartbeat_s: float) -> None:
        """Set rank, incarnation and heartbeat period from the scheduler's welcome. Call it before the first view."""
        self.tables.rank = hello.rank
        self.replicator.joined(hello, heartbeat_s)
        self.runtime.carry_out(self.core.joined(hello.incarnation))
        self._receive_early()

    def known_tables(self) -> list[messages.KnownTable]:
        """Return this server's tables for a restarted scheduler; may be called from any thread."""
        return [
            messages.KnownTable(number=number, declared=table.declared, spec=table.spec, revision=table.revision)
            for number, table in list(self.tables.by_number.items())
        ]

    def unreachable(self) -> tuple[int, ...]:
        """Return the unreachable servers, by incarnation, for heartbeats; may be called from any thread."""
        return () if self.runtime.links is None else self.runtime.links.unreachable

    def _fail(self, error: BaseException) -> None:
        """End this server, because its state may be inconsistent."""
        if self._is_sure:
            self._is_sure = False
            self._on_failure(error)

    def close(self) -> None:
        """Stop the timers and a snapshot in progress, and close the connections to other servers."""
        self.pressure.close()
        self.runtime.close()
        self.tables.memory.read_ahead.close()

    @override
    @must_succeed
    def connected(self, peer: Peer) -> None:
        self._traffic.connected(peer)

    @override
    @must_succeed
    def disconnected(self, peer: Peer, reason: Exception | None) -> None:
        """Drop a connection. Its process may still live: only the scheduler declares processes dead."""
        self._answers.disconnected(peer)
        self.filters.disconnected(peer)
        self._closed.discard(peer)
        self._traffic.disconnected(peer)
        self.pressure.disconnected(peer)
        self.runtime.disconnected(peer)

    @override
    def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        """Handle a frame. Raises the error that rejects a request; after a failure no answer is sent."""
        try:
            handle = self._handlers.get(header.kind)
            if handle is None:
                raise ProtocolError(
                    f"server {self.rank} does not support frames of kind {header.kind}: run the same version everywhere"
                )
            kind = _KINDS[header.kind]
            if kind is _CALL and peer.hello.role != "worker":
                kind = TimingClass.OTHER
            timing = self.core.time(kind, peer.hello.incarnation, header.epoch)
            if timing in POSTPONED:
                self.core.postpone(timing, peer.hello.incarnation, (peer, header, bytes(meta), bytearray(body)))
                self.pressure.record(peer, len(meta) + len(body))
            elif header.clock > MAX_CLOCK:
                raise ProtocolError(f"a frame of iteration {header.clock}: expected at most {MAX_CLOCK}")
            elif timing is Timing.STALE:
                raise self._answers.stale()
            elif timing is _IMMEDIATE:
                handle(peer, header, meta, body)
        except PacelineError as error:
            if self._is_sure:
                if isinstance(error, NonFiniteError):
                    self._end_iteration(peer, header)
                raise
        except MemoryError as error:
            if self._is_sure:  # the core was not changed
                self._end_iteration(peer, header)
                raise self._answers.no_memory(error) from None
        except Exception as error:
            self._fail(error)

    def _end_iteration(self, peer: Peer, header: Header) -> None:
        """Count the tick of a rejected push, because the worker continues with the next iteration."""
        is_push = _KINDS[header.kind] is TimingClass.DATA and header.epoch == self.core.version
        if is_push and header.flags & TICKS and header.clock <= MAX_CLOCK:
            self._requests.count_tick(peer, header)

    @must_succeed
    def view_changed(self, view: messages.View) -> None:
        """Apply a new view of the scheduler: excluded workers have left or died, and chains may have changed."""
        if view.epoch >= self.core.epoch:
            self.replicator.view_changed(view)
        version = self.core.version
        self.runtime.feed(view)
        if self.core.version > version:
            self.pressure.resume_all()
            self.filters.forget_keys()
        self._receive_early()

    def _receive_early(self) -> None:
        for peer, header, meta, body in self.runtime.take_early():
            if peer in self._closed:
                continue
            try:
                self.frame_received(peer, header, memoryview(meta), memoryview(body))
            except PacelineError as error:
                if header.kind != SYNCED:
                    peer.send_error(header, error)

    def _decode(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        """Handle a filtered frame.

        If this server lacks the keys, close the connection. The worker then resends all frames in order, with the keys.
        An error reply would not suffice: the worker may be waiting for another server, which waits for these frames.
        """
        try:
            decoded, values = self.filters.decode(peer, header, meta, body)
        except UnknownKeysError:
            self._closed.add(peer)
            peer.close()
            return
        self._handlers[decoded.kind](peer, decoded, memoryview(b""), values)

    def _chain(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        """Handle a frame of a predecessor.

        An invalid frame is rejected. If memory is short the server ends, because otherwise the chain would wait for
        this server.
        """
        try:
            event = self.replicator.read(peer, header, meta, body)
            if event is not None:
                self.runtime.feed(event)
        except MemoryError as error:
            self._fail(error)
        if header.kind == CLOCKS:
            self.pressure.resume_all()
            self._receive_early()

    def _ready(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        self.runtime.feed(events.ReadyReceived(peer.hello.incarnation, header.epoch))

    def _call(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        request = messages.decode_to_server(meta)
        match request:
            case messages.JoinClock(rank=rank, clock=clock):
                self._answers.check_member(peer)
                self.runtime.feed(events.WorkerJoining((peer, header), peer.hello.incarnation, rank, clock))
            case messages.Retire():
                self.runtime.feed(events.WorkerRetired(peer.hello.incarnation))
                peer.send(*frame_parts(RESULT, request=header.request, meta=messages.encode(None)))
            case messages.WriteRecords() | messages.Erase():
                self._requests.push_own(self._control.write_or_erase(peer, header, request, body))
            case messages.EraseUnseen():
                self._requests.push_own(self._control.erase_unseen(peer, header, request))
            case _:
                self._control.call(peer, header, request)
