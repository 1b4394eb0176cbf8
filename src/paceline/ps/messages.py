"""The messages between the processes of a cluster: kinds of frames, and typed control messages.

Data frames (PUSH, PULL and their answers) have no meta: all their data is in the header and the body. A control message
is a CALL frame whose meta is one of the structs below (a tagged union in msgpack), answered by a RESULT frame or by an
ERROR frame of the transport. A NOTICE is a control message without an answer.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from paceline.errors import UsageError
from paceline.protocol import Accept, Eventual, check_stale_policy, parse_consistency, parse_stale_policy
from paceline.protocol.bounds import BucketMask, Natural
from paceline.protocol.jobs.messages import ClaimCluster as ClaimCluster
from paceline.protocol.jobs.messages import FileEnded as FileEnded
from paceline.protocol.jobs.messages import GetAccount as GetAccount
from paceline.protocol.jobs.messages import GetJob as GetJob
from paceline.protocol.jobs.messages import JobFailed as JobFailed
from paceline.protocol.jobs.messages import JobNews as JobNews
from paceline.protocol.jobs.messages import JobStatus as JobStatus
from paceline.protocol.jobs.messages import LeaseDone as LeaseDone
from paceline.protocol.jobs.messages import PostJob as PostJob
from paceline.protocol.jobs.messages import Report as Report
from paceline.protocol.jobs.messages import TakeLease as TakeLease
from paceline.protocol.jobs.messages import TakeReports as TakeReports
from paceline.protocol.scheduler.messages import CommitView as CommitView
from paceline.protocol.scheduler.messages import Drain as Drain
from paceline.protocol.scheduler.messages import Elsewhere as Elsewhere
from paceline.protocol.scheduler.messages import EndCluster as EndCluster
from paceline.protocol.scheduler.messages import Ended as Ended
from paceline.protocol.scheduler.messages import Expelled as Expelled
from paceline.protocol.scheduler.messages import Filled as Filled
from paceline.protocol.scheduler.messages import GetSettings as GetSettings
from paceline.protocol.scheduler.messages import GetView as GetView
from paceline.protocol.scheduler.messages import Heartbeat as Heartbeat
from paceline.protocol.scheduler.messages import Leave as Leave
from paceline.protocol.scheduler.messages import Prepared as Prepared
from paceline.protocol.scheduler.messages import PrepareView as PrepareView
from paceline.protocol.scheduler.messages import Promise as Promise
from paceline.protocol.scheduler.messages import Promised as Promised
from paceline.protocol.scheduler.messages import Register as Register
from paceline.protocol.scheduler.messages import Rejoin as Rejoin
from paceline.protocol.scheduler.messages import SchedulerSettings
from paceline.protocol.scheduler.messages import Welcome as Welcome
from paceline.protocol.scheduler.views import View as View
from paceline.protocol.scheduler.views import ViewChange as ViewChange
from paceline.ps import snapshot_messages
from paceline.tables.bounds import Bucket, Clock, NonFinitePolicy, NumPasses, Operation, PassNumber, TableNumber, Word
from paceline.tables.non_finite import REFUSE, check_policy
from paceline.tables.spec import TableSpec as TableSpec
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
"""A worker has resent all its requests after a new view. No answer. Fields: epoch: the view's version; clock: the
worker's clock; sequence: the worker's rank; flags: 1 if the worker takes part in the iterations."""

# Kinds of filtered data frames (:mod:`paceline.filters`). The first frame of a table on a connection has a
# :class:`FilterInfo` as its meta.
FILTERED_PUSH: Final = 28
FILTERED_PULL: Final = 29
FILTERED_PUSH_PULL: Final = 30

# Kinds of frames between servers.
FORWARD: Final = 32
"""A push for the next server of a chain; meta is a :class:`ForwardInfo`, the body keys and gradients. The answer is
FORWARDED."""
FORWARDED: Final = 33
STATE: Final = 34
"""A whole bucket for a server that is being filled; meta is a :class:`StateInfo`. The answer is STATE_TAKEN."""
STATE_TAKEN: Final = 35
"""The receiver has loaded the bucket of a STATE frame. clock: the processor time of the loading, in microseconds."""
READY: Final = 37
"""A member of a chain has forwarded all its pushes to the new primary. epoch: the view's version."""
CLOCKS: Final = 36
"""Tables and workers, for a server that is being filled: meta is a :class:`ClocksInfo`."""
CHECK: Final = 40
"""The digest of a bucket after all forwarded pushes, for a comparison; meta is a :class:`CheckInfo`. No answer."""
PING: Final = 38
"""Checks that the receiver is reachable. The answer is PONG, in any view."""
PONG: Final = 39

