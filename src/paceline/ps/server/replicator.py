"""The messages between the servers of a chain, for one server: connections to successors, and frames of predecessors.

A server probes its successors periodically, because a cut cable causes no error: sent bytes only stay unacknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any, cast

from paceline.errors import PacelineError, PeerError
from paceline.protocol import Role, ServerCore, Silence, replication
from paceline.protocol.buckets import Buckets, from_bytes, to_bytes
from paceline.protocol.server import Clocks, events
from paceline.ps import messages
from paceline.ps.fail_stop import Fail, must_succeed, watch_task
from paceline.ps.messages import CHECK, CLOCKS, FORWARD, PING, PONG, READY
from paceline.ps.server.pushes import ChainPush, ReceivedBucket, check_bucket, check_push, pack, unpack
from paceline.ps.server.replica_checks import ReplicaChecks
from paceline.tables.server_tables import ServerTable, ServerTables
from paceline.tables.sparse_part import SparsePart, make_part
from paceline.transport import Endpoint, Handler, Header, Hello, Peer, Transport, frame_parts
from paceline.transport.backoff import Backoff

_CONNECT_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.1

FrameHandler = Callable[[int, Header, memoryview, memoryview], None]


class ChainLinks:
    """One connection to each wanted server, by incarnation; reconnects after a break.

    `on_up` and `on_down` are called with the server's incarnation, `on_frame` with its frames, all in the event loop;
    `fail` is called with an exception that ends a link's task.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        on_up: Callable[[int], None],
        on_down: Callable[[int], None],
        on_frame: FrameHandler,
        fail: Fail,
    ) -> None:
        self._transport = transport
        self._on_up = on_up
        self._on_down = on_down
        self._on_frame = on_frame
        self.fail = fail
        self._links: dict[int, _Link] = {}
        self._silence = Silence()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def unreachable(self) -> tuple[int, ...]:
        """The wanted servers without a message for five consecutive polls; may be read in any thread."""
        return self._silence.unreachable

    def watch(self, period_s: float) -> None:
        """Probe all servers and update :attr:`unreachable`, now and every `period_s`."""
        self._timer = asyncio.get_running_loop().call_later(period_s, self.watch, period_s)
        for target, link in self._links.items():
            if link.probe():
                self._silence.received(target)
        self._silence.poll(self._links)

    def frame_received(self, target: int, header: Header, meta: memoryview, body: memoryview) -> None:
        self._silence.received(target)
        if header.kind != PONG:
            self._on_frame(target, header, meta, body)

    def connect_to(self, targets: Mapping[int, Endpoint], hello: Hello) -> None:
        """Keep connections to exactly these servers; `hello` identifies this server."""
        for removed in self._links.keys() - targets.keys():
            self._links.pop(removed).stop()
        for target, endpoint in targets.items():
            if target not in self._links:
                self._links[target] = _Link(target, endpoint, hello, self)

    def peer(self, target: int) -> Peer | None:
        link = self._links.get(target)
        return None if link is None else link.peer

    def renew(self, target: int) -> None:
        """Close the connection to a server. On the next connection, pushes that the server may lack are resent."""
        peer = self.peer(target)
        if peer is not None:
            peer.abort()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for link in self._links.values():
            link.stop()
        self._links = {}


class _Link(Handler):
    def __init__(self, target: int, endpoint: Endpoint, hello: Hello, owner: ChainLinks) -> None:
        self.peer: Peer | None = None
        self._target = target
        self._endpoint = endpoint
        self._hello = hello
        self._owner = owner
        self._broken = asyncio.Event()
        self._is_stopped = False
        self._taken = -1  # bytes that the system had accepted at the last probe; -1 if no bytes waited
        self._task = asyncio.get_running_loop().create_task(self._keep())
        watch_task(self._task, owner.fail)

    async def _keep(self) -> None:
        owner, backoff = self._owner, Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            self._broken.clear()
            try:
                peer = await owner._transport.open(self, self._endpoint, self._hello, timeout_s=_CONNECT_S)
            except (PacelineError, OSError):
                await asyncio.sleep(backoff.next_s())
                continue
            if self._is_stopped:
                peer.abort()
                return
            self.peer, self._taken = peer, -1
            # after the reply to this PING the server no longer counts as unreachable, even if nothing else is sent
            peer.send(*frame_parts(PING))
            owner._on_up(self._target)
            await self._broken.wait()
            self.peer = None
            owner._on_down(self._target)
            backoff.reset()
            await asyncio.sleep(backoff.next_s())

    def probe(self) -> bool:
        """Send a probe unless messages wait to be sent; return whether the server is reachable without a probe.

        While messages wait to be sent, the reply to a probe would arrive late. In this case, the server counts as
        reachable if the operating system has taken more bytes since the last call. It takes more bytes only after the
        other end has acknowledged earlier bytes.
        """
        peer = self.peer
        if peer is None:
            return False
        waiting = peer.write_backlog_bytes
        taken = peer.statistics().bytes_sent - waiting
        takes = 0 <= self._taken < taken
        self._taken = taken if waiting else -1
        if not waiting:
            peer.send(*frame_parts(PING))
        return takes

    def stop(self) -> None:
        self._is_stopped = True
        peer, self.peer = self.peer, None
        if peer is not None:
            peer.abort()  # unsent frames are of an old view
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._task.cancel()

    def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        if peer is self.peer:
            self._owner.frame_received(self._target, header, meta, body)

    def disconnected(self, peer: Peer, reason: Exception | None) -> None:
        self._broken.set()


