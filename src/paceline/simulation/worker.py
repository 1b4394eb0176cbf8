"""A worker of a simulated cluster: it leases shards, and for each reads, thinks, pushes and ticks some iterations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from paceline.protocol.buckets import ALL, bucket_set
from paceline.protocol.outbox import Done, Outbox, Send
from paceline.protocol.scheduler import View
from paceline.protocol.shards import Granted
from paceline.simulation.messages import (
    Answer,
    FinishGate,
    Going,
    JoinedGate,
    JoinGate,
    Key,
    LeaseAnswer,
    LeaseRequest,
    Map,
    PrepareView,
    PullPart,
    PushPart,
    ShardDone,
    ShardDoneOk,
    Stale,
    Synced,
    Thrown,
    TickClock,
    Value,
    Welcomed,
)
from paceline.simulation.network import Connection
from paceline.simulation.node import Node, servers_of

if TYPE_CHECKING:
    from paceline.simulation.cluster import Cluster


class _Push:
    __slots__ = ("iteration", "sequence", "values")

    def __init__(self, sequence: int, iteration: int, values: tuple[Value, ...]) -> None:
        self.sequence = sequence
        self.iteration = iteration
        self.values = values


class _Pull:
    __slots__ = ("clock",)

    def __init__(self, clock: int) -> None:
        self.clock = clock


class Worker(Node):
    """An outbox around a loop."""

    def __init__(self, host: str, name: str, cluster: Cluster) -> None:
        super().__init__(host, name, cluster, is_server=False)
        self.finished_clock = 0
        self.is_counted = False
        self.is_through = False
        self._outbox = Outbox()
        self._links: dict[int, Connection | None] = {}
        self._connecting: set[int] = set()
        self._has_joined = False
        self._handshake: dict[int, int | None] | None = None  # server → its answer; None: no handshake
        self._handshake_clock = 0
        self._handshake_number = 0
        self._lease: Granted | None = None
        self._iterations_left = 0
        self._request = 0
        self._awaits_lease = False
        self._over: dict[int, tuple[Granted, int]] = {}  # lease that is through → its grant, the clock behind it
        self._done: set[Key] = set()
        self._reported: set[int] = set()
        self._sequence = 0
        self._unsafe: list[_Push] = []  # not acknowledged, or under sequential not known to be durable
        self._busy = False
        self._current: _Pull | None = None
        self._handlers: dict[type, Any] = {
            Welcomed: self.on_welcomed,
            Thrown: self.on_thrown,
            Map: self.on_map,
            PrepareView: self.on_prepare,
            LeaseAnswer: self._on_lease,
            ShardDoneOk: self._on_done_ok,
            JoinedGate: self._on_joined,
            Answer: self._on_answer,
            Stale: self._on_stale,
        }

    # Connections.

    @override
    def accept(self, connection: Connection, hello: Any) -> bool:
        return False

    @override
    def opened(self, connection: Connection) -> None:
        kind, _, server = connection.hello
        if kind == "node":
            self.scheduler_opened(connection)
            return
        self._connecting.discard(server)
        if server not in self._links or self._links[server] is not None:
            self.network.close(connection)
            return
        self._links[server] = connection
        for send in self._outbox.send_again(server):
            self._transmit(send, again=True)
        self._sync(server)
        if self._handshake is not None:
            self._handshake[server] = None
            connection.send(self, self._join_frame())

    @override
    def refused(self, name: str, hello: Any) -> None:
        kind, _, server = hello
        if kind == "node":
            self._connect()
            return
        self._connecting.discard(server)
        if self._links.get(server, self) is None:
            self._connect_to(server)

    @override
    def closed(self, connection: Connection) -> None:
        if connection.hello[0] == "node":
            self.scheduler_closed()
            return
        server = connection.hello[2]
        if not connection.was_opened:
            self._connecting.discard(server)
        if server in self._links and self._links[server] in (connection, None):
            self._links[server] = None
            self._connect_to(server)

    def _connect_again(self) -> None:
        """Connect to those whose address came after the map that names them."""
        for server, link in self._links.items():
            if link is None:
                self._connect_to(server)

    def _connect_to(self, server: int) -> None:
        address = self.address(server)
        if address is not None and server not in self._connecting:
            self._connecting.add(server)
            self.network.connect(self, address, ("worker", self.incarnation, server))

    @override
    def receive(self, connection: Connection, frame: Any) -> None:
        if self.is_current(connection):
            self._handlers[type(frame)](connection, frame)

    def _on_stale(self, connection: Connection, frame: Stale) -> None:
        self._outbox.refused(frame.number)
        self.take(frame.view)

    # Maps.

    @override
    def welcomed(self) -> None:
        self.cluster.oracle.workers.append(self)

    @override
    def mapped(self, former: View | None, new: View) -> None:
        if new.version <= self._outbox.version:
            self._connect_again()
            return
        sends = self._outbox.change(new.version, new.groups)
        servers = servers_of(new.groups)
        for server in [server for server in self._links if server not in servers]:
            link = self._links.pop(server)
            if link is not None:
                self.network.close(link)
        for server in sorted(servers):
            if server not in self._links:
                self._links[server] = None
                self._connect_to(server)
        for send in sends:
            self._transmit(send, again=True)
        for server in self._links:
            self._sync(server)
        if self._handshake is not None:
            self._join()
        elif not self._has_joined and not self._awaits_lease:
            self._ask_for_lease()

    def _sync(self, server: int) -> None:
        link = self._links[server]
        if link is not None:
            version, clock = self._outbox.version, self.finished_clock
            link.send(self, Synced(self.incarnation, version, clock, self._has_joined, self.is_counted))

    def _to_all(self, frame: Any) -> None:
        for link in self._links.values():
            if link is not None:
                link.send(self, frame)

    # The gates: a worker counts from the highest clock that any server names.

    def _join(self, clock: int = 0) -> None:
        self._handshake_number += 1
        self._handshake_clock = clock
        self._handshake = dict.fromkeys(self._links)
        self._to_all(self._join_frame())

    def _join_frame(self) -> JoinGate:
        return JoinGate(self.incarnation, self._handshake_clock, self._outbox.version, self._handshake_number)

    def _on_joined(self, connection: Connection, frame: JoinedGate) -> None:
        if self._handshake is None or frame.number != self._handshake_number:
            return
        self._handshake[connection.hello[2]] = frame.clock
        answers = [clock for clock in self._handshake.values() if clock is not None]
        if len(answers) < len(self._handshake):
            return
        highest = max(answers)
        if highest > min(answers):
            self._join(highest)
            return
        self._handshake = None
        self.finished_clock = highest
        self._has_joined = self.is_counted = True
        self._begin()

    # Shards.

    @override
    def attached(self) -> None:
        if self._awaits_lease:
            self.tell(LeaseRequest(self.incarnation, self._request))
        self._reported = set()
        self._report_done()
        if self.is_leaving and self.is_through:
            self.tell(Going(self.incarnation))

    @override
    def held(self) -> tuple[tuple[Granted, ...], frozenset[Key]]:
        held = [grant for grant, _ in self._over.values()]
        return (*held, *([] if self._lease is None else [self._lease])), frozenset(self._done)

    def _ask_for_lease(self) -> None:
        self._request += 1
        self._awaits_lease = True
        self.tell(LeaseRequest(self.incarnation, self._request))

    def _on_lease(self, _: Connection, frame: LeaseAnswer) -> None:
        if frame.number != self._request or not self._awaits_lease:
            return
        if frame.wait:
            self._rest()
            if self.is_leaving:
                self._go()
            return
        self._awaits_lease = False
        if frame.granted is None:
            self.is_leaving = True
            self._rest()
            self._go()
            return
        self._lease = frame.granted
        self._iterations_left = self.cluster.random.choice(self.cluster.settings.iterations_per_shard)
        if self.is_counted:
            self._begin()
        else:
            self._join()

    def _rest(self) -> None:
        """Let nobody wait for this worker; find out when all it pushed is safe."""
        if self.is_counted:
            self.is_counted = False
            self._to_all(FinishGate(self.incarnation, self._outbox.version))
        if self.cluster.is_sequential and self._over and not self._busy:
            self._pull(ALL)

    def _report_done(self) -> None:
        first = self._unsafe[0].iteration if self._unsafe else self.finished_clock
        for lease, (_, clock) in self._over.items():
            if first >= clock and lease not in self._reported:
                self._reported.add(lease)
                self.tell(ShardDone(self.incarnation, lease))

    def _on_done_ok(self, _: Connection, frame: ShardDoneOk) -> None:
        over = self._over.pop(frame.lease, None)
        if over is not None:
            self._done.add((over[0].epoch, over[0].file, over[0].shard))
        if self.is_leaving:
            self._go()

    def leave(self) -> None:
        """Go after the current shard."""
        self.is_leaving = True
        if self._lease is None and self.member is not None:
            self._rest()
            self._go()

    def _go(self) -> None:
        """Leave the cluster, if nothing is left to do or to say."""
        if self._lease is None and not self._over and not self.is_counted:
            self.is_leaving = self.is_through = True
            self.tell(Going(self.incarnation))

    # Iterations.

    def _begin(self) -> None:
        if self._lease is None:
            return
        self._pull()

    def _pull(self, buckets: int | None = None) -> None:
        used, random = self.cluster.settings.num_buckets, self.cluster.random
        if self.cluster.is_sequential:
            buckets = self.cluster.settings.all_buckets
        elif buckets is None:
            buckets = bucket_set(random.sample(range(used), random.randint(1, min(4, used))))
        self._busy = True
        token = self._current = _Pull(self.finished_clock)
        for send in self._outbox.start(token, buckets & (1 << used) - 1):
            self._transmit(send)

    def _on_answer(self, connection: Connection, frame: Answer) -> None:
        if self.cluster.is_sequential:
            self._outbox.durable(connection.hello[2], frame.durable)
        for done in self._outbox.answered(frame.number):
            self._on_done(done)
        if self._over:
            self._report_done()

    def _acknowledged(self, push: _Push) -> None:
        self._unsafe.remove(push)
        self.cluster.oracle.acknowledged(self.incarnation, push.values)

    def _on_done(self, done: Done) -> None:
        token = done.token
        if isinstance(token, _Push):
            if not self.cluster.is_sequential:
                self._acknowledged(token)
            return
        if token is not self._current:
            return
        assert isinstance(token, _Pull)
        self._busy = False
        if self.cluster.is_sequential:  # a read of all buckets: what is of iterations before it is safe
            while self._unsafe and self._unsafe[0].iteration < token.clock:
                self._acknowledged(self._unsafe[0])
        if self._lease is not None and self.is_counted:
            low, high = self.cluster.settings.think_s
            self.later(low + (high - low) * self.cluster.random.random(), self._work)

    def _work(self) -> None:
        if not self.is_counted or self._lease is None:
            return
        random, settings = self.cluster.random, self.cluster.settings
        iteration = self.finished_clock
        for _ in range(random.choice((1, 1, 2, 3))):
            buckets = random.sample(range(settings.num_buckets), random.randint(1, settings.num_buckets))
            values = []
            for bucket in sorted(buckets):
                value = random.getrandbits(40)
                values.append((bucket, self.cluster.oracle.push(self.incarnation, iteration, bucket, value), value))
            push = _Push(self._sequence, iteration, tuple(values))
            self._sequence += 1
            self._unsafe.append(push)
            keep = iteration if self.cluster.is_sequential else None
            for send in self._outbox.start(push, bucket_set(buckets), keep_clock=keep):
                self._transmit(send)
        self.finished_clock += 1
        self._to_all(TickClock(self.incarnation, self.finished_clock, self._outbox.version))
        self._iterations_left -= 1
        if self._iterations_left:
            self._begin()
            return
        self._over[self._lease.lease] = self._lease, self.finished_clock
        self._lease = None
        if self.is_leaving:
            self._rest()
        else:
            self._ask_for_lease()

    def _transmit(self, send: Send, again: bool = False) -> None:
        link = self._links.get(send.server)
        if link is None:
            return
        token, version = send.token, self._outbox.version
        if again:
            self.cluster.fired["resend"] += 1
        if isinstance(token, _Push):
            values = tuple(value for value in token.values if send.buckets >> value[0] & 1)
            frame = PushPart(
                send.number, self.incarnation, token.sequence, token.iteration, version, send.buckets, values
            )
            link.send(self, frame)
        else:
            assert isinstance(token, _Pull)
            link.send(self, PullPart(send.number, self.incarnation, token.clock, version, send.buckets))
