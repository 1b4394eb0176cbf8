"""Messages between members and their scheduler: registration, heartbeats, views, the end.

The same structs are the core's events, the frames on the wire and the messages of the simulator.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic

from msgspec import Meta, Struct
from typing_extensions import TypeVar

from paceline.protocol.bounds import MAX_RANK, Number, Term
from paceline.protocol.chains import Filled as Filled
from paceline.protocol.jobs import JobMemory
from paceline.protocol.membership import Address, Member, ProcessIdentity, Role
from paceline.protocol.scheduler.views import View, ViewChange


class SchedulerSettings(Struct, frozen=True, kw_only=True):
    """The settings of a cluster that concern its scheduler."""

    cluster: str = ""
    """The unique name of the cluster, given by its scheduler."""
    num_servers: int = 1
    num_workers: int = 1
    """The first iteration completes when this number of workers have joined. More workers may join later."""
    replicas: int = 0
    """Copies of each row in addition to the primary's; this number of servers may die without loss."""
    heartbeat_timeout_s: float = 10.0
    """A member that is silent for longer counts as dead."""


SettingsType = TypeVar("SettingsType", default=Any)
"""The type of the settings, a subclass of SchedulerSettings."""
TableType = TypeVar("TableType", default=Any)
"""The type of tables, which the protocol only passes on."""

# From members.


class Register(Struct, Generic[Address], frozen=True, kw_only=True, tag=True):
    """A process joins the cluster; answered by Welcome, maybe later, or an error."""

    node: str
    role: Role
    address: Address | None = None
    rank: Annotated[int, Meta(le=MAX_RANK)] | None = None
    is_extra: bool = False
    """Whether a server joins a cluster that has all its servers."""
    process: ProcessIdentity | None = None


class Rejoin(Struct, Generic[Address, SettingsType, TableType], frozen=True, kw_only=True, tag=True):
    """A member rejoins with its record, for a scheduler that may have none. Answered by Welcome or Elsewhere.

    The answer is an error if this member was declared dead.
    """

    member: Member[Address]
    settings: SettingsType
    view: View[Address]
    """The newest view that the member has received, committed or prepared."""
    promised: Term = 0
    """The member has promised to prepare no view of a lower term."""
    has_committed: bool = True
    """Whether the view is known to be committed."""
    former: tuple[Member[Address], ...] = ()
    """If the view is not committed, the servers of the view that the member acts on."""
    is_leaving: bool = False
    """Whether the member is a server that waits for its release."""
    job: JobMemory | None = None
    tables: tuple[TableType, ...] = ()

    @property
    def cluster(self) -> str:
        name: str = self.settings.cluster  # type: ignore[attr-defined]
        return name

    @property
    def highest_term(self) -> int:
        return max(self.view.term, self.promised)

    @property
    def job_number(self) -> int:
        """The number of the latest job that the member knows; 0 without a job."""
        return 0 if self.job is None else self.job.number

    @property
    def has_posted(self) -> bool:
        return self.job is not None and self.job.posted is not None

    @property
    def has_worked(self) -> bool:
        return self.job is not None and self.job.has_worked


class Heartbeat(Struct, frozen=True, kw_only=True, tag=True):
    """NOTICE: a sign of life."""

    progress: dict[str, float] = {}
    unreachable: tuple[Number, ...] = ()
    """The servers, by incarnation, that were silent towards this server for half of the timeout."""


class Leave(Struct, frozen=True, kw_only=True, tag=True):
    """NOTICE: the process leaves in good order."""


class Drain(Struct, frozen=True, kw_only=True, tag=True):
    """NOTICE of a server that leaves once its buckets are on other servers. The server then receives Ended."""


class Prepared(Struct, frozen=True, tag=True):
    """NOTICE of a server that has the view of this order (:attr:`View.order`)."""

    term: Term
    epoch: Number


class Promised(Struct, frozen=True, tag=True):
    """NOTICE of a server that prepares no view of a lower term from now on."""

    term: Term


class GetView(Struct, frozen=True, kw_only=True, tag=True):
    """Request the current members. Answered by View."""


class GetSettings(Struct, frozen=True, kw_only=True, tag=True):
    """Request the cluster's settings, before joining it. Answered by the settings."""


class EndCluster(Struct, frozen=True, kw_only=True, tag=True):
    """Request the end of all processes of the cluster, in good order. Answered by None."""


# From the scheduler.


class Welcome(Struct, Generic[Address, SettingsType], frozen=True, kw_only=True, tag=True):
    """The process is this member of this cluster."""

    rank: int
    incarnation: int
    heartbeat_s: float
    settings: SettingsType
    view: View[Address]
    received: int = -1
    """The number of the last message of this member that the scheduler has; -1: none known."""


class Elsewhere(Struct, frozen=True, kw_only=True, tag=True):
    """Answer to Rejoin: this address now belongs to another cluster. The member waits for its own cluster."""


class Promise(Struct, frozen=True, tag=True):
    """NOTICE to a server: prepare no view of a lower term from now on. Answered by Promised."""

    term: Term


class PrepareView(Struct, Generic[Address], frozen=True, tag=True):
    """NOTICE to a server: store this view without acting on it. Answered by Prepared."""

    view: View[Address] | ViewChange[Address]


class CommitView(Struct, frozen=True, tag=True):
    """NOTICE to a server: act on the view of this order, which was prepared on this connection."""

    term: Term
    epoch: Number


class Ended(Struct, frozen=True, kw_only=True, tag=True):
    """NOTICE: end in good order."""

    reason: str = ""


class Expelled(Struct, frozen=True, kw_only=True, tag=True):
    """NOTICE: the member was declared dead."""

    reason: str