# Flags of data frames.
TICKS: Final = 1
"""The push is the last of its iteration and ticks the worker's clock."""
RANGE: Final = 2
"""In a request to a dense table: the body begins with (start, stop), two uint64, instead of keys."""
EXACT: Final = 16
"""The pushed values are counts and are applied unchanged: the policy for stale gradients does not apply."""
FILTERED: Final = 8
"""In VALUES: the body is filtered. In the server's record of a request: its answer must be filtered."""
DROPPED: Final = 4
"""In an ACK or VALUES: the gradient was too stale and was dropped."""


# The settings and the tables of a cluster, and the messages about them between processes and the scheduler.


class ClusterSettings(SchedulerSettings, frozen=True, kw_only=True):
    """The settings of a cluster, which its scheduler sends to all members."""

    consistency: str = str(Eventual())
    stale: str = str(Accept())
    min_replicas: int = 0
    """Replicas that must have a push before it is acknowledged."""
    non_finite: NonFinitePolicy = REFUSE
    """The servers' policy for infinities and NaN (:mod:`paceline.tables.non_finite`)."""

    def check(self) -> None:
        """Raise UsageError unless a cluster can have these settings."""
        servers, replicas = self.num_servers, self.replicas
        if servers < 1 or self.num_workers < 1:
            raise UsageError(
                f"servers={servers}, workers={self.num_workers}: a cluster needs at least 1 server and 1 worker"
            )
        if not 0 <= replicas < servers:
            needed = max(replicas, 0) + 1
            raise UsageError(
                f"replicas={replicas} with servers={servers}: a row and its replicas need {needed} servers. Add some, "
                "or lower replicas"
            )
        if not 0 <= self.min_replicas <= replicas:
            raise UsageError(
                f"min_replicas={self.min_replicas} with replicas={replicas}: expected 0 to {replicas}. Add replicas, "
                "or lower min_replicas"
            )
        check_stale_policy(parse_consistency(self.consistency), parse_stale_policy(self.stale))
        check_policy(self.non_finite)


class KnownTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table's number, its first spec, and its current spec, whose hyperparameters may have changed."""

    number: TableNumber
    declared: TableSpec
    spec: TableSpec
    revision: Natural = 0

    def __post_init__(self) -> None:
        if (self.declared.name, self.declared.kind) != (self.spec.name, self.spec.kind):
            raise UsageError(f"table {self.number} was declared as {self.declared} and is {self.spec} now")


