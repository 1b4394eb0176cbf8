"""Jobs: work that workers lease in small shards, as pure state machines.

Members store records of the latest job (:class:`MemberLedger`). A new scheduler restores its ledger from the records.
"""

from paceline.protocol.jobs import messages, shards
from paceline.protocol.jobs.core import JobCore
from paceline.protocol.jobs.ledger import JobLedger, Remembered
from paceline.protocol.jobs.member import MemberLedger
from paceline.protocol.jobs.records import (
    ALL_DONE,
    MAX_SHARDS,
    NONE_FREE,
    Counters,
    DoneShards,
    Job,
    JobAccount,
    JobFacts,
    JobMemory,
    JobRecord,
    JobSpec,
    JobState,
    Key,
    Lease,
    TakenReport,
    done_shards,
    shards_in,
)
from paceline.protocol.jobs.shard_states import SHARD
from paceline.protocol.jobs.shards import ShardAccount, Shards

__all__ = [
    "ALL_DONE",
    "Counters",
    "DoneShards",
    "Job",
    "JobAccount",
    "JobCore",
    "JobFacts",
    "JobLedger",
    "JobMemory",
    "JobRecord",
    "JobSpec",
    "JobState",
    "Key",
    "Lease",
    "MAX_SHARDS",
    "MemberLedger",
    "NONE_FREE",
    "Remembered",
    "SHARD",
    "ShardAccount",
    "Shards",
    "TakenReport",
    "done_shards",
    "messages",
    "shards",
    "shards_in",
]
