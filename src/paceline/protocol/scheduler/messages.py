"""Messages between members and their scheduler: registration, heartbeats, views, and the end of the cluster.

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
    """The unique name of the cluster, which its scheduler chooses."""
    num_servers: int = 1
    num_workers: int = 1
    """The first iteration can complete only when this number of workers has joined. More workers may join later."""
    replicas: int = 0
    """The number of copies of each row in addition to the primary's. No data is lost if at most this number of servers
    dies."""
    heartbeat_timeout_s: float = 10.0
    """A member counts as dead if it sends no heartbeat for a longer time than this."""


SettingsType = TypeVar("SettingsType", default=Any)
"""The type of the settings, a subclass of SchedulerSettings."""
TableType = TypeVar("TableType", default=Any)
"""The type of tables, which the protocol only passes on."""

# From members.


class Register(Struct, Generic[Address], frozen=True, kw_only=True, tag=True):
    """A process requests to join the cluster. The answer is Welcome once it is a member, or an error."""

    node: str
    role: Role
    address: Address | None = None
    rank: Annotated[int, Meta(le=MAX_RANK)] | None = None
    is_extra: bool = False
    """Whether a server joins a cluster that already has all its servers."""
    process: ProcessIdentity | None = None
    highest_term: Term = 0
    """The process prepares no view of a lower term, because of a scheduler that ended before it sent the welcome."""


class Rejoin(Struct, Generic[Address, SettingsType, TableType], frozen=True, kw_only=True, tag=True):
    """A member sends its record to a scheduler that may not know it. The answer is Welcome or Elsewhere.

    The answer is an error if this member was declared dead.
    """

    member: Member[Address]
    settings: SettingsType
    view: View[Address]
    """The newest view that the member has received, committed or prepared."""
    promised: Term = 0
    """The member has promised not to prepare a view of a lower term."""
    has_committed: bool = True
    """Whether the member knows that `view` is committed."""
    former: tuple[Member[Address], ...] = ()
    """If `view` is not committed, the servers of the committed view that the member acts on."""
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
        """The number of the latest job in the member's record; 0 without a job."""
        return 0 if self.job is None else self.job.number

    @property
    def has_posted(self) -> bool:
        return self.job is not None and self.job.posted is not None

    @property
    def has_worked(self) -> bool:
        return self.job is not None and self.job.has_worked


class Heartbeat(Struct, frozen=True, kw_only=True, tag=True):
    """NOTICE: the member's process is running."""

    progress: dict[str, float] = {}
    unreachable: tuple[Number, ...] = ()
    """The servers, by incarnation, that were silent towards this server for half of the timeout."""


class Leave(Struct, frozen=True, kw_only=True, tag=True):
    """NOTICE: the process has finished and leaves the cluster."""


class Drain(Struct, frozen=True, kw_only=True, tag=True):
    """NOTICE of a server that wants to leave. Once its buckets are on other servers, it receives Ended."""


class Prepared(Struct, frozen=True, tag=True):
    """NOTICE of a server that has stored the prepared view with this :attr:`View.order`."""

    term: Term
    epoch: Number


class Promised(Struct, frozen=True, tag=True):
    """NOTICE of a server that will store no prepared view of a term lower than `term`."""

    term: Term


class GetView(Struct, frozen=True, kw_only=True, tag=True):
    """Request the current members. The answer is View."""


class GetSettings(Struct, frozen=True, kw_only=True, tag=True):
    """Request the cluster's settings, before joining it. The answer is the settings."""


class EndCluster(Struct, frozen=True, kw_only=True, tag=True):
    """Request that all processes of the cluster end without an error. The answer is None."""


# From the scheduler.


class Welcome(Struct, Generic[Address, SettingsType], frozen=True, kw_only=True, tag=True):
    """Confirms that the process is a member, with its rank and incarnation."""

    rank: int
    incarnation: int
    heartbeat_s: float
    settings: SettingsType
    view: View[Address]
    received: int = -1
    """The number of the last message of this member that the scheduler has; -1 if the scheduler has none."""


class Elsewhere(Struct, frozen=True, kw_only=True, tag=True):
    """Answer to Rejoin: this address now belongs to another cluster. The member waits for its own cluster."""


class Promise(Struct, frozen=True, tag=True):
    """NOTICE to a server: from now on, store no prepared view of a term lower than `term`.

    The answer is Promised, unless the server has promised a higher term.
    """

    term: Term


class PrepareView(Struct, Generic[Address], frozen=True, tag=True):
    """NOTICE to a server: store this view without acting on it. The answer is Prepared."""

    view: View[Address] | ViewChange[Address]


class CommitView(Struct, frozen=True, tag=True):
    """NOTICE to a server: act on the view with this :attr:`View.order`, which was prepared on this connection."""

    term: Term
    epoch: Number


class Ended(Struct, frozen=True, kw_only=True, tag=True):
    """NOTICE: the member is released or the cluster ends, so the process must end without an error."""

    reason: str = ""


class Expelled(Struct, frozen=True, kw_only=True, tag=True):
    """NOTICE: the member was declared dead."""

    reason: str
