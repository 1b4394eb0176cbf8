"""What servers and workers have in common: they are members of a cluster, and know its newest map."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.protocol.chains import ChainGroup
from paceline.protocol.membership import Member
from paceline.protocol.shards import Granted
from paceline.simulation.messages import Beat, Key, Map, RegisterNode, Rejoin, Thrown, Welcomed
from paceline.simulation.network import Connection, Process

if TYPE_CHECKING:
    from paceline.simulation.cluster import Cluster

SCHEDULER = "scheduler"
HEARTBEAT_S = 0.25


class Node(Process):
    """A process that registers at the scheduler, sends heartbeats and takes maps."""

    def __init__(self, host: str, name: str, cluster: Cluster, *, is_server: bool) -> None:
        super().__init__(name, cluster.network)
        self.host = host
        self.cluster = cluster
        self.is_server = is_server
        self.member: Member | None = None
        self.map: Map | None = None
        self.scheduler: Connection | None = None
        self.is_leaving = False
        self.later(0.0, self._connect)
        self.later(HEARTBEAT_S * (0.5 + cluster.random.random()), self._beat)

    @property
    def incarnation(self) -> int:
        """The incarnation; 0 before the welcome."""
        return 0 if self.member is None else self.member.incarnation

    # What subclasses do.

    def welcomed(self) -> None:
        """Begin, as a member."""
        raise NotImplementedError

    def mapped(self, former: Map | None, new: Map) -> None:
        """Take a map of which the version or the epoch is newer than before."""
        raise NotImplementedError

    def attached(self) -> None:
        """Say to the scheduler (again) what it may not know."""
        raise NotImplementedError

    def held(self) -> tuple[tuple[Granted, ...], frozenset[Key]]:
        """The leases held, and the shards known to be done."""
        raise NotImplementedError

    def unreachable(self) -> tuple[int, ...]:
        """Look whom this node cannot reach, for a heartbeat."""
        return ()

    def is_gone(self, incarnation: int) -> bool:
        """Whether that incarnation is no member any more, as far as the map says."""
        return self.map is not None and self.map.excludes(incarnation)

    def address(self, incarnation: int) -> str | None:
        """The name of the process of a member."""
        for member in () if self.map is None else self.map.members:
            if member.incarnation == incarnation:
                return str(member.address)
        return None

    def tell(self, frame: Any) -> None:
        """Send a frame to the scheduler; it is lost if there is no connection."""
        if self.scheduler is not None:
            self.scheduler.send(self, frame)

    # The scheduler's connection.

    def _connect(self) -> None:
        self.network.connect(self, SCHEDULER, ("node", 0, 0))

    def scheduler_opened(self, connection: Connection) -> None:
        """Register, or say who this is."""
        self.scheduler = connection
        if self.member is None:
            connection.send(self, RegisterNode(self.is_server))
            return
        held, done = self.held()
        connection.send(self, Rejoin(self.member, self.map, self.is_leaving, held, done))
        self.attached()

    def scheduler_closed(self) -> None:
        """Connect again."""
        self.scheduler = None
        self._connect()

    def _beat(self) -> None:
        if self.member is not None:
            self.tell(Beat(self.incarnation, self.unreachable()))
        self.later(HEARTBEAT_S, self._beat)

    def on_welcomed(self, _: Connection, frame: Welcomed) -> None:
        """Take the welcome."""
        if self.member is None:
            self.member = frame.member
            self.welcomed()

    def on_thrown(self, _: Connection, __: Thrown) -> None:
        """Stop: this incarnation is dead, and may not come back."""
        self.cluster.ended(self)

    def on_map(self, _: Connection, frame: Map) -> None:
        """Take a map, from whomever."""
        former = self.map
        if former is not None:
            newer_epoch, newer_version = frame.epoch > former.epoch, frame.version > former.version
            if not newer_epoch and not newer_version:
                return
            if not (newer_epoch and frame.version >= former.version):
                # A server's word of the chains may come before the scheduler's word of the members, or after it.
                members = frame if newer_epoch else former
                chains = frame if newer_version else former
                frame = Map(members.epoch, members.members, members.highest, chains.version, chains.groups)
        self.map = frame
        if frame.version:
            self.cluster.oracle.mapped(frame.version, frame.groups, self.name)
        if self.member is not None and self.is_gone(self.incarnation):
            self.cluster.ended(self)
            return
        if self.member is not None:
            self.mapped(former, frame)


def servers_of(groups: tuple[ChainGroup, ...]) -> set[int]:
    """All servers in these chains."""
    found = {server for group in groups for server in group.members}
    return found | {group.filling for group in groups if group.filling is not None}
