"""What processes and the scheduler say to each other: members, views, registration, tables, the end."""

from __future__ import annotations

import functools
import operator
from typing import Annotated, Any

import msgspec

from paceline.errors import ProtocolError, UsageError
from paceline.protocol import (
    NUM_BUCKETS,
    Accept,
    Eventual,
    check_stale_policy,
    parse_consistency,
    parse_stale_policy,
)
from paceline.protocol.buckets import ALL, count, from_bytes
from paceline.protocol.chains import ChainGroup, in_chain
from paceline.protocol.jobs import JobMemory
from paceline.tables.bounds import (
    MAX_RANK,
    BucketMask,
    Natural,
    NonFinitePolicy,
    Number,
    Rank,
    Role,
    TableNumber,
    Term,
    Version,
)
from paceline.tables.non_finite import REFUSE, check_policy
from paceline.tables.spec import TableSpec
from paceline.transport import Endpoint


class ProcessIdentity(msgspec.Struct, frozen=True, array_like=True):
    """One process, which is told by it from any other that there ever was."""

    host: str
    """The boot of the machine, and the namespace of the process ids."""
    pid: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    started: int
    """When, in the units of the host's kernel."""


class MemberInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One server or worker of the cluster."""

    node: str
    role: Role
    rank: Rank
    incarnation: Number
    endpoint: Endpoint | None = None
    process: ProcessIdentity | None = None

    def __post_init__(self) -> None:
        if self.role == "server" and self.endpoint is None:
            raise UsageError(f"server {self.rank} ({self.node}) has no address: every server has one")


class GroupInfo(msgspec.Struct, frozen=True, array_like=True):
    """Buckets whose chains are equal: servers by incarnation, the buckets as 64 bytes."""

    members: tuple[Number, ...]
    filling: Number | None
    buckets: BucketMask

    def __post_init__(self) -> None:
        chain = in_chain(self.members, self.filling)
        if len(set(chain)) != len(chain):
            raise UsageError(f"a chain of servers {chain} has one of them twice")


def _check_groups(groups: tuple[GroupInfo, ...]) -> None:
    """Raise UsageError unless each bucket is in exactly one of some groups; there may be no groups."""
    sets = [from_bytes(group.buckets) for group in groups]
    if groups and (sum(map(count, sets)) != NUM_BUCKETS or functools.reduce(operator.or_, sets) != ALL):
        raise UsageError(f"a map of {len(groups)} groups of chains does not name each of {NUM_BUCKETS} buckets once")


class ClusterMap(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A view (:class:`paceline.protocol.scheduler.View`). The scheduler sends it as a NOTICE when it is committed."""

    epoch: Number
    members: tuple[MemberInfo, ...]
    version: Version = 0
    """The version of the chains; 0 while there are none."""
    groups: tuple[GroupInfo, ...] = ()
    """Which servers hold which buckets."""
    last_incarnation: Number = 0
    """Who has none above this one, and is no member, is gone."""
    term: Term = 0
    """The scheduler that published it; each that takes over has a higher one."""
    is_partial: bool = False
    """Whether the workers were left out, as they are in what workers get."""
    former_voters: tuple[Number, ...] = ()
    """The servers that had buckets by the map that it was to follow."""
    num_waiting: int = 0
    """While the cluster is forming: how many of its servers have come."""

    def __post_init__(self) -> None:
        _check_groups(self.groups)

    @property
    def order(self) -> tuple[int, int]:
        """Of two maps the one with the greater order is the newer one."""
        return self.term, self.epoch

    @property
    def ready(self) -> bool:
        """Whether all expected servers have been there."""
        return self.version > 0

    @property
    def num_lost(self) -> int:
        """How many buckets were lost with all servers that had them."""
        return sum(count(from_bytes(group.buckets)) for group in self.groups if not group.members)

    def chain_groups(self) -> tuple[ChainGroup, ...]:
        """Return the chains as the rules know them."""
        return tuple(ChainGroup(group.members, group.filling, from_bytes(group.buckets)) for group in self.groups)

    def of_role(self, role: str) -> tuple[MemberInfo, ...]:
        """Return the members of a role, by rank."""
        return tuple(sorted((m for m in self.members if m.role == role), key=lambda m: m.rank))