class DeclareTable(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Declare a table; the answer is KnownTable. Raises TableMismatchError if the table has another spec."""

    spec: TableSpec


class ChangeUpdate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Change the hyperparameters of a table (the rule itself must be the same).

    The answer is the number of this change, which SetUpdate then sends to all servers.
    """

    table: str
    update: dict[str, Any]


class ListTables(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Request the tables of the cluster. The answer is a list of TableSpec, with the current hyperparameters."""


# Calls to a server: create, read and write tables, join as a worker, request statistics.


class CreateTable(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Create the server's part of a table, or set later hyperparameters. The answer is None. The call is idempotent.

    The process that changed the hyperparameters may have died before its change reached this server.
    """

    table: KnownTable
    """The scheduler's answer to DeclareTable."""


class FilterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The filters of a table's requests and answers on one connection (:meth:`paceline.filters.Filter.describe`)."""

    requests: list[dict[str, Any]]
    answers: list[dict[str, Any]]


class CheckFilters(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Check that the server has these filters. The answer is None, or an error with the name of the missing filter."""

    filters: FilterInfo


class JoinClock(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker joins the iterations at `clock` or later. The answer is the worker's clock."""

    rank: Natural
    clock: Clock


class Retire(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker takes no part in iterations until it joins again; other workers do not wait for this worker."""


class ReadBucket(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Read all rows of a bucket. The answer is the number of rows.

    The body is the keys, then the values and the update rule's state of each key.
    """

    table: TableNumber
    bucket: Bucket


class WriteRecords(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write whole rows: the body is `rows` keys, then the values and the update rule's state of each key."""

    table: TableNumber
    rows: Natural


class SetUpdate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Change a table's hyperparameters (the rule itself must be the same).

    No effect if the table has this revision or a later revision, so that all servers end with the same revision.
    """

    table: TableNumber
    update: dict[str, Any]
    revision: Natural
    """The scheduler's answer to ChangeUpdate."""


class Erase(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Erase rows: the body is their keys. The answer is the number of erased rows."""

    table: TableNumber


class BeginPass(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Record pushes to a sparse table as part of pass `number` over the data, from this message on.

    If the table has no record of passes yet, its rows count as last pushed in pass `rows_of`.
    """

    table: TableNumber
    number: PassNumber
    rows_of: PassNumber


class EraseUnseen(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Erase a bucket's rows without a push in this pass or the `passes` - 1 passes before it.

    The rows of the same keys in the tables `also` are erased too. The answer is the number of erased rows of `table`.
    """

    table: TableNumber
    bucket: Bucket
    passes: NumPasses
    also: tuple[TableNumber, ...] = ()


class GetStatistics(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Request the statistics of the server. The answer is ServerStatistics."""


class TableStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The statistics of one table on one server."""

    rows: int
    num_bytes: int
    pushes: int
    pulls: int
    dropped: int
    non_finite: int
    """The number of pushes, sums, writes and loads that contained infinities or NaN, whether rejected or accepted."""
    staleness: tuple[int, ...]
    """The numbers of applied or dropped gradients with staleness 0, 1, …; the last number includes higher staleness.
    """


class ServerStatistics(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The statistics of one server."""

    tables: dict[str, TableStatistics]
    bytes_in: int
    bytes_out: int
    resident_bytes: int
    held: int
    """The number of requests that are waiting: blocked reads, and pushes with too few replicas."""
    num_compared: int
    """The number of comparisons of a bucket with the previous server in its chain."""
    num_unordered: int
    """The number of buckets that differ because the same pushes were applied in a different order."""
    differences: tuple[str, ...]
    """A line for each bucket and table that differs (:mod:`paceline.ps.server.replica_checks`)."""


# The meta of frames between the servers of a chain: FORWARD, STATE, CHECK and CLOCKS.


class PieceInfo(msgspec.Struct, frozen=True, array_like=True):
    """One table's part of a frame between servers. Its body has keys (unless it is a range), then padded float32."""

    table: TableNumber
    num_keys: Natural
    num_floats: Natural
    range: tuple[Natural, Natural, BucketMask] | None = None


class ForwardInfo(msgspec.Struct, frozen=True, array_like=True):
    """A push, a write or an erasure for the next server of a chain.

    The header has the sequence, the view's version and the number.
    """

    incarnation: Natural
    operation: Operation
    buckets: BucketMask
    pieces: tuple[PieceInfo, ...]


class StateInfo(msgspec.Struct, frozen=True, array_like=True):
    """A bucket: its duplicate filter, and one piece per table.

    The floats of a piece contain the values and the update rule's state of each key.
    """

    bucket: Bucket
    order: Word
    """A hash of the order in which pushes were applied to the bucket (:mod:`paceline.ps.server.replica_checks`)."""
    filter: tuple[tuple[Natural, Natural, BucketMask], ...]
    pieces: tuple[PieceInfo, ...]

    def __post_init__(self) -> None:
        tables = {piece.table for piece in self.pieces}
        if len(tables) != len(self.pieces) or any(piece.range is not None for piece in self.pieces):
            raise UsageError("a bucket has at most one piece of each table, with its keys")


class CheckInfo(msgspec.Struct, frozen=True, array_like=True):
    """The digest of a bucket, which the successor compares with its own (:mod:`paceline.ps.server.replica_checks`)."""

    bucket: Bucket
    order: Word
    applied: tuple[tuple[Natural, Natural], ...]
    tables: tuple[tuple[TableNumber, Natural, Word], ...]


class ClocksInfo(msgspec.Struct, frozen=True, array_like=True):
    """The tables and the workers.

    For a table: number, declared spec, current spec and revision. For a worker: incarnation, rank, clock, and whether
    the minimum clock includes this worker.
    """

    tables: tuple[tuple[TableNumber, TableSpec, TableSpec, Natural], ...]
    workers: tuple[tuple[Natural, Natural, Clock, bool], ...]
    num_missing: Natural
    minimum: Clock
    passes: tuple[tuple[TableNumber, PassNumber, PassNumber], ...] = ()
    """For tables that record passes: number, current pass, and the pass assumed for rows from before the recording.
    """


ToScheduler = (
    GetView | GetSettings | Register[Endpoint] | Rejoin[Endpoint, ClusterSettings, KnownTable] | Heartbeat | Leave
    | DeclareTable | ChangeUpdate | ListTables | PostJob | GetJob | TakeLease | LeaseDone | FileEnded | Report
    | JobFailed | JobStatus | TakeReports | ClaimCluster | EndCluster | GetAccount | Filled | Drain | Prepared
    | Promised
)  # fmt: skip
ToServer = (
    CheckFilters | CreateTable | JoinClock | Retire | ReadBucket | WriteRecords | SetUpdate | Erase | GetStatistics
    | BeginPass | EraseUnseen | snapshot_messages.ToServer
)  # fmt: skip
FromScheduler = (
    View[Endpoint] | ViewChange[Endpoint] | Promise | PrepareView[Endpoint] | CommitView | Ended | Expelled | JobNews
)  # fmt: skip

encode = msgspec.msgpack.Encoder().encode
decode_to_scheduler = reader(ToScheduler, "a control message")
decode_to_server = reader(ToServer, "a control message")
decode_notice = reader(FromScheduler, "a notice")
decode_forward = reader(ForwardInfo, "a push from a server")
decode_state = reader(StateInfo, "a bucket from a server")
decode_filters = reader(FilterInfo, "filters of a worker")
decode_check = reader(CheckInfo, "a comparison from a server")
decode_clocks = reader(ClocksInfo, "clocks from a server")
"""The decoders raise ProtocolError for malformed messages and values out of bounds."""
