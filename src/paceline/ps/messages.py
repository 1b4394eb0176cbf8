"""What the processes of a cluster say to each other: kinds of frames, and typed control messages.

Data frames (PUSH, PULL and their answers) have no meta: all that they need is in the header and the arrays of the body.
Control is a CALL frame whose meta is one of the structs below (a tagged union in msgpack), answered by a RESULT frame,
or by an ERROR frame of the transport. A NOTICE is a control message that wants no answer.
"""

from __future__ import annotations

import functools
import operator
from typing import Annotated, Any, Final

import msgspec

from paceline.errors import ProtocolError, UsageError
from paceline.protocol import NUM_BUCKETS
from paceline.protocol.buckets import ALL, count, from_bytes
from paceline.protocol.chains import ChainGroup
from paceline.ps import snapshot_messages
from paceline.ps.bounds import (
    MAX_RANK,
    MAX_SHARDS,
    Assignment,
    Bucket,
    BucketMask,
    Clock,
    Natural,
    NonFinitePolicy,
    Number,
    NumShards,
    Operation,
    Rank,
    Role,
    TableNumber,
    Version,
    Word,
)
from paceline.ps.snapshot_messages import DoneShards
from paceline.ps.snapshot_messages import GetAccount as GetAccount
from paceline.ps.table_spec import TableSpec as TableSpec
from paceline.transport import Endpoint, reader

# Kinds of frames.
PUSH: Final = 16
PULL: Final = 17
PUSH_PULL: Final = 18
TICK: Final = 19
ACK: Final = 20
VALUES: Final = 21
CALL: Final = 24
RESULT: Final = 25
NOTICE: Final = 26
SYNCED: Final = 27
"""From a worker, behind all that it has sent again after a change of the map: epoch is the map's version, clock the
worker's, sequence its rank, flags 1 if it takes part in the iterations. No answer."""

# Kinds of frames between servers.
FORWARD: Final = 32
"""A push goes down a chain; meta is a :class:`ForwardInfo`, the body keys and gradients. Answered by FORWARDED."""
FORWARDED: Final = 33
STATE: Final = 34
"""A bucket whole, for a server that is being filled; meta is a :class:`StateInfo`. Answered by STATE_TAKEN."""
STATE_TAKEN: Final = 35
"""clock is how many microseconds of a processor that took."""
READY: Final = 37
"""Behind all that a member of a chain has forwarded to its primary: that was all. epoch is the map's version."""
CLOCKS: Final = 36
"""What a server that is being filled has to know of the tables and workers: meta is a :class:`ClocksInfo`."""
CHECK: Final = 40
"""What a bucket is here, behind all that was forwarded; meta is a :class:`CheckInfo`. No answer."""
PING: Final = 38
"""Are you there? Answered by PONG, of any version of the map."""
PONG: Final = 39

# Flags of data frames.
TICKS: Final = 1
"""The push is the last of its iteration: it ticks the worker's clock."""
RANGE: Final = 2
"""Dense: the body begins with (start, stop), two uint64, instead of keys."""
DROPPED: Final = 4
"""In an ACK or VALUES: the gradient was too stale and was dropped."""


class Process(msgspec.Struct, frozen=True, array_like=True):
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
    process: Process | None = None

    def __post_init__(self) -> None:
        if self.role == "server" and self.endpoint is None:
            raise UsageError(f"server {self.rank} ({self.node}) has no address: every server has one")


class GroupInfo(msgspec.Struct, frozen=True, array_like=True):
    """Buckets whose chains are equal: servers by incarnation, the buckets as 64 bytes."""

    members: tuple[Number, ...]
    filling: Number | None
    buckets: BucketMask

    def __post_init__(self) -> None:
        chain = self.members if self.filling is None else (*self.members, self.filling)
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
    term: Number = 0
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
    term: Number
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

    term: Number


