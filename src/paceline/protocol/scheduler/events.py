"""What the scheduler's core is told, and what it has its runtime do.

A *peer* is a connection, as the runtime knows it: the core compares peers and gives them back, and does no more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from paceline.protocol.chains import BucketsLost as BucketsLost
from paceline.protocol.membership import Member, Role
from paceline.protocol.scheduler.evidence import Returned
from paceline.protocol.scheduler.views import View

PROCESS_ENDED: Final = "its process ended"
"""Why somebody was removed whose process has ended, and that is certain."""

# Events.


@dataclass(frozen=True, slots=True)
class MemberRegistering:
    """A process wants to be a member: of this rank, if one is given. Answered by Admit or Reject, maybe later."""

    peer: object
    node: str
    role: Role
    rank: int | None = None
    address: object = None
    process: object = None
    is_extra: bool = False
    """Whether it is a server that joins a cluster which has all its servers: no cluster begins with it."""


@dataclass(frozen=True, slots=True)
class MemberRejoining:
    """A member comes (again), and says what it knows. Answered by Admit, Expel or Foreign, maybe later."""

    returned: Returned


@dataclass(frozen=True, slots=True)
class HeartbeatReceived:
    """A member says that it lives; a server also which servers it does not reach."""

    peer: object
    unreachable: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A connection broke. That is no death: the member comes again."""

    peer: object


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """The process of this incarnation has ended, and that is certain: the kernel of its host says so."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Doubted:
    """The process of this incarnation has probably ended: its host is there and nobody listens at its address."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class MemberLeaving:
    """A member goes in good order."""

    peer: object


@dataclass(frozen=True, slots=True)
class ServerDraining:
    """A server wants to leave when its buckets are elsewhere. Answered by ReleaseServer, then."""

    peer: object


@dataclass(frozen=True, slots=True)
class BucketsFilled:
    """Of the view of this version: the server `target` has all of these buckets now."""

    version: int
    target: int
    buckets: int


@dataclass(frozen=True, slots=True)
class ViewPrepared:
    """A server has the view of this order, see :attr:`View.order`."""

    peer: object
    term: int
    epoch: int


@dataclass(frozen=True, slots=True)
class TermPromised:
    """A server prepares nothing of a lower term than this one from now on."""

    peer: object
    term: int


@dataclass(frozen=True, slots=True)
class Flush:
    """Publish what has waited for more to be published with it."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Time went on."""


# Instructions.


@dataclass(frozen=True, slots=True)
class Admit:
    """Tell the process that it is this member, and the committed view."""

    peer: object
    member: Member


@dataclass(frozen=True, slots=True)
class Reject:
    """Tell the process that it is not taken in; `reason` is a sentence for its user."""

    peer: object
    reason: str


@dataclass(frozen=True, slots=True)
class Foreign:
    """Tell the member that this scheduler has another cluster now: its own may come back, and it waits for that."""

    peer: object


@dataclass(frozen=True, slots=True)
class Expel:
    """Tell the member that it is none any more: it stops. `reason` follows on "declared dead"."""

    peer: object
    reason: str


@dataclass(frozen=True, slots=True)
class Removed:
    """This one is no member any more; `reason` is None if that was its own wish, else it is dead."""

    member: Member
    reason: str | None


@dataclass(frozen=True, slots=True)
class TakenOver:
    """This scheduler has taken the place of another: these members are back, with what they know."""

    returned: tuple[Returned, ...]
    dead: tuple[Member, ...]
    """The members that are not."""

    def without(self, member: Member) -> TakenOver:
        """Return the same with one member more that is dead."""
        returned = tuple(each for each in self.returned if each.member.incarnation != member.incarnation)
        return TakenOver(returned, (*self.dead, member))


@dataclass(frozen=True, slots=True)
class RequestPromise:
    """Ask these servers to prepare nothing of a lower term than this one; answered by TermPromised."""

    peers: tuple[object, ...]
    term: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """Send this view to these servers, to be kept and answered by ViewPrepared, not to be acted on."""

    peers: tuple[object, ...]
    view: View


@dataclass(frozen=True, slots=True)
class Publish:
    """Send this view to all members, to be acted on."""

    view: View


@dataclass(frozen=True, slots=True)
class FlushSoon:
    """There is something to publish that need not be published at once: Flush in a moment."""


@dataclass(frozen=True, slots=True)
class ReleaseServer:
    """Tell the server that wants to leave that it may."""

    peer: object


@dataclass(frozen=True, slots=True)
class Note:
    """Tell whoever runs the cluster."""

    text: str


def waits_for(servers: Iterable[Member], aim: str, advice: str | None = None) -> Note:
    """Tell that nothing goes on without these servers, and what may be done."""
    names = " and ".join(f"server {each.rank} ({each.node})" for each in servers)
    advice = advice or "If these are dead, start the scheduler again with --accept-minority"
    return Note(f"waits for {names}: too few of the servers that have buckets are heard {aim}. {advice}")


@dataclass(frozen=True, slots=True)
class Superseded:
    """Another scheduler has taken over the cluster, in this term: end."""

    term: int


Event: TypeAlias = (
    MemberRegistering | MemberRejoining | HeartbeatReceived | Disconnected | ProcessEnded | Doubted | MemberLeaving
    | ServerDraining | BucketsFilled | ViewPrepared | TermPromised | Flush | TimePassed
)  # fmt: skip
Instruction: TypeAlias = (
    Admit | Reject | Foreign | Expel | Removed | TakenOver | RequestPromise | Prepare | Publish | FlushSoon
    | ReleaseServer | BucketsLost | Note | Superseded
)  # fmt: skip
