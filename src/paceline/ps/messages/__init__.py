"""The messages between the processes of a cluster: kinds of frames, and typed control messages.

Data frames (PUSH, PULL and their answers) have no meta; header and body have all their data. A control message is a
CALL frame whose meta is one of the structs below (a tagged union in msgpack), answered by a RESULT frame or by an ERROR
frame of the transport. A NOTICE is a control message without an answer.
"""

from __future__ import annotations

import msgspec

from paceline.protocol.jobs.messages import (
    ClaimCluster,
    FileEnded,
    GetAccount,
    GetJob,
    JobFailed,
    JobNews,
    JobStatus,
    LeaseDone,
    PostJob,
    Report,
    TakeLease,
    TakeReports,
)
from paceline.protocol.scheduler.messages import (
    CommitView,
    Drain,
    Elsewhere,
    EndCluster,
    Ended,
    Expelled,
    Filled,
    GetSettings,
    GetView,
    Heartbeat,
    Leave,
    Prepared,
    PrepareView,
    Promise,
    Promised,
    Register,
    Rejoin,
    Welcome,
)
from paceline.protocol.scheduler.views import View, ViewChange
from paceline.ps.messages import snapshots
from paceline.ps.messages.between_servers import (
    CheckInfo,
    ClocksInfo,
    ForwardInfo,
    PieceInfo,
    StateInfo,
)
from paceline.ps.messages.cluster import (
    ClusterSettings,
    DeclareTable,
    KnownTable,
    ListTables,
    NoteUpdate,
)
from paceline.ps.messages.kinds import (
    ACK,
    CALL,
    CHECK,
    CLOCKS,
    DROPPED,
    EXACT,
    FILTERED,
    FILTERED_PULL,
    FILTERED_PUSH,
    FILTERED_PUSH_PULL,
    FORWARD,
    FORWARDED,
    NOTICE,
    PING,
    PONG,
    PULL,
    PUSH,
    PUSH_PULL,
    RANGE,
    READY,
    RESULT,
    STATE,
    STATE_TAKEN,
    SYNCED,
    TICK,
    TICKS,
    UNKNOWN_KEYS,
    VALUES,
)
from paceline.ps.messages.servers import (
    BeginPass,
    CheckFilters,
    CreateTable,
    Erase,
    EraseUnseen,
    FilterInfo,
    GetStatistics,
    JoinClock,
    ReadBucket,
    Retire,
    ServerStatistics,
    SetUpdate,
    TableStatistics,
    WriteRecords,
)
from paceline.tables.spec import TableSpec
from paceline.transport import Endpoint, reader

__all__ = [
    "ACK",
    "BeginPass",
    "CALL",
    "CHECK",
    "CLOCKS",
    "CheckFilters",
    "CheckInfo",
    "ClocksInfo",
    "ClusterSettings",
    "CommitView",
    "CreateTable",
    "DROPPED",
    "DeclareTable",
    "Drain",
    "EXACT",
    "Elsewhere",
    "EndCluster",
    "Ended",
    "Erase",
    "EraseUnseen",
    "Expelled",
    "FILTERED",
    "FILTERED_PULL",
    "FILTERED_PUSH",
    "FILTERED_PUSH_PULL",
    "FORWARD",
    "FORWARDED",
    "FileEnded",
    "Filled",
    "FilterInfo",
    "ForwardInfo",
    "FromScheduler",
    "GetAccount",
    "GetJob",
    "GetView",
    "GetSettings",
    "GetStatistics",
    "ClaimCluster",
    "Heartbeat",
    "JobFailed",
    "JobNews",
    "JobStatus",
    "JoinClock",
    "KnownTable",
    "LeaseDone",
    "Leave",
    "ListTables",
    "ViewChange",
    "NOTICE",
    "NoteUpdate",
    "PING",
    "PONG",
    "PULL",
    "PUSH",
    "PUSH_PULL",
    "PieceInfo",
    "PostJob",
    "PrepareView",
    "Prepared",
    "Promise",
    "Promised",
    "RANGE",
    "READY",
    "RESULT",
    "ReadBucket",
    "Register",
    "Rejoin",
    "Report",
    "Retire",
    "STATE",
    "STATE_TAKEN",
    "SYNCED",
    "ServerStatistics",
    "SetUpdate",
    "StateInfo",
    "TICK",
    "TICKS",
    "TableSpec",
    "TableStatistics",
    "TakeLease",
    "TakeReports",
    "ToScheduler",
    "ToServer",
    "UNKNOWN_KEYS",
    "VALUES",
    "View",
    "Welcome",
    "WriteRecords",
    "decode_check",
    "decode_clocks",
    "decode_filters",
    "decode_forward",
    "decode_notice",
    "decode_state",
    "decode_to_scheduler",
    "decode_to_server",
    "encode",
]

ToScheduler = (
    GetView | GetSettings | Register[Endpoint] | Rejoin[Endpoint, ClusterSettings, KnownTable] | Heartbeat | Leave
    | DeclareTable | NoteUpdate | ListTables | PostJob | GetJob | TakeLease | LeaseDone | FileEnded | Report | JobFailed
    | JobStatus | TakeReports | ClaimCluster | EndCluster | GetAccount | Filled | Drain | Prepared | Promised
)  # fmt: skip
ToServer = (
    CheckFilters | CreateTable | JoinClock | Retire | ReadBucket | WriteRecords | SetUpdate | Erase | GetStatistics
    | BeginPass | EraseUnseen | snapshots.ToServer
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
