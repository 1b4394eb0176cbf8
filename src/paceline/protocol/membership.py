"""Who is in the cluster: the scheduler's state machine.

The scheduler's runtime feeds a :class:`Membership` what nodes send and what the clock says, and does as the
instructions bid. The state is soft: after a restart it is relearned from what the nodes report
(:meth:`Membership.rebuild`), and training goes on meanwhile, because no iteration passes through the
scheduler.

Source: OSDI'14 "Scaling Distributed Machine Learning with the Parameter Server", sections 4.4 and 4.5 (server
and worker management); epochs as in Viewstamped Replication Revisited (Liskov and Cowling 2012), incarnations
as in SWIM (Das, Gupta, Motivala 2002).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Final, TypeAlias

from paceline.errors import UsageError
from paceline.protocol.transitions import OUTSIDE, StateTable, Transition

Address: TypeAlias = str | tuple[str | int, ...]
"""Where a node listens; the protocol passes it on and never looks inside."""


class Role(Enum):
    """What a node does. Observers look on (progress, dashboard) and are not part of the numbered map."""

    SERVER = "server"
    WORKER = "worker"
    OBSERVER = "observer"


@dataclass(frozen=True, slots=True)
class Member:
    """One live node."""

    node: str
    role: Role
    rank: int
    incarnation: int
    address: Address


@dataclass(frozen=True, slots=True)
class Register:
    """A node wants to be a member. ``preferred_rank``: this rank or none."""

    node: str
    role: Role
    address: Address
    now_s: float
    preferred_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A node says that it lives."""

    node: str
    incarnation: int
    now_s: float


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A node's connection to the scheduler broke."""

    node: str
    incarnation: int
    now_s: float


@dataclass(frozen=True, slots=True)
class Leave:
    """A node goes in good order."""

    node: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Expel:
    """A node lives and has to go; ``reason`` is told to it, as what follows on "declared dead"."""

    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Clock:
    """Time went on: look who has been silent too long."""

    now_s: float


@dataclass(frozen=True, slots=True)
class Welcome:
    """Tell the node that it is a member, with this rank and incarnation, as of this epoch."""

    node: str
    role: Role
    rank: int
    incarnation: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell the node that it is not taken; ``reason`` is a sentence for its user. Nothing has changed."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class Publish:
    """Send everybody the new map: the servers, then the workers, each by rank."""

    epoch: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Dead:
    """This incarnation is no member any more, and not by its own wish: take back its leases, fence it off."""

    node: str
    role: Role
    rank: int
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Expelled:
    """Tell the sender that this incarnation is no member: it stops, or registers again and gets a new one."""

    node: str
    incarnation: int


Event: TypeAlias = Register | Heartbeat | Disconnected | Leave | Expel | Clock
Instruction: TypeAlias = Welcome | Refuse | Publish | Dead | Expelled

MEMBER: Final = StateTable(
    "an incarnation of a node",
    ("live", "doubtful", "gone"),
    (
        Transition(OUTSIDE, "Register", OUTSIDE, "Refuse", when="rank taken or negative"),
        Transition(OUTSIDE, "Register", "live", "Welcome"),
        Transition(OUTSIDE, "rebuild", "live"),
        Transition(OUTSIDE, "rebuild", "gone", when="a later one has its name or rank"),
        Transition(OUTSIDE, "readmit", "live"),
        Transition("live", "Heartbeat", "live"),
        Transition("live", "Disconnected", "doubtful", when="with grace"),
        Transition("live", "Disconnected", "gone", "Dead", when="without grace"),
        Transition("doubtful", "Heartbeat", "live"),
        Transition("live", "Leave", "gone"),
        Transition("live", "Clock", "gone", "Dead", when="silent too long"),
        Transition("live", "Register", "gone", "Dead", when="its node again"),
        Transition("live", "Expel", "gone", "Dead"),
        Transition("doubtful", "Leave", "gone"),
        Transition("doubtful", "Clock", "gone", "Dead", when="silent too long"),
        Transition("doubtful", "Register", "gone", "Dead", when="its node again"),
        Transition("doubtful", "Expel", "gone", "Dead"),
        Transition("gone", "Heartbeat", "gone", "Expelled"),
    ),
)

_INCARNATION_GAP: Final = 1 << 20
"""More incarnations than one scheduler gives."""