class CheckRounds:
    """The rounds of comparisons of one server. `fail` ends the server with an exception."""

    def __init__(self, core: ServerCore, links: ChainLinks | None, checks: ReplicaChecks, fail: Fail) -> None:
        self._core = core
        self._links = links
        self._checks = checks
        self._fail = fail
        self._timer: asyncio.TimerHandle | None = None
        self.targets: tuple[int, ...] = ()

    def begin(self) -> None:
        self._later(self._checks.pause_s(None))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _later(self, pause_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._next)

    @must_succeed
    def _next(self) -> None:
        took_s = None
        found = self._checks.next(self._core, self.targets)
        if found is not None:
            began = time.perf_counter()
            self.send(*found)
            took_s = time.perf_counter() - began
        self._later(self._checks.pause_s(took_s))

    def send(self, target: int, bucket: int) -> bool:
        """Send the digest of a bucket to a successor; return False without a connection."""
        peer = None if self._links is None else self._links.peer(target)
        if peer is not None:
            info = self._checks.describe(self._core, bucket)
            peer.send(*frame_parts(CHECK, epoch=self._core.version, meta=messages.encode(info)))
        return peer is not None


class Replicator:
    """Sends and reads the messages between the servers of a chain, for one server.

    Without `links` the server can only be the last server of every chain.
    """

    def __init__(
        self, core: ServerCore, tables: ServerTables, links: ChainLinks | None, checks: ReplicaChecks, *, fail: Fail
    ) -> None:
        self._core = core
        self._tables = tables
        self._links = links
        self._fail = fail
        self.checks = checks
        self.hello = Hello(role="server")
        self._endpoints: dict[int, Endpoint] = {}
        self._sources: dict[int, Peer] = {}  # predecessor → its connection to this server
        self.rounds = CheckRounds(core, links, checks, fail)

    def joined(self, hello: Hello, heartbeat_s: float) -> None:
        """Set this server's identity, and start probes and comparisons. Call it before the first view."""
        self.hello = hello
        if self._links is not None:
            self._links.watch(heartbeat_s)
            self.rounds.begin()

    @property
    def incarnation(self) -> int:
        return self.hello.incarnation

    def view_changed(self, view: messages.View) -> None:
        self._endpoints = {
            member.incarnation: member.address
            for member in view.members
            if member.role is Role.SERVER and member.address is not None
        }
        self.rounds.targets = tuple(self._endpoints)

    def disconnected(self, peer: Peer) -> None:
        if self._sources.get(peer.hello.incarnation) is peer:
            del self._sources[peer.hello.incarnation]

    def close(self) -> None:
        self.rounds.close()

    def have_links(self, targets: frozenset[int]) -> None:
        if self._links is not None:
            known: Mapping[int, Endpoint] = {
                target: self._endpoints[target] for target in targets if target in self._endpoints
            }
            self._links.connect_to(known, self.hello)

    def _peer(self, target: int) -> Peer | None:
        return None if self._links is None else self._links.peer(target)

    def forward(self, push: ChainPush, target: int, number: int, buckets: Buckets) -> None:
        peer = self._peer(target)
        if peer is None:
            return  # without a connection: the core forwards the push again after a reconnection
        infos, body = pack(push.part(self._tables, buckets))
        info = messages.ForwardInfo(push.incarnation, push.operation, to_bytes(buckets), infos)
        peer.send(
            *frame_parts(
                FORWARD,
                request=number,
                epoch=self._core.version,
                sequence=push.sequence,
                meta=messages.encode(info),
                body=body,
            )
        )

    def send_ready(self, target: int, version: int) -> None:
        peer = self._peer(target)
        if peer is not None:
            peer.send(*frame_parts(READY, epoch=version))

    def send_clocks(self, target: int) -> None:
        peer = self._peer(target)
        if peer is not None:
            tables = (
                (number, table.declared, table.spec, table.revision) for number, table in self._tables.by_number.items()
            )
            parts = ((number, table.part) for number, table in self._tables.by_number.items())
            known = self._core.known_clocks()
            info = messages.ClocksInfo(
                tuple(tables),
                known.workers,
                known.num_missing,
                known.minimum,
                tuple((number, part.pass_number, part.rows_of) for number, part in parts if part.pass_number),
            )
            peer.send(*frame_parts(CLOCKS, epoch=self._core.version, meta=messages.encode(info)))

    def read(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> events.Event | None:
        """Return the core's event for a predecessor's frame of this server's view or of an older view."""
        if header.kind == PING:
            peer.send(*frame_parts(PONG))
            return None
        source = peer.hello.incarnation
        self._sources.setdefault(source, peer)
        if header.kind == CLOCKS:
            # CLOCKS is the first frame of a connection. Later frames of older connections are ignored.
            self._sources[source] = peer
            return self._read_clocks(messages.decode_clocks(meta))
        if self._sources[source] is not peer:
            return None
        if header.kind == FORWARD:
            return self._read_forward(peer, header, messages.decode_forward(meta), body)
        if header.kind == CHECK:
            self.checks.compare(self._core, source, peer.hello.rank, header.epoch, messages.decode_check(meta))
            return None
        return self._read_state(peer, header, messages.decode_state(meta), body)

    def _read_forward(
        self, peer: Peer, header: Header, info: messages.ForwardInfo, body: memoryview
    ) -> replication.Forwarded:
        pieces, buckets = list(unpack(info.pieces, body)), from_bytes(info.buckets)
        if header.epoch == self._core.version:
            check_push(self._tables, info.operation, pieces, buckets)
        push = ChainPush(info.operation, info.incarnation, header.sequence, pieces, peer, header, buckets=buckets)
        return replication.Forwarded(
            push, peer.hello.incarnation, info.incarnation, header.sequence, header.epoch, buckets
        )

    def _read_state(
        self, peer: Peer, header: Header, info: messages.StateInfo, body: memoryview
    ) -> replication.StateReceived:
        state = tuple((incarnation, sequence, from_bytes(mask)) for incarnation, sequence, mask in info.filter)
        token = ReceivedBucket(peer, header.request, info.order, list(unpack(info.pieces, body)))
        check_bucket(self._tables, info.bucket, token.pieces)
        return replication.StateReceived(token, peer.hello.incarnation, header.epoch, info.bucket, state)

    def _read_clocks(self, info: messages.ClocksInfo) -> events.ClocksReceived:
        is_any_new = False
        for number, declared, spec, revision in info.tables:
            if number not in self._tables.by_number:
                self._add_table(number, declared)
                is_any_new = True
            self._set_update(number, spec.update, revision)
        for number, current, rows_of in info.passes:
            part = self._tables.find(number).part
            if part.spec.kind == "sparse" and part.pass_number < current:
                cast(SparsePart, part).begin_pass(current, rows_of)
        # Declare new tables to the successors before pushes, because the client may not know the successors.
        if is_any_new:
            self.tables_changed()
        return events.ClocksReceived(Clocks(info.workers, info.num_missing, info.minimum))

    @must_succeed
    def tables_changed(self) -> None:
        """Send new tables, hyperparameters or passes to the successors."""
        if self._links is not None:
            for target in self._endpoints:
                self.send_clocks(target)

    def set_update(self, number: int, update: dict[str, Any], revision: int) -> None:
        """Set hyperparameters unless the table has a later revision; notify the successors. Raises UsageError."""
        self._set_update(number, update, revision)
        self.tables_changed()

    def _set_update(self, number: int, update: dict[str, Any], revision: int) -> None:
        table = self._tables.find(number)
        if revision <= table.revision:
            return  # a repeat, or a change with a lower revision than the table's
        before = table.spec
        table.set_update(update, revision)
        # the rows depend on the order of pushes and this change, so the hash of the order includes this change
        if table.spec != before:
            self.checks.orders.applied(number, zlib.crc32(messages.encode(update)), self._core.held)

    @must_succeed
    def _add_table(self, number: int, spec: messages.TableSpec) -> None:
        self._tables.by_number[number] = self.new_table(spec)

    def new_table(self, spec: messages.TableSpec) -> ServerTable:
        """Return an empty table with this server's buckets. Raises PeerError without enough memory."""
        try:
            part = make_part(spec, self._core.held, self._tables.memory)
        except MemoryError:
            raise PeerError(f"server {self._tables.rank} has no memory for its part of {spec}") from None
        part.set_primary(self._core.primary)
        return ServerTable(spec, part)