class MapChange(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a map differs by from the one of `base`, which was sent on this connection before. A NOTICE."""

    base: Number
    """The epoch of that map."""
    epoch: Number
    term: Term
    version: Version
    last_incarnation: Number
    joined: tuple[MemberInfo, ...] = ()
    gone: tuple[Number, ...] = ()
    groups: tuple[GroupInfo, ...] | None = None
    """None: as before."""
    former_voters: tuple[Number, ...] = ()

    def __post_init__(self) -> None:
        _check_groups(self.groups or ())

    def apply(self, base: ClusterMap) -> ClusterMap:
        """Return the map that this makes of `base`. Raises ProtocolError if it is of another one."""
        if base.epoch != self.base:
            raise ProtocolError(f"the scheduler has sent what changed since map {self.base}, and {base.epoch} is here")
        gone = set(self.gone)
        return msgspec.structs.replace(
            base,
            term=self.term,
            epoch=self.epoch,
            version=self.version,
            last_incarnation=self.last_incarnation,
            members=(*(member for member in base.members if member.incarnation not in gone), *self.joined),
            groups=base.groups if self.groups is None else self.groups,
            former_voters=self.former_voters,
        )


class Promise(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """NOTICE to a server: prepare no map of a lower term than this one from now on, and answer with Promised."""

    term: Term


class PrepareMap(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """NOTICE to a server: keep this map, answer with Prepared, and do not act on it yet."""

    map: ClusterMap | MapChange


class CommitMap(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """NOTICE to a server: act on the map that was prepared last on this connection."""

    term: Term
    epoch: Number


class Prepared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """NOTICE from a server: the map of this order is here."""

    term: Term
    epoch: Number


class Promised(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """NOTICE from a server: it prepares no map of a lower term than this one from now on."""

    term: Term


class GetMap(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask for the members; answered by ClusterMap."""


class GetSettings(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask how the cluster works, before joining it; answered by Settings."""


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a cluster, from the command line to its members."""

    consistency: str = str(Eventual())
    """In the format of ``--consistency``."""
    stale: str = str(Accept())
    """The policy for stale gradients, in the format of ``--stale``."""
    num_servers: int = 1
    num_workers: int = 1
    """The first iteration completes when so many workers have joined. More may join later."""
    replicas: int = 0
    """Copies of each row besides the primary's: so many servers may die without loss."""
    min_replicas: int = 0
    """Replicas that must have a push before it is acknowledged."""
    non_finite: NonFinitePolicy = REFUSE
    """The servers' policy for infinities and NaN (:mod:`paceline.tables.non_finite`)."""
    heartbeat_timeout_s: float = 10.0
    """A member that is silent for so long counts as dead."""

    def check(self) -> None:
        """Raise UsageError unless a cluster can have these settings."""
        servers, replicas = self.num_servers, self.replicas
        if servers < 1 or self.num_workers < 1:
            raise UsageError(
                f"a cluster has at least 1 server and 1 worker: servers={servers}, workers={self.num_workers}"
            )
        if not 0 <= replicas < servers:
            raise UsageError(
                f"replicas={replicas} with {servers} server(s): a row is on one server and on so many others, so there "
                f"must be at least {max(replicas, 0) + 1} servers"
            )
        if not 0 <= self.min_replicas <= replicas:
            raise UsageError(
                f"min_replicas={self.min_replicas} with replicas={replicas}: a push is acknowledged when so many "
                f"replicas have it: expected 0 to {replicas}"
            )
        check_stale_policy(parse_consistency(self.consistency), parse_stale_policy(self.stale))
        check_policy(self.non_finite)


class Settings(ClusterSettings, frozen=True, kw_only=True, tag=True):
    """The settings of one cluster."""

    cluster: str = ""
    """Tells this cluster from others that were at the scheduler's address before."""


class Register(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A process joins the cluster; answered by Welcome."""

    node: str
    role: str
    endpoint: Endpoint | None = None
    rank: Annotated[int, msgspec.Meta(le=MAX_RANK)] | None = None
    extra: bool = False
    """Whether a server joins though all expected ones are there."""
    process: ProcessIdentity | None = None


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Who the member is."""

    rank: int
    incarnation: int
    heartbeat_s: float
    settings: Settings
    cluster: ClusterMap
    received: int = -1
    """The number of the last message of this member that the scheduler has; -1 if it knows of none."""


class Elsewhere(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to Rejoin: another cluster is at this address now. The member's own may come back."""


class KnownTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table's number, its spec as first declared, and as it is now that hyperparameters may have changed."""

    number: TableNumber
    declared: TableSpec
    spec: TableSpec
    revision: Natural = 0
    """The number of the last change of its hyperparameters."""

    def __post_init__(self) -> None:
        if (self.declared.name, self.declared.kind) != (self.spec.name, self.spec.kind):
            raise UsageError(f"table {self.number} was declared as {self.declared} and is {self.spec} now")


class Rejoin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A member comes back to a scheduler that may know nothing of it, and says what it knows.

    Answered by Welcome or Elsewhere. Raises PeerError if this member was declared dead.
    """

    node: str
    role: Role
    rank: Rank
    incarnation: Number
    endpoint: Endpoint | None
    settings: Settings
    cluster: ClusterMap
    """The newest map that it has seen, committed or prepared."""
    promised: Term = 0
    """The term of which it has promised that it prepares nothing lower."""
    has_committed: bool = True
    """Whether it knows that this map is committed."""
    former: tuple[MemberInfo, ...] = ()
    """If not, the servers of the map that it acts on."""
    is_leaving: bool = False
    """Whether it is a server that waits until it may leave."""
    process: ProcessIdentity | None = None
    tables: tuple[KnownTable, ...] = ()
    job: JobMemory | None = None


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A sign of life (NOTICE), with what a worker has to show for it, and whom a server cannot reach."""

    progress: dict[str, float] = {}
    unreachable: tuple[Number, ...] = ()
    """The servers, by incarnation, that this one is linked to and has not heard for half of the time-out."""


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The process leaves in good order."""


class DeclareTable(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Give a table its number; answered by int. Raises TableMismatchError if it is known otherwise."""

    spec: TableSpec


class NoteUpdate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Change the hyperparameters of a table (the rule itself must be the same).

    Answered by the number of this change, which then goes to all servers with SetUpdate.
    """

    table: str
    update: dict[str, Any]


class ListTables(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answered by a list of TableSpec, with the hyperparameters of now."""


class EndCluster(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All processes of the cluster shall end in good order."""


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """NOTICE from the scheduler: end in good order."""

    reason: str = ""


class Expelled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """NOTICE from the scheduler: you were declared dead."""

    reason: str


class Filled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """NOTICE from a server: the one behind it in a chain now has all of these buckets."""

    version: Version
    target: Natural
    buckets: BucketMask


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """NOTICE from a server: it wants to leave, and does when its buckets are elsewhere (it then gets Ended)."""
