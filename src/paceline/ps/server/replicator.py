"""One server's part in chains, carried out: pushes forwarded and answered, buckets sent and received.

The rules are :class:`paceline.protocol.replication.Replication`'s; the connections to the servers behind this one are
`ChainLinks`. Whom it tells: the server, of what it leads now (`on_lead`), of pushes that the chain has (`on_done`) or
that came under an old map (`on_refused`), and the scheduler, of filled buckets.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.errors import PeerError
from paceline.protocol import replication
from paceline.protocol.buckets import Buckets, buckets_in, from_bytes, to_bytes
from paceline.protocol.replication import Replication
from paceline.ps import messages
from paceline.ps.fail_stop import Fail, must_succeed
from paceline.ps.messages import CHECK, CLOCKS, FORWARD, FORWARDED, PING, PONG, READY, STATE, STATE_TAKEN
from paceline.ps.server.chain_links import ChainLinks
from paceline.ps.server.gatekeeper import Gatekeeper
from paceline.ps.server.pushes import ChainPush, Piece, apply, check_bucket, check_push, pack, unpack
from paceline.ps.server.replica_checks import ReplicaChecks
from paceline.ps.server.withheld import WithheldPushes
from paceline.tables.non_finite import NonFinite
from paceline.tables.part import Selection
from paceline.tables.server_tables import ServerTable, ServerTables
from paceline.tables.sparse_part import make_part
from paceline.transport import Endpoint, Header, Hello, Kind, Peer, Transport, error_of

_FILL_PAUSE = 4.0  # times what a bucket took of the time of others
_SLOW_LINK = 12.5e6  # bytes per second: the slowest line on which fills shall leave room for others
_logger = logging.getLogger("paceline.ps")


class _State:
    """A bucket that came whole."""

    __slots__ = ("number", "order", "peer", "pieces")

    def __init__(self, peer: Peer, number: int, order: int, pieces: list[Piece]) -> None:
        self.peer = peer
        self.number = number
        self.order = order
        self.pieces = pieces


@dataclass(slots=True)
class _Sent:
    """A bucket that is on its way to a server that is being filled: since when, its bytes, what to send it took."""

    began_s: float
    size: int
    busy_s: float = 0.0


class Replicator:
    """The chains of one server.

    `transport` makes its connections to other servers; without one it can only be the last of every chain. `may_report`
    says whether the scheduler may be told that a server has buckets; when it may change, :meth:`look` is to be called.
    `fail` is called with an exception after which the server must not go on.
    """

    def __init__(
        self,
        tables: ServerTables,
        gatekeeper: Gatekeeper,
        transport: Transport | None,
        *,
        fail: Fail,
        on_lead: Callable[[Buckets, frozenset[int]], None],
        on_done: Callable[[ChainPush], None],
        on_refused: Callable[[ChainPush], None],
        on_filled: Callable[[messages.Filled], None],
        may_report: Callable[[Buckets], bool],
        non_finite: NonFinite,
        min_replicas: int = 0,
    ) -> None:
        self._tables = tables
        self._non_finite = non_finite
        self._gatekeeper = gatekeeper
        self._fail = fail
        self._on_lead = on_lead
        self._on_done = on_done
        self._on_refused = on_refused
        self._on_filled = on_filled
        self._may_report = may_report
        self._min_replicas = min_replicas
        self._withheld = WithheldPushes(tables, min_replicas)
        self._reports: dict[int, replication.Report] = {}  # by target: those that wait
        self._links: ChainLinks | None = None
        if transport is not None:
            self._links = ChainLinks(
                transport, on_up=self._link_up, on_down=self._link_down, on_frame=self._link_frame, fail=fail
            )
        self._hello = Hello(role="server")
        self._endpoints: dict[int, Endpoint] = {}
        self._sources: dict[int, Peer] = {}  # the connection by which each server before this one sends
        self._sequences = itertools.count(1)
        self._fills: set[int] = set()  # servers to which a bucket will be sent soon
        self._states: dict[int, _Sent] = {}  # servers to which a bucket is on its way
        self._check: asyncio.TimerHandle | None = None
        self.checks = ReplicaChecks(tables)
        self.rules = Replication(0)

    def joined(self, hello: Hello, heartbeat_s: float) -> None:
        """Take note of who we are, and watch the links at every heartbeat; before the first map."""
        self._hello = hello
        self.rules = Replication(hello.incarnation, self._min_replicas)
        if self._links is not None:
            self._links.watch(heartbeat_s)
            self._check_later(self.checks.pause_s(None))

    @property
    def incarnation(self) -> int:
        """This server's."""
        return self._hello.incarnation

    @property
    def unreachable(self) -> tuple[int, ...]:
        """The servers behind this one, by incarnation, that it cannot reach; may be read in any thread."""
        return () if self._links is None else self._links.unreachable

    @property
    def num_withheld(self) -> int:
        """How many pushes of clients wait until their chains have replicas enough."""
        return len(self._withheld)

    @property
    def num_waiting_bytes(self) -> int:
        """How much memory the pushes take that wait for the servers behind, or for replicas enough."""
        return sum(token.num_bytes for token in self.rules.waiting if isinstance(token, ChainPush))

    @property
    def shortage(self) -> str:
        """In words, a bucket of this primary with too few replicas to acknowledge anything; empty if there is none."""
        return self._withheld.shortage(self.rules, self.rules.primary)

    def close(self) -> None:
        """Close the connections to other servers."""
        self._withheld.close()
        if self._check is not None:
            self._check.cancel()
        if self._links is not None:
            self._links.close()

    # The map.

    @must_succeed
    def map_changed(self, cluster: messages.ClusterMap) -> None:
        """Take the chains of a newer map."""
        self._endpoints = {
            member.incarnation: member.endpoint
            for member in cluster.members
            if member.role == "server" and member.endpoint is not None
        }
        self._reports = {}
        self._obey(self.rules.handle(replication.Change(cluster.version, cluster.chain_groups())))
        for target in self.rules.filling:  # it may have been in no chain by a map that this server has missed
            self._send_clocks(target)

    def disconnected(self, peer: Peer) -> None:
        """Forget a connection: of a server before this one, or of a client whose pushes are not answered."""
        self._withheld.disconnected(peer, self.rules)
        if self._sources.get(peer.hello.incarnation) is peer:
            del self._sources[peer.hello.incarnation]

    # Pushes.

    def push(self, push: ChainPush, buckets: Buckets) -> None:
        """Apply a push of a client (or the sum of an iteration) here, and send it down the chains."""
        push.buckets = buckets
        self._carry_out(replication.Push(push, push.incarnation, push.sequence, self.rules.version, buckets))

    def next_sequence(self) -> int:
        """Return a number for what this server itself sends down a chain in its own name."""
        return next(self._sequences)

    def _obey(self, instructions: list[replication.Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case replication.Apply(token, buckets):
                    push = _as_push(token)
                    self.checks.orders.applied(push.incarnation, push.sequence, buckets)
                    apply(self._tables, push, buckets)
                case replication.Forward(token, target, number, buckets):
                    self._forward(_as_push(token), target, number, buckets)
                case replication.Acknowledge(token):
                    self._withheld.release(_as_push(token))
                    self._acknowledge(_as_push(token))
                case replication.Withhold(token):
                    self._withheld.hold(_as_push(token), self.rules)
                case replication.Refuse(token):
                    self._withheld.release(_as_push(token))
                    self._on_refused(_as_push(token))
                case replication.Load(token, bucket):
                    assert isinstance(token, _State)
                    self._load(token, bucket)
                case replication.Drop(buckets):
                    self.checks.drop(buckets)
                    for table in self._tables.by_number.values():
                        table.part.drop(buckets)
                case replication.Hold(buckets):
                    for table in self._tables.by_number.values():
                        table.part.hold(buckets)
                case replication.Lead(buckets, _, behind):
                    for table in self._tables.by_number.values():
                        table.part.set_primary(buckets)
                    self._on_lead(buckets, behind)
                case replication.Ready(target, version):
                    peer = self._peer(target)
                    if peer is not None:
                        peer.send_frame(READY, epoch=version)
                case replication.Links(targets):
                    self._want(targets)
                case replication.Report():
                    self._reports[instruction.target] = instruction
                    self._report()
                case replication.Forget(token):
                    if isinstance(token, ChainPush):
                        self._forget(token)
                case replication.Retry():
                    pass  # the server itself keeps what is early

    def look(self) -> None:
        """Serve the reads and report the fills that had to wait, and need not any more."""
        self._gatekeeper.look()
        self._report()

    def _report(self) -> None:
        for target, report in list(self._reports.items()):
            if self._may_report(report.buckets):
                del self._reports[target]
                filled = messages.Filled(version=report.version, target=target, buckets=to_bytes(report.buckets))
                self._on_filled(filled)

    def _forget(self, push: ChainPush) -> None:
        """Have a client that still waits ask again: it has the newer map by which the push came another time."""
        if push.peer is not None and push.peer.hello.role != "server":
            self._on_refused(push)

    def _acknowledge(self, push: ChainPush) -> None:
        if push.peer is not None and push.peer.hello.role == "server":
            assert push.header is not None
            push.peer.send_frame(FORWARDED, request=push.header.request)
        else:
            self._on_done(push)

    # Sending to the servers behind.

    def _want(self, targets: frozenset[int]) -> None:
        if self._links is not None:
            known: Mapping[int, Endpoint] = {
                target: self._endpoints[target] for target in targets if target in self._endpoints
            }
            self._links.want(known, self._hello)
            self._states = {}
            self._pump_all()

    def _peer(self, target: int) -> Peer | None:
        return None if self._links is None else self._links.peer(target)

    def _forward(self, push: ChainPush, target: int, number: int, buckets: Buckets) -> None:
        peer = self._peer(target)
        if peer is None:
            return  # it is forwarded again when there is a connection
        infos, body = pack(push.part(self._tables, buckets))
        info = messages.ForwardInfo(push.incarnation, push.operation, to_bytes(buckets), infos)
        peer.send_frame(
            FORWARD,
            request=number,
            epoch=self.rules.version,
            sequence=push.sequence,
            meta=messages.encode(info),
            body=body,
        )

    @must_succeed
    def _link_up(self, target: int) -> None:
        self._states.pop(target, None)
        self._send_clocks(target)
        self._obey(self.rules.handle(replication.LinkUp(target)))
        self._pump_soon(target)

    @must_succeed
    def _link_down(self, target: int) -> None:
        self._obey(self.rules.handle(replication.LinkDown(target)))

    @must_succeed
    def _link_frame(self, target: int, header: Header, meta: memoryview, body: memoryview) -> None:
        if header.kind == FORWARDED:
            self._obey(self.rules.handle(replication.Acknowledged(target, header.request)))
            self.look()  # a sum that this server has inherited may be safe now
            self._pump_all()
        elif header.kind == STATE_TAKEN:
            self._state_taken(target, header)
        elif header.kind == Kind.ERROR:
            _logger.error("a server behind this one did not take a frame, and is sent all again: %s", error_of(meta))
            assert self._links is not None
            self._links.renew(target)

    @must_succeed
    def tables_changed(self) -> None:
        """Tell the servers behind this one of a new table, or of other hyperparameters."""
        if self._links is not None:
            for target in self._endpoints:
                self._send_clocks(target)

    def _send_clocks(self, target: int) -> None:
        peer = self._peer(target)
        if peer is not None:
            tables = ((number, table.declared, table.spec) for number, table in self._tables.by_number.items())
            info = self._gatekeeper.clocks_info(tuple(tables))
            peer.send_frame(CLOCKS, epoch=self.rules.version, meta=messages.encode(info))

    # Filling.

    def _pump_soon(self, target: int) -> None:
        if target not in self._fills:
            self._fills.add(target)
            asyncio.get_running_loop().call_soon(self._pump, target)

    def _pump_all(self) -> None:
        for target in self.rules.filling:
            self._pump_soon(target)

    def _pump(self, target: int) -> None:
        """Send the next bucket to a server that is being filled: one at a time, so that nobody waits long."""
        self._fills.discard(target)
        peer = self._peer(target)
        if peer is None:
            return
        if target in self._states:
            return  # it will say that it has it
        fill = self.rules.next_fill(target)
        if fill is None:
            return
        began_s, busy_s = time.monotonic(), time.thread_time()
        number, bucket, state = fill
        pieces = []
        for table_number, table in self._tables.by_number.items():
            keys, records = table.part.read_bucket(bucket)
            if len(keys):
                pieces.append(Piece(table_number, Selection(keys), records.reshape(-1)))
        infos, body = pack(pieces)
        entries = tuple((incarnation, sequence, to_bytes(mask)) for incarnation, sequence, mask in state)
        info = messages.StateInfo(bucket, self.checks.orders.of(bucket), entries, infos)
        self._states[target] = sent = _Sent(began_s, size=sum(part.nbytes for part in body))
        peer.send_frame(STATE, request=number, epoch=self.rules.version, meta=messages.encode(info), body=body)
        sent.busy_s = time.thread_time() - busy_s

    def _state_taken(self, target: int, header: Header) -> None:
        """Go on when four times as much time has passed as the bucket took: who works meanwhile gets most of it.

        What it took is processors' time at both ends, and the line's. That it waited, where much else happens, is no
        reason to leave buckets without their replicas for longer.
        """
        sent = self._states.pop(target, None)
        self._obey(self.rules.handle(replication.Confirmed(target, header.request)))
        if target not in self._fills:
            self._fills.add(target)
            took_s = 0.0
            if sent is not None:
                passed_s = time.monotonic() - sent.began_s
                took_s = min(sent.busy_s + header.clock / 1e6 + sent.size / _SLOW_LINK, passed_s)
            asyncio.get_running_loop().call_later(_FILL_PAUSE * took_s, self._pump, target)

    # Comparing.

    def _check_later(self, pause_s: float) -> None:
        self._check = asyncio.get_running_loop().call_later(pause_s, self._check_next)

    @must_succeed
    def _check_next(self) -> None:
        """Have the next bucket compared, and in a while the one after."""
        took_s = None
        found = self.checks.next(self.rules, self._endpoints)
        if found is not None:
            began = time.perf_counter()
            self._send_check(*found)
            took_s = time.perf_counter() - began
        self._check_later(self.checks.pause_s(took_s))

    def check_all(self) -> int:
        """Have every bucket compared now; return how many."""
        found = [(target, bucket) for target in self._endpoints for bucket in buckets_in(self.rules.checkable(target))]
        return sum(self._send_check(target, bucket) for target, bucket in found)

    def _send_check(self, target: int, bucket: int) -> bool:
        peer = self._peer(target)
        if peer is not None:
            info = self.checks.describe(self.rules, bucket)
            peer.send_frame(CHECK, epoch=self.rules.version, meta=messages.encode(info))
        return peer is not None

    # From other servers.

    def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        """Take a frame of a server before this one; its version is not above ours.

        It can be refused for what it says, and not for want of memory: the chain would wait for this server.
        """
        try:
            self._take_frame(peer, header, meta, body)
        except MemoryError as error:
            self._fail(error)

    def _take_frame(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        if header.kind == PING:
            peer.send_frame(PONG)
            return
        source = peer.hello.incarnation
        self._sources.setdefault(source, peer)
        if header.kind == CLOCKS:
            # The first frame of a connection, and of the newest: what an older one still holds is taken no more.
            self._sources[source] = peer
            self._take_clocks(messages.decode_clocks(meta))
        elif self._sources[source] is peer:
            if header.kind == FORWARD:
                self._take_forward(peer, header, messages.decode_forward(meta), body)
            elif header.kind == CHECK:
                info = messages.decode_check(meta)
                self.checks.compare(self.rules, source, peer.hello.rank, header.epoch, info)
            else:
                self._take_state(peer, header, messages.decode_state(meta), body)

    def _take_forward(self, peer: Peer, header: Header, info: messages.ForwardInfo, body: memoryview) -> None:
        pieces, buckets = list(unpack(info.pieces, body)), from_bytes(info.buckets)
        if header.epoch == self.rules.version:
            check_push(self._tables, info.operation, pieces, buckets)
        push = ChainPush(info.operation, info.incarnation, header.sequence, pieces, peer, header, buckets=buckets)
        event = replication.Forwarded(
            push, peer.hello.incarnation, info.incarnation, header.sequence, header.epoch, buckets
        )
        self._carry_out_forward(event, push)

    @must_succeed
    def _carry_out_forward(self, event: replication.Forwarded, push: ChainPush) -> None:
        instructions = self.rules.handle(event)
        if any(isinstance(each, replication.Forward) for each in instructions):
            push.own()
        self._obey(instructions)

    def _take_state(self, peer: Peer, header: Header, info: messages.StateInfo, body: memoryview) -> None:
        state = tuple((incarnation, sequence, from_bytes(mask)) for incarnation, sequence, mask in info.filter)
        token = _State(peer, header.request, info.order, list(unpack(info.pieces, body)))
        check_bucket(self._tables, info.bucket, token.pieces)
        self._carry_out(replication.StateReceived(token, peer.hello.incarnation, header.epoch, info.bucket, state))

    @must_succeed
    def _carry_out(self, event: replication.Event) -> None:
        self._obey(self.rules.handle(event))

    def _load(self, state: _State, bucket: int) -> None:
        busy_s = time.thread_time()
        self.checks.load(bucket, state.order)
        pieces = {piece.table: piece for piece in state.pieces}
        for number, table in self._tables.by_number.items():
            piece = pieces.get(number)
            if piece is None:
                table.part.load_bucket(bucket, _NO_KEYS, _NO_FLOATS.reshape(0, table.part.record_words))
            else:
                keys = piece.selection.key_array()
                records = piece.floats.reshape(len(keys), -1)
                self._non_finite.taken(table, keys, records, f"what fills server {self._tables.rank}")
                table.part.load_bucket(bucket, keys, records)
        busy_us = int((time.thread_time() - busy_s) * 1e6)
        state.peer.send_frame(STATE_TAKEN, request=state.number, clock=busy_us)

    def _take_clocks(self, info: messages.ClocksInfo) -> None:
        is_any_new = False
        for number, declared, spec in info.tables:
            table = self._tables.by_number.get(number)
            if table is None:
                table, is_any_new = self._add_table(number, declared), True
            if table.spec != spec:
                self._set_update(number, spec.update)
        if is_any_new:  # before anything of it is forwarded: whoever declares it may not know the servers behind yet
            self.tables_changed()
        if not self.rules.primary:
            self._gatekeeper.take_clocks(info)

    def set_update(self, number: int, update: dict[str, Any]) -> None:
        """Take other hyperparameters of a table's rule, and tell the servers behind. Raises UsageError, as it does."""
        self._set_update(number, update)
        self.tables_changed()

    def _set_update(self, number: int, update: dict[str, Any]) -> None:
        table = self._tables.find(number)
        before = table.spec
        table.set_update(update)
        if table.spec != before:  # a push before is not one behind
            self.checks.orders.applied(number, zlib.crc32(messages.encode(update)), self.rules.held)

    @must_succeed
    def _add_table(self, number: int, spec: messages.TableSpec) -> ServerTable:
        table = self._tables.by_number[number] = self.new_table(spec)
        return table

    def new_table(self, spec: messages.TableSpec) -> ServerTable:
        """Return an empty table with the buckets that are here. Raises PeerError if there is no memory for it."""
        try:
            part = make_part(spec, self.rules.held)
        except MemoryError:
            raise PeerError(f"server {self._tables.rank} has no memory for its part of {spec}") from None
        part.set_primary(self.rules.primary)
        return ServerTable(spec, part)


_NO_KEYS = np.empty(0, np.uint64)
_NO_FLOATS = np.empty(0, np.float32)


def _as_push(token: Any) -> ChainPush:
    assert isinstance(token, ChainPush)
    return token