class PrepareMap(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """NOTICE to a server: keep this map, answer with Prepared, and do not act on it yet."""

    map: ClusterMap | MapChange


class CommitMap(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """NOTICE to a server: act on the map that was prepared last on this connection."""

    term: Number
    epoch: Number


# To the scheduler.


class Prepared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """NOTICE from a server: the map of this order is here."""

    term: Number
    epoch: Number


class Promised(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """NOTICE from a server: it prepares no map of a lower term than this one from now on."""

    term: Number


class GetMap(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask for the members; answered by ClusterMap."""


class GetSettings(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask how the cluster works, before joining it; answered by Settings."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How the cluster works."""

    consistency: str
    stale: str
    num_servers: int
    num_workers: int
    """How many workers must have joined before the first iteration can complete."""
    cluster: str = ""
    """Tells this cluster from others that were at the scheduler's address before."""
    replicas: int = 0
    """How many servers may die without loss."""
    min_replicas: int = 0
    """How many servers besides the primary must have a push before it is acknowledged."""
    non_finite: NonFinitePolicy = "refuse"
    """What servers do about infinities and NaN that are no gradients (:mod:`paceline.ps.non_finite`)."""


class Register(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A process joins the cluster; answered by Welcome."""

    node: str
    role: str
    endpoint: Endpoint | None = None
    rank: Annotated[int, msgspec.Meta(le=MAX_RANK)] | None = None
    extra: bool = False
    """Whether a server joins though all expected ones are there."""
    process: Process | None = None


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

    def __post_init__(self) -> None:
        if (self.declared.name, self.declared.kind) != (self.spec.name, self.spec.kind):
            raise UsageError(f"table {self.number} was declared as {self.declared} and is {self.spec} now")


class JobMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What one node knows of the latest job. All nodes' together are what the scheduler knew, or counts no more."""

    number: Number
    num_workers: Rank = 0
    """Strided: how many workers the shards are dealt to."""
    done: tuple[tuple[int, int, bytes], ...] = ()
    """Epoch, file and a byte for each of its shards: 1 where it is done."""
    ended: dict[int, NumShards] = {}
    """The numbers of shards that reading has shown, by file."""
    settled: dict[int, dict[str, float]] = {}
    """The counters of each worker (by incarnation) at the end of its last shard."""
    lost: Number = 0
    """How many workers have died."""
    failed: tuple[str, str] | None = None
    working: bool = False
    """Whether this node is a worker that was given the job."""
    leases: tuple[Lease, ...] = ()
    """Those that this worker holds."""
    last_lease: Annotated[int, msgspec.Meta(le=2**62)] = -1
    progress: dict[str, float] = {}
    """This worker's counters now."""
    posted: PostJob | None = None
    """The job itself, if this node has posted it."""
    seconds: float = 0.0
    """Since its beginning, as far as its poster knows."""
    taken: tuple[tuple[int, int], ...] = ()
    """The reports that its poster has: the worker's incarnation, the report's number."""


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
    promised: Number = 0
    """The term of which it has promised that it prepares nothing lower."""
    has_committed: bool = True
    """Whether it knows that this map is committed."""
    former: tuple[MemberInfo, ...] = ()
    """If not, the servers of the map that it acts on."""
    is_leaving: bool = False
    """Whether it is a server that waits until it may leave."""
    process: Process | None = None
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
    """All servers now update table `table` with these hyperparameters (the rule itself must be the same)."""

    table: str
    update: dict[str, Any]


class ListTables(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answered by a list of TableSpec, with the hyperparameters of now."""


class PostJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Post work for the workers: `description` is theirs to understand, `files` are shards per file (None: unknown).

    Posting another job ends the one before. Answered by the job's number.
    """

    description: bytes
    files: tuple[NumShards | None, ...]
    epochs: NumShards
    assignment: Assignment
    done: tuple[DoneShards, ...] = ()
    """What is done already, as a snapshot says; and the counters of that."""
    progress: dict[str, float] = {}

    def __post_init__(self) -> None:
        total = self.epochs * sum(1 + (size or 0) for size in self.files)
        if total > MAX_SHARDS:
            raise UsageError(
                f"{len(self.files)} files in {self.epochs} epochs come to {total} shards: expected at most "
                f"{MAX_SHARDS}; use larger shards, or fewer epochs"
            )


class GetJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker asks for the first job after number `after`; answered by Job, held until there is one."""

    after: int


class Job(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A job, or its absence: number -1 means that the cluster is done and the worker may go."""

    number: int
    description: bytes = b""


class TakeLease(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker asks for a shard of job `job`; answered by Lease at once, or, with `wait`, when there is one."""

    job: int
    wait: bool


NOTHING_NOW: Final = -1
ALL_DONE: Final = -2


class Lease(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A shard of work; or, as its number, NOTHING_NOW (ask again with wait) or ALL_DONE."""

    lease: Annotated[int, msgspec.Meta(le=2**62)]
    epoch: int = 0
    file: int = 0
    shard: Annotated[int, msgspec.Meta(le=MAX_SHARDS)] = 0


class LeaseDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A shard is done: all that came of it is acknowledged by the servers."""

    job: int
    lease: int
    progress: dict[str, float] = {}


class FileEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reading has shown how many shards a file has."""

    job: int
    file: int
    num_shards: Annotated[int, msgspec.Meta(le=MAX_SHARDS)]


class Report(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker's findings for whoever posted the job; the frame's body goes with them."""

    job: int
    fields: dict[str, Any]
    number: int = 0
    """By which one that comes twice is known; the link counts them from 1."""
    settled: bool = False
    """Whether the shard that it is of is done."""


class JobFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker found that the job cannot be done by anybody: the data is bad, say."""

    job: int
    error: str
    message: str


class JobStatus(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask for a job's state; answered by JobState."""

    job: int


class JobState(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How far a job is. `progress` sums what workers told, the dead included."""

    done: int
    total: int | None
    finished: bool
    failed: tuple[str, str] | None
    progress: dict[str, float]
    seconds: float
    """From the first shard leased to the last worker through."""
    num_workers: int
    lost_workers: int
    num_reports: int


class TakeReports(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take the next report of a job; answered by TakenReport, or None; the report's body is the answer's."""

    job: int


class TakenReport(msgspec.Struct, frozen=True, kw_only=True):
    """A report, and the incarnation of the worker that made it as its number `number`."""

    fields: dict[str, Any]
    incarnation: int
    number: int
    done: tuple[int, int, int] | None = None
    """The shard that it is of (epoch, file, shard), if that is done by it: who takes the report keeps that too."""
    settled: dict[str, float] = {}
    """The worker's counters at that shard's end."""


class EndCluster(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All processes of the cluster shall end in good order."""


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """NOTICE from the scheduler: end in good order."""

    reason: str = ""


class Expelled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """NOTICE from the scheduler: you were declared dead."""

    reason: str


class JobNews(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """NOTICE from the scheduler to workers and the job's poster: what is new, so that it survives the scheduler."""

    job: int
    num_workers: int
    done: tuple[tuple[int, int, int], ...] = ()
    """Epoch, file and shard."""
    ended: dict[int, int] = {}
    settled: dict[int, dict[str, float]] = {}
    """As in JobMemory, and told with the shards that the counters include."""
    lost: int = 0


# To a server.


class CreateTable(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Hold your part of a table. Answered by None; idempotent."""

    number: TableNumber
    spec: TableSpec


class JoinClock(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker takes part in the iterations, from `clock` or later; answered by its clock."""

    rank: Natural
    clock: Clock


class Retire(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker has no more work for now: nobody waits for it until it joins again."""


class ReadBucket(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Read a bucket whole. Answered by the number of rows; the body is keys, then records."""

    table: TableNumber
    bucket: Bucket


class WriteRecords(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Set whole records: the body is `rows` keys, then their records."""

    table: TableNumber
    rows: Natural


class SetUpdate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Change a table's hyperparameters (the rule itself must be the same)."""

    table: TableNumber
    update: dict[str, Any]


class Erase(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Erase rows: the body is their keys. Answered by how many there were."""

    table: TableNumber


class GetStatistics(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answered by ServerStatistics."""


class Filled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """NOTICE from a server: the one behind it in a chain now has all of these buckets."""

    version: Version
    target: Natural
    buckets: BucketMask


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """NOTICE from a server: it wants to leave, and does when its buckets are elsewhere (it then gets Ended)."""


class TableStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One table on one server."""

    rows: int
    num_bytes: int
    pushes: int
    pulls: int
    dropped: int
    non_finite: int
    """How many pushes, sums, writes and loads were refused for infinities or NaN, or let in with them."""
    staleness: tuple[int, ...]
    """How many gradients were applied (or dropped) at staleness 0, 1, …; the last also counts all above."""


class ServerStatistics(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One server."""

    tables: dict[str, TableStatistics]
    bytes_in: int
    bytes_out: int
    resident_bytes: int
    held: int
    """Requests that wait now, at the gate or for a replica."""
    num_compared: int
    """Buckets that were compared with those of the servers before this one, as often as they were."""
    num_unordered: int
    """Buckets of which the same pushes were applied in another order than there, with another result."""
    differences: tuple[str, ...]
    """What is not as it is there, in a line for each bucket and table; see :mod:`paceline.ps.replica_checks`."""


# Between servers.


class PieceInfo(msgspec.Struct, frozen=True, array_like=True):
    """What of one table a frame between servers holds: keys, or a range of these buckets; then float32, padded."""

    table: TableNumber
    num_keys: Natural
    num_floats: Natural
    range: tuple[Natural, Natural, BucketMask] | None = None

    def __post_init__(self) -> None:
        if self.range is not None and (self.num_keys or self.range[0] > self.range[1]):
            raise UsageError(f"a piece is of keys, or of one range: got {self.num_keys} keys and {self.range[:2]}")


class ForwardInfo(msgspec.Struct, frozen=True, array_like=True):
    """A push (or a write, or an erasure) that goes down a chain. Sequence, version and number are in the header."""

    incarnation: Natural
    operation: Operation
    buckets: BucketMask
    pieces: tuple[PieceInfo, ...]


class StateInfo(msgspec.Struct, frozen=True, array_like=True):
    """A bucket: its filter, and a piece per table, whose floats are whole records."""

    bucket: Bucket
    order: Word
    """The order in which pushes were applied to it, hashed (:mod:`paceline.ps.replica_checks`)."""
    filter: tuple[tuple[Natural, Natural, BucketMask], ...]
    pieces: tuple[PieceInfo, ...]

    def __post_init__(self) -> None:
        tables = {piece.table for piece in self.pieces}
        if len(tables) != len(self.pieces) or any(piece.range is not None for piece in self.pieces):
            raise UsageError("a bucket is one piece of each table, with its keys")


class CheckInfo(msgspec.Struct, frozen=True, array_like=True):
    """What a bucket is on a server, for the one behind it to compare: see :mod:`paceline.ps.replica_checks`."""

    bucket: Bucket
    order: Word
    applied: tuple[tuple[Natural, Natural], ...]
    """The last push of each incarnation."""
    tables: tuple[tuple[TableNumber, Natural, Word], ...]
    """How many rows each has there, and their digest."""


class ClocksInfo(msgspec.Struct, frozen=True, array_like=True):
    """The tables (number, as declared, as of now) and the workers (incarnation, rank, clock, whether it counts)."""

    tables: tuple[tuple[TableNumber, TableSpec, TableSpec], ...]
    workers: tuple[tuple[Natural, Natural, Clock, bool], ...]
    num_missing: Natural
    """How many of the expected workers have not joined yet."""
    minimum: Clock
    """The iteration that all have reached."""


ToScheduler = (
    GetMap | GetSettings | Register | Rejoin | Heartbeat | Leave | DeclareTable | NoteUpdate | ListTables | PostJob
    | GetJob | TakeLease | LeaseDone | FileEnded | Report | JobFailed | JobStatus | TakeReports
    | EndCluster | GetAccount | Filled | Drain | Prepared | Promised
)  # fmt: skip
ToServer = (
    CreateTable | JoinClock | Retire | ReadBucket | WriteRecords | SetUpdate | Erase | GetStatistics
    | snapshot_messages.ToServer
)  # fmt: skip
FromScheduler = ClusterMap | MapChange | Promise | PrepareMap | CommitMap | Ended | Expelled | JobNews

encode = msgspec.msgpack.Encoder().encode
decode_to_scheduler = reader(ToScheduler, "a control message")
decode_to_server = reader(ToServer, "a control message")
decode_notice = reader(FromScheduler, "a notice")
decode_forward = reader(ForwardInfo, "a push from a server")
decode_state = reader(StateInfo, "a bucket from a server")
decode_check = reader(CheckInfo, "a comparison from a server")
decode_clocks = reader(ClocksInfo, "clocks from a server")
"""They raise ProtocolError for what cannot be read, or is beyond its bounds."""
