"""Jobs: work that workers lease in small shards, as pure state machines.

Members store records of the latest job (:class:`MemberLedger`). A new scheduler restores its ledger from the records.
"""

from paceline.protocol.jobs import messages
from paceline.protocol.jobs.core import JobCore
from paceline.protocol.jobs.ledger import RejoinedMember
from paceline.protocol.jobs.member import MemberLedger
from paceline.protocol.jobs.records import (
    ALL_DONE,
    NONE_FREE,
    Counters,
    DoneShards,
    Job,
    JobAccount,
    JobMemory,
    JobRecord,
    JobSpec,
    JobState,
    Key,
    Lease,
    TakenReport,
    shards_in,
)
from paceline.protocol.jobs.shard_states import SHARD

__all__ = [
    "ALL_DONE",
    "Counters",
    "DoneShards",
    "Job",
    "JobAccount",
    "JobCore",
    "JobMemory",
    "JobRecord",
    "JobSpec",
    "JobState",
    "Key",
    "Lease",
    "MemberLedger",
    "NONE_FREE",
    "RejoinedMember",
    "SHARD",
    "TakenReport",
    "messages",
    "shards_in",
]