class Membership:
    """The live nodes, their ranks and incarnations, and the epoch of the map.

    ``heartbeat_timeout_s`` is how long a node may be silent; ``disconnect_grace_s`` how long it may be silent
    after its connection broke (0: the break itself is the death, as a killed process's is).

    Raises:
        UsageError: a number is out of range.
    """

    def __init__(
        self, expected_servers: int, heartbeat_timeout_s: float = 10.0, *, disconnect_grace_s: float = 0.0
    ) -> None:
        if expected_servers < 0 or not heartbeat_timeout_s > 0 or not disconnect_grace_s >= 0:
            raise UsageError(
                f"Membership(expected_servers={expected_servers}, heartbeat_timeout_s={heartbeat_timeout_s}, "
                f"disconnect_grace_s={disconnect_grace_s}): expected at least 0, more than 0 and at least 0."
            )
        self._expected_servers = expected_servers
        self._timeout_s = heartbeat_timeout_s
        self._grace_s = disconnect_grace_s
        self._epoch = 0
        self._next_incarnation = 1
        self._members: dict[str, Member] = {}
        self._expiries_s: dict[str, float] = {}  # node → when its silence becomes its death
        self._disconnected: set[str] = set()

    @classmethod
    def rebuild(
        cls,
        members: Iterable[Member],
        epoch: int,
        *,
        expected_servers: int,
        now_s: float,
        heartbeat_timeout_s: float = 10.0,
        disconnect_grace_s: float = 0.0,
    ) -> Membership:
        """Relearn the state from what live nodes say of themselves, and the highest ``epoch`` that any saw.

        The map gets the next epoch, since it may lack nodes that died unseen: publish :meth:`publish` at
        once. Of two that claim one name or one rank the later incarnation holds; the other is expelled at its
        heartbeat.
        """
        self = cls(expected_servers, heartbeat_timeout_s, disconnect_grace_s=disconnect_grace_s)
        self._epoch = epoch + 1
        taken: set[tuple[Role, int]] = set()
        highest = 0
        for member in sorted(members, key=lambda m: m.incarnation, reverse=True):
            highest = max(highest, member.incarnation)
            if member.node not in self._members and (member.role, member.rank) not in taken:
                taken.add((member.role, member.rank))
                self._members[member.node] = member
                self._expiries_s[member.node] = now_s + heartbeat_timeout_s
        # Rule 5: no incarnation is ever given twice. Those of nodes that are gone cannot be asked for, but each
        # rebuilt map has a higher epoch: each begins a range of its own.
        self._next_incarnation = max(highest + 1, self._epoch * _INCARNATION_GAP)
        return self

    @property
    def epoch(self) -> int:
        """The number of the current map; 0 before the first."""
        return self._epoch

    @property
    def last_incarnation(self) -> int:
        """No incarnation above this one was ever given: who has one up to it and is no member is gone."""
        return self._next_incarnation - 1

    @property
    def ready(self) -> bool:
        """Whether the expected servers are all there."""
        return sum(m.role is Role.SERVER for m in self._members.values()) >= self._expected_servers

    @property
    def members(self) -> tuple[Member, ...]:
        """All live nodes, observers included: by role, then rank."""
        order = {role: place for place, role in enumerate(Role)}
        return tuple(sorted(self._members.values(), key=lambda m: (order[m.role], m.rank)))

    @property
    def next_expiry_s(self) -> float | None:
        """The time after which a Clock event finds somebody dead, if all are silent; None without members."""
        return min(self._expiries_s.values(), default=None)

    def publish(self) -> Publish:
        """The current map, as last published."""
        return Publish(self._epoch, tuple(m for m in self.members if m.role is not Role.OBSERVER))

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event; return what to do, in order. At most one Publish, and it comes last."""
        match event:
            case Register():
                return self._register(event)
            case Heartbeat(node, incarnation, now_s):
                if self._find(node, incarnation) is None:
                    # Rule 3: the dead stay dead. Whatever the cause, this incarnation may not come back.
                    return [Expelled(node, incarnation)]
                self._disconnected.discard(node)
                self._expiries_s[node] = max(self._expiries_s[node], now_s + self._timeout_s)
                return []
            case Disconnected(node, incarnation, now_s):
                member = self._find(node, incarnation)
                if member is None:
                    return []
                if self._grace_s > 0:
                    self._disconnected.add(node)
                    self._expiries_s[node] = min(self._expiries_s[node], now_s + self._grace_s)
                    return []
                self._remove(member)
                dead = _dead(member, "its connection to the scheduler broke")
                return [dead, *self._publish_change(member.role)]
            case Leave(node, incarnation):
                member = self._find(node, incarnation)
                if member is None:
                    return []
                self._remove(member)
                return self._publish_change(member.role)
            case Expel(incarnation, reason):
                for member in [m for m in self._members.values() if m.incarnation == incarnation]:
                    self._remove(member)
                    return [_dead(member, reason), *self._publish_change(member.role)]
                return []
            case Clock(now_s):
                return self._expire(now_s)

    def readmit(self, member: Member, now_s: float) -> bool:
        """Take in again an observer that a former scheduler had welcomed and that comes when all is rebuilt.

        Observers are not on the map, so nobody knew that there was one to wait for. Return whether it is a member now:
        not if another one has its name or rank.
        """
        taken = any(m.node == member.node or (m.role, m.rank) == (member.role, member.rank) for m in self.members)
        if taken or member.role is not Role.OBSERVER or member.incarnation >= self._next_incarnation:
            return False
        self._members[member.node] = member
        self._expiries_s[member.node] = now_s + self._timeout_s
        return True

    def _register(self, event: Register) -> list[Instruction]:
        former = self._members.get(event.node)
        taken = {m.rank: m for m in self._members.values() if m.role is event.role and m is not former}
        rank = event.preferred_rank
        if rank is None:
            rank = next(r for r in count() if r not in taken)  # Rule 1: the smallest free rank of the role
        elif rank < 0 or rank in taken:
            holder = f"is held by node {taken[rank].node!r}" if rank in taken else "is negative"
            return [
                Refuse(
                    event.node,
                    f"Node {event.node!r} asked to be {event.role.value} {rank}, but that rank {holder}; "
                    "it was not taken in. Ask for another rank or for none.",
                )
            ]
        instructions: list[Instruction] = []
        if former is not None:
            # Rule 2: a node that registers again is a new process. The former one is dead, seen or not.
            self._remove(former)
            instructions.append(_dead(former, "its node registered again"))
        member = Member(event.node, event.role, rank, self._next_incarnation, event.address)
        self._next_incarnation += 1
        self._members[event.node] = member
        self._expiries_s[event.node] = event.now_s + self._timeout_s
        published = self._publish_change(event.role, *([former.role] if former else []))
        welcome = Welcome(event.node, event.role, rank, member.incarnation, self._epoch)
        return [*instructions, welcome, *published]

    def _expire(self, now_s: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        roles: list[Role] = []
        for member in [m for m in self.members if self._expiries_s[m.node] < now_s]:
            if member.node in self._disconnected:
                reason = f"its connection broke and it was not back within {self._grace_s:g} s"
            else:
                reason = f"nothing was heard from it for {self._timeout_s:g} s"
            self._remove(member)
            roles.append(member.role)
            instructions.append(_dead(member, reason))
        return [*instructions, *self._publish_change(*roles)]

    def _publish_change(self, *roles: Role) -> list[Instruction]:
        # Rule 4: one event that changes the set of servers or workers makes one new epoch; observers make
        # none.
        if all(role is Role.OBSERVER for role in roles):
            return []
        self._epoch += 1
        return [self.publish()]

    def _find(self, node: str, incarnation: int) -> Member | None:
        member = self._members.get(node)
        return member if member is not None and member.incarnation == incarnation else None

    def _remove(self, member: Member) -> None:
        del self._members[member.node], self._expiries_s[member.node]
        self._disconnected.discard(member.node)

    def validate(self) -> None:
        """Assert the invariants."""
        members = self._members.values()
        assert all(node == member.node for node, member in self._members.items())
        assert self._expiries_s.keys() == self._members.keys()
        assert self._disconnected <= self._members.keys()
        assert len({(m.role, m.rank) for m in members}) == len(members), "two nodes of one rank"
        assert len({m.incarnation for m in members}) == len(members), "two nodes of one incarnation"
        assert all(m.incarnation < self._next_incarnation and m.rank >= 0 for m in members)


def _dead(member: Member, reason: str) -> Dead:
    return Dead(member.node, member.role, member.rank, member.incarnation, reason)
