"""Events and instructions of the scheduler's core.

A *peer* is a connection of the runtime. The core only compares peers and returns them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Generic, TypeAlias, TypeVar

from msgspec import Struct

from paceline.protocol.membership import Member
from paceline.protocol.scheduler.messages import Drain, Filled, Heartbeat, Leave, Prepared, Promised, Register, Rejoin
from paceline.protocol.scheduler.views import View

PROCESS_ENDED: Final = "its process ended"
"""The reason for the removal of a member whose process has certainly ended."""

MemberMessage: TypeAlias = Register | Rejoin | Heartbeat | Leave | Drain | Filled | Prepared | Promised
Message = TypeVar("Message", bound=MemberMessage)

# Events.


class MessageReceived(Struct, Generic[Message], frozen=True):
    """A message of a process."""

    peer: object
    message: Message


class Disconnected(Struct, frozen=True):
    """A connection broke. The member may live and reconnect."""

    peer: object


class ProcessEnded(Struct, frozen=True):
    """The process of this incarnation has certainly ended: the kernel of its host reported it."""

    incarnation: int


class Suspected(Struct, frozen=True):
    """The process of this incarnation has probably ended, because its host refuses connections to its address."""

    incarnation: int


class NewsDue(Struct, frozen=True):
    """The delay after NewsSoon has passed: send the job's new facts to the members."""


class Flush(Struct, frozen=True):
    """The delay after FlushSoon has passed: decide about the collected messages, and publish the changes."""


class TimePassed(Struct, frozen=True):
    """Time has passed."""


# Instructions.


class Admit(Struct, frozen=True):
    """Admit the process as this member, and send it a welcome with the committed view."""

    peer: object
    member: Member


class Reject(Struct, frozen=True):
    """Reject the registration; `reason` is a sentence for the user."""

    peer: object
    reason: str


class SendElsewhere(Struct, frozen=True):
    """Answer the member's Rejoin with Elsewhere, because this scheduler leads another cluster than the member's.

    The member then waits for its own cluster.
    """

    peer: object


class DeclareDead(Struct, frozen=True):
    """Notify a process that it is no longer a member. Users read "declared dead" and then `reason`."""

    peer: object
    reason: str


class Removed(Struct, frozen=True):
    """The member is removed: it has left (`reason` is None) or is dead."""

    member: Member
    reason: str | None


class TakenOver(Struct, frozen=True):
    """This scheduler has taken over the cluster of another scheduler."""

    returned: tuple[tuple[object, Rejoin], ...]
    """The connections of the rejoined members, and their Rejoin messages."""
    dead: tuple[Member, ...]

    def without(self, member: Member) -> TakenOver:
        returned = tuple(pair for pair in self.returned if pair[1].member.incarnation != member.incarnation)
        return TakenOver(returned, (*self.dead, member))


class RequestPromise(Struct, frozen=True):
    """Request these servers to prepare no view of a lower term; the answer is Promised."""

    peers: tuple[object, ...]
    term: int


class Prepare(Struct, frozen=True):
    """Send this view to these servers, which store the view without acting on it and answer with Prepared."""

    peers: tuple[object, ...]
    view: View


class Publish(Struct, frozen=True):
    """Send this committed view to all members."""

    view: View


class FlushSoon(Struct, frozen=True):
    """The core collects messages to decide about them together: pass Flush to the core after a short delay."""


class ReleaseServer(Struct, frozen=True):
    """Notify the draining server that it may leave."""

    peer: object


class BucketsLost(Struct, frozen=True):
    """The data of these buckets (a mask) is lost, because their last server has ended."""

    buckets: int


class NotifyOperator(Struct, frozen=True):
    """Report this text to the operator of the cluster."""

    text: str


def waits_for(servers: Iterable[Member], aim: str, advice: str | None = None) -> NotifyOperator:
    names = " and ".join(f"server {server.rank} ({server.node})" for server in servers)
    advice = advice or "If these are dead, start the scheduler again with --accept-minority"
    return NotifyOperator(f"waits for {names}: too few servers that hold buckets are connected {aim}. {advice}")


class Superseded(Struct, frozen=True):
    """Another scheduler has taken over the cluster in this term: end this scheduler."""

    term: int


# Instructions of the scheduler's sessions.


class SendMessage(Struct, frozen=True):
    """Send a message, or an error, to a process: the answer to call number `request`, or a notice if `request` is 0."""

    peer: object
    message: Any
    request: int = 0
    received: int = 0
    body: bytes = b""


class Close(Struct, frozen=True):
    """Close a connection, because its process waits for the end of the connection."""

    peer: Any


class WatchProcess(Struct, frozen=True):
    """Watch the process of a member, and report its end. Skip this if :meth:`SchedulerCore.is_watched` is false."""

    member: Member
    is_connected: bool


class WatchOnly(Struct, frozen=True):
    """Watch only these processes from now on, because there is a new cluster."""

    incarnations: frozenset[int]


class MemberDisconnected(Struct, frozen=True):
    """A member has lost its connection: check whether its process has ended."""

    incarnation: int


class ServeRequest(Struct, frozen=True):
    """Serve a request that is not for the core, and pass the answer to :meth:`SchedulerCore.reply`."""

    call: object
    message: Any


class NewsSoon(Struct, frozen=True):
    """The job has new facts for the members: pass NewsDue to the core after a short delay."""


class ClusterEnded(Struct, frozen=True):
    """The end of the cluster was requested."""


Event: TypeAlias = MessageReceived[MemberMessage] | Disconnected | ProcessEnded | Suspected | Flush | TimePassed
Instruction: TypeAlias = (
    Admit | Reject | SendElsewhere | DeclareDead | Removed | TakenOver | RequestPromise | Prepare | Publish | FlushSoon
    | ReleaseServer | BucketsLost | NotifyOperator | Superseded | SendMessage | Close | WatchProcess | WatchOnly
    | MemberDisconnected | ServeRequest | NewsSoon
    | ClusterEnded
)  # fmt: skip
