"""What the scheduler's core is told, and what it has its runtime do.

A *peer* is a connection, as the runtime knows it: the core compares peers and gives them back, and does no more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Generic, TypeAlias, TypeVar

from msgspec import Struct

from paceline.protocol.chains import BucketsLost as BucketsLost
from paceline.protocol.membership import Member
from paceline.protocol.scheduler.messages import Drain, Filled, Heartbeat, Leave, Prepared, Promised, Register, Rejoin
from paceline.protocol.scheduler.views import View

PROCESS_ENDED: Final = "its process ended"
"""Why somebody was removed whose process has ended, and that is certain."""

MemberMessage: TypeAlias = Register | Rejoin | Heartbeat | Leave | Drain | Filled | Prepared | Promised
"""A message of a process that the core handles."""
Message = TypeVar("Message", bound=MemberMessage)

# Events.


class MessageReceived(Struct, Generic[Message], frozen=True):
    """A message of a process."""

    peer: object
    message: Message


class Disconnected(Struct, frozen=True):
    """A connection broke. That is no death: the member comes again."""

    peer: object


class ProcessEnded(Struct, frozen=True):
    """The process of this incarnation has ended, and that is certain: the kernel of its host says so."""

    incarnation: int


class Doubted(Struct, frozen=True):
    """The process of this incarnation has probably ended: its host is there and nobody listens at its address."""

    incarnation: int


class NewsDue(Struct, frozen=True):
    """The time has come to send the news of the job."""


class Flush(Struct, frozen=True):
    """Publish what has waited for more to be published with it."""


class TimePassed(Struct, frozen=True):
    """Time went on."""


# Instructions.


class Admit(Struct, frozen=True):
    """Tell the process that it is this member, and the committed view."""

    peer: object
    member: Member


class Reject(Struct, frozen=True):
    """Tell the process that it is not taken in; `reason` is a sentence for its user."""

    peer: object
    reason: str


class Foreign(Struct, frozen=True):
    """Tell the member that this scheduler has another cluster now: its own may come back, and it waits for that."""

    peer: object


class Expel(Struct, frozen=True):
    """Tell the member that it is none any more: it stops. `reason` follows on "declared dead"."""

    peer: object
    reason: str


class Removed(Struct, frozen=True):
    """This one is no member any more; `reason` is None if that was its own wish, else it is dead."""

    member: Member
    reason: str | None


class TakenOver(Struct, frozen=True):
    """This scheduler has taken the place of another: these members are back, with what they know."""

    returned: tuple[tuple[object, Rejoin], ...]
    """Their connections and messages."""
    dead: tuple[Member, ...]
    """The members that are not."""

    def without(self, member: Member) -> TakenOver:
        """Return the same with one member more that is dead."""
        returned = tuple(each for each in self.returned if each[1].member.incarnation != member.incarnation)
        return TakenOver(returned, (*self.dead, member))


class RequestPromise(Struct, frozen=True):
    """Ask these servers to prepare nothing of a lower term than this one; answered by Promised."""

    peers: tuple[object, ...]
    term: int


class Prepare(Struct, frozen=True):
    """Send this view to these servers, to be kept and answered by Prepared, not to be acted on."""

    peers: tuple[object, ...]
    view: View


class Publish(Struct, frozen=True):
    """Send this view to all members, to be acted on."""

    view: View


class FlushSoon(Struct, frozen=True):
    """There is something to publish that need not be published at once: Flush in a moment."""


class ReleaseServer(Struct, frozen=True):
    """Tell the server that wants to leave that it may."""

    peer: object


class Note(Struct, frozen=True):
    """Tell whoever runs the cluster."""

    text: str


def waits_for(servers: Iterable[Member], aim: str, advice: str | None = None) -> Note:
    """Tell that nothing goes on without these servers, and what may be done."""
    names = " and ".join(f"server {each.rank} ({each.node})" for each in servers)
    advice = advice or "If these are dead, start the scheduler again with --accept-minority"
    return Note(f"waits for {names}: too few of the servers that have buckets are heard {aim}. {advice}")


class Superseded(Struct, frozen=True):
    """Another scheduler has taken over the cluster, in this term: end."""

    term: int


# Instructions of the scheduler's sessions.


class SendMessage(Struct, frozen=True):
    """Send a message, or an error, to a process: the answer to call `request`, or a notice if that is 0."""

    peer: object
    message: Any
    request: int = 0
    received: int = 0
    """The number of the process's last message; 0: unknown."""
    body: bytes = b""


class Close(Struct, frozen=True):
    """Close a connection. Its process waits for that."""

    peer: Any


class WatchProcess(Struct, frozen=True):
    """Watch the process of a member, which may end. Skip it if :meth:`SchedulerCore.is_watched` is false by then."""

    member: Member
    is_connected: bool


class WatchOnly(Struct, frozen=True):
    """Watch no other processes any longer: there is a new cluster."""

    incarnations: frozenset[int]


class MemberDisconnected(Struct, frozen=True):
    """A member has no connection any more: find out whether its process has ended."""

    incarnation: int


class ServeRequest(Struct, frozen=True):
    """Serve a request that is the runtime's; answer by :meth:`SchedulerCore.reply`."""

    call: object
    message: Any


class NewsSoon(Struct, frozen=True):
    """There are news of the job: NewsDue in a moment."""


class ClusterEnded(Struct, frozen=True):
    """The cluster was told to end."""


Event: TypeAlias = MessageReceived[MemberMessage] | Disconnected | ProcessEnded | Doubted | Flush | TimePassed
Instruction: TypeAlias = (
    Admit | Reject | Foreign | Expel | Removed | TakenOver | RequestPromise | Prepare | Publish | FlushSoon
    | ReleaseServer | BucketsLost | Note | Superseded | SendMessage | Close | WatchProcess | WatchOnly
    | MemberDisconnected | ServeRequest | NewsSoon
    | ClusterEnded
)  # fmt: skip
