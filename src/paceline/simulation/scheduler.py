"""The scheduler of a simulated cluster: a thin runtime of membership, planner and shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.protocol import chains, membership, shards
from paceline.protocol.chains import VERSION_GAP, Planner
from paceline.protocol.membership import Member, Membership, Role
from paceline.protocol.reachability import Reachability
from paceline.protocol.shards import Granted, Shards
from paceline.simulation.messages import (
    Beat,
    Filled,
    Going,
    Key,
    KnowDone,
    KnownDone,
    LeaseAnswer,
    LeaseRequest,
    Map,
    RegisterNode,
    Rejoin,
    ShardDone,
    ShardDoneOk,
    Thrown,
    Welcomed,
)
from paceline.simulation.network import Connection, Process
from paceline.simulation.node import SCHEDULER

if TYPE_CHECKING:
    from paceline.simulation.cluster import Cluster

TIMEOUT_S = 1.0
GRACE_S = 0.4
REJOIN_S = 0.8
_TICK_S = 0.1


class Scheduler(Process):
    """One scheduler process. One that follows another first waits for the nodes to come back."""

    def __init__(self, cluster: Cluster, *, follows: bool) -> None:
        super().__init__(SCHEDULER, cluster.network)
        self.cluster = cluster
        settings = cluster.settings
        self.membership = Membership(settings.num_servers, TIMEOUT_S, disconnect_grace_s=GRACE_S)
        self.reachability = Reachability(TIMEOUT_S / 2)
        self.planner = Planner(settings.num_buckets, settings.replicas)
        self.shards = Shards([settings.num_shards], settings.epochs)
        self.is_rebuilding = follows
        self.leaving: set[int] = set()
        self._nodes: dict[int, Connection] = {}  # incarnation → connection
        self._rejoins: dict[int, tuple[Connection, Rejoin]] = {}
        self._waiting: list[tuple[Connection, Any]] = []
        self._answers: dict[int, LeaseAnswer] = {}
        self._requests: dict[int, int] = {}
        self._uncommitted: dict[Key, tuple[int, int, set[int]]] = {}  # shard → worker, lease, who has to know yet
        self._known_done: set[Key] = set()
        self._patience_s = 0.0
        self._last_tick_s = self.own_now_s
        self.later(_TICK_S, self._tick)
        if follows:
            self.later(REJOIN_S, self._rebuild)
        self._handlers: dict[type, Any] = {
            RegisterNode: self._on_register,
            Rejoin: self._on_rejoin,
            Beat: self._on_beat,
            Going: self._on_going,
            Filled: self._on_filled,
            LeaseRequest: self._on_lease_request,
            ShardDone: self._on_shard_done,
            KnownDone: self._on_known_done,
        }

    # Connections.

    def accept(self, connection: Connection, hello: Any) -> bool:
        """See :class:`Process`."""
        return True

    def receive(self, connection: Connection, frame: Any) -> None:
        """See :class:`Process`."""
        if self.is_rebuilding and not isinstance(frame, Rejoin):
            self._waiting.append((connection, frame))
            return
        self._handlers[type(frame)](connection, frame)

    def closed(self, connection: Connection) -> None:
        """See :class:`Process`."""
        incarnation = connection.owner
        if incarnation is None or self._nodes.get(incarnation) is not connection:
            return
        del self._nodes[incarnation]
        member = self._member(incarnation)
        if member is not None:
            self._members(membership.Disconnected(member.node, incarnation, self._patience_s))

    def _tick(self) -> None:
        # A clock that jumps, or a scheduler that was stopped, makes nobody silent: no tick counts for more than two.
        now_s = self.own_now_s
        self._patience_s += min(max(now_s - self._last_tick_s, 0.0), 2 * _TICK_S)
        self._last_tick_s = now_s
        if not self.is_rebuilding:
            self._members(membership.Clock(self._patience_s))
            self._look_at_links()
        self.later(_TICK_S, self._tick)

    def _look_at_links(self) -> None:
        cut_off = self.reachability.decide(self._servers(), self.planner.groups, self._patience_s)
        if cut_off is not None:
            self.cluster.fired["expel"] += 1
            self._members(membership.Expel(cut_off.server, "it and others do not reach each other"))

    # Members.

    def _member(self, incarnation: int) -> Member | None:
        for member in self.membership.members:
            if member.incarnation == incarnation:
                return member
        return None

    def _on_register(self, connection: Connection, frame: RegisterNode) -> None:
        node = connection.ends[0]
        role = Role.SERVER if frame.is_server else Role.WORKER
        host = connection.ends[0].host  # type: ignore[attr-defined]
        self._welcome = connection
        self._members(membership.Register(host, role, node.name, self._patience_s))

    def _on_rejoin(self, connection: Connection, frame: Rejoin) -> None:
        incarnation = frame.member.incarnation
        connection.owner = incarnation
        if self.is_rebuilding:
            self._rejoins[incarnation] = connection, frame
            return
        if self._member(incarnation) is None:
            connection.send(self, Thrown())
            return
        self._nodes[incarnation] = connection
        self._members(membership.Heartbeat(frame.member.node, incarnation, self._patience_s))
        connection.send(self, self._map())
        if frame.member.role is Role.SERVER:
            if frame.is_leaving and incarnation not in self.leaving:
                self._drain(incarnation)
            connection.send(self, KnowDone(tuple(sorted(self._known_done))))

    def _on_beat(self, connection: Connection, frame: Beat) -> None:
        member = self._member(frame.incarnation)
        if member is None:
            connection.send(self, Thrown())
        else:
            self._members(membership.Heartbeat(member.node, frame.incarnation, self._patience_s))
            self.reachability.heard(frame.incarnation, frame.unreachable, self._patience_s)

    def _on_going(self, connection: Connection, frame: Going) -> None:
        member = self._member(frame.incarnation)
        if member is None:
            connection.send(self, Thrown())
        elif member.role is Role.SERVER:
            self._drain(frame.incarnation)
        else:
            self._members(membership.Leave(member.node, member.incarnation))
            self._work(shards.Lost(member.incarnation))
            connection.send(self, Thrown())

    def _members(self, event: membership.Event) -> None:
        publish = False
        for instruction in self.membership.handle(event):
            match instruction:
                case membership.Welcome(incarnation=incarnation):
                    self._nodes[incarnation] = self._welcome
                    self._welcome.owner = incarnation
                    member = self._member(incarnation)
                    assert member is not None
                    self._welcome.send(self, Welcomed(member))
                    if member.role is Role.SERVER:
                        self._welcome.send(self, KnowDone(tuple(sorted(self._known_done))))
                case membership.Dead(role=role, incarnation=incarnation):
                    self.cluster.fired["dead"] += 1
                    self._nodes.pop(incarnation, None)
                    if role is Role.WORKER:
                        self._work(shards.Lost(incarnation))
                case membership.Expelled(incarnation=incarnation):
                    pass
                case membership.Publish():
                    publish = True
        if publish:
            self.leaving &= {member.incarnation for member in self.membership.members}
            self._commit()
            self._plan()
            self._publish()

    def _servers(self) -> dict[int, int]:
        return {m.incarnation: m.rank for m in self.membership.members if m.role is Role.SERVER}

    def _plan(self) -> None:
        servers = self._servers()
        if self.planner.version == 0:
            if self.membership.ready and servers:
                self.planner.start(servers)
        else:
            self._look_for_loss(self.planner.servers_changed(servers, self.leaving))

    def _look_for_loss(self, instructions: list[chains.Instruction]) -> bool:
        for instruction in instructions:
            if isinstance(instruction, chains.Lost):
                self.cluster.lost(instruction.buckets)
        return bool(instructions)

    def _drain(self, server: int) -> None:
        self.leaving.add(server)
        if self._look_for_loss(self.planner.servers_changed(self._servers(), self.leaving)):
            self._publish()
        self._let_go()

    def _let_go(self) -> None:
        """Let those servers go that hold nothing any more."""
        for server in sorted(self.leaving):
            member = self._member(server)
            if member is not None and self.planner.version and not self.planner.holds(server):
                if server in self._nodes:
                    self._nodes[server].send(self, Going(server))
                self._nodes.pop(server, None)
                self._members(membership.Leave(member.node, server))

    def _on_filled(self, connection: Connection, frame: Filled) -> None:
        # A word by an older map may be of a server that was filled from another since.
        if frame.version == self.planner.version and self._member(connection.owner) is not None:
            if self._look_for_loss(self.planner.filled(frame.target, frame.buckets, frame.version)):
                self.cluster.fired["filled"] += 1
                self._publish()
            self._let_go()

    def _map(self) -> Map:
        now = self.membership.publish()
        highest = self.membership.last_incarnation
        return Map(now.epoch, now.members, highest, self.planner.version, self.planner.groups)

    def _publish(self) -> None:
        new = self._map()
        self.cluster.oracle.members = {member.incarnation for member in new.members}
        self.cluster.oracle.published(new.version, new.groups)
        for connection in list(self._nodes.values()):
            connection.send(self, new)

    # After another scheduler.

    def _rebuild(self) -> None:
        self.is_rebuilding = False
        # The dead stay dead: who was declared so may not have heard of it, but others have, and act by it.
        maps = [frame.map for _, frame in self._rejoins.values() if frame.map is not None]
        latest = max(maps, key=lambda each: each.epoch, default=None)
        newest = max(maps, key=lambda each: each.version, default=None)
        epoch = 0 if latest is None else latest.epoch
        rejoins = [
            frame
            for _, frame in self._rejoins.values()
            if latest is None or not latest.excludes(frame.member.incarnation)
        ]
        settings = self.cluster.settings
        self._patience_s = 0.0
        self.membership = Membership.rebuild(
            [frame.member for frame in rejoins],
            epoch,
            expected_servers=settings.num_servers,
            now_s=self._patience_s,
            heartbeat_timeout_s=TIMEOUT_S,
            disconnect_grace_s=GRACE_S,
        )
        living = {member.incarnation for member in self.membership.members}
        self._known_done = {key for _, frame in self._rejoins.values() for key in frame.done}
        held = [grant for frame in rejoins if frame.member.incarnation in living for grant in frame.held]
        self.shards = Shards.restore([settings.num_shards], settings.epochs, done=self._known_done, held=held)
        self.cluster.oracle.done |= self._known_done
        self.leaving = {f.member.incarnation for f in rejoins if f.is_leaving and f.member.role is Role.SERVER} & living
        if newest is not None and newest.version:
            self.planner, instructions = Planner.rebuild(
                newest.groups, newest.version + VERSION_GAP, self._servers(), settings.replicas, self.leaving
            )
            self._look_for_loss(instructions)
        else:
            if self.cluster.oracle.version:
                self.cluster.lost(settings.all_buckets)  # no server and no worker is left that knows of any
            self._plan()
        for incarnation, (connection, _) in self._rejoins.items():
            if incarnation in living and connection.is_open:
                self._nodes[incarnation] = connection
        for member in self.membership.members:
            if member.incarnation not in self._nodes:
                self._members(membership.Disconnected(member.node, member.incarnation, self._patience_s))
        self._publish()
        for incarnation, (connection, frame) in self._rejoins.items():
            if incarnation not in living:
                connection.send(self, Thrown())
            elif frame.member.role is Role.SERVER:
                connection.send(self, KnowDone(tuple(sorted(self._known_done))))
        waiting, self._waiting = self._waiting, []
        for connection, waited in waiting:
            if connection.is_open:
                self.receive(connection, waited)

    # Shards.

    def _work(self, event: shards.Event) -> None:
        for instruction in self.shards.handle(event):
            match instruction:
                case Granted(worker):
                    self._lease(worker, instruction)
                case shards.Exhausted(worker):
                    self._lease(worker, None)
                case shards.Wait():
                    pass

    def _lease(self, worker: int, granted: Granted | None) -> None:
        self._answers[worker] = LeaseAnswer(self._requests[worker], granted, False)
        if worker in self._nodes:
            self._nodes[worker].send(self, self._answers[worker])

    def _on_lease_request(self, connection: Connection, frame: LeaseRequest) -> None:
        if self._member(frame.worker) is None:
            connection.send(self, Thrown())
            return
        answer = self._answers.get(frame.worker)
        if answer is not None and answer.number == frame.number:
            connection.send(self, answer)
            return
        self._requests[frame.worker] = frame.number
        if frame.worker not in self.shards.waiting:
            self._work(shards.Lease(frame.worker))
        answer = self._answers.get(frame.worker)
        if answer is None or answer.number != frame.number:
            connection.send(self, LeaseAnswer(frame.number, None, True))

    def _on_shard_done(self, connection: Connection, frame: ShardDone) -> None:
        if self._member(frame.worker) is None:
            return
        key = self.shards.shard_of(frame.lease)
        if key is None:
            if all(lease != frame.lease for _, lease, _ in self._uncommitted.values()):
                connection.send(self, ShardDoneOk(frame.lease))
            return
        self._work(shards.Done(frame.worker, frame.lease))
        self._known_done.add(key)
        servers = set(self._servers())
        self._uncommitted[key] = frame.worker, frame.lease, servers
        for server in sorted(servers):
            if server in self._nodes:
                self._nodes[server].send(self, KnowDone((key,)))
        self._commit()

    def _on_known_done(self, _: Connection, frame: KnownDone) -> None:
        for key in frame.keys:
            if key in self._uncommitted:
                self._uncommitted[key][2].discard(frame.incarnation)
        self._commit()

    def _commit(self) -> None:
        """Confirm those shards that all servers know to be done."""
        servers = set(self._servers())
        for key, (worker, lease, ignorant) in list(self._uncommitted.items()):
            if not ignorant & servers:
                del self._uncommitted[key]
                self.cluster.oracle.shard_done(key)
                if worker in self._nodes:
                    self._nodes[worker].send(self, ShardDoneOk(lease))
