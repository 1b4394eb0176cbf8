"""Who is in the cluster: the members, their ranks and incarnations, and when each was heard last.

The scheduler's core (:mod:`paceline.protocol.scheduler`) holds one :class:`Membership`. The state is soft: after a
restart it is relearned from what the nodes report (:meth:`Membership.rebuild`), and training goes on meanwhile, because
no iteration passes through the scheduler.

Source: OSDI'14 "Scaling Distributed Machine Learning with the Parameter Server", sections 4.4 and 4.5 (server
and worker management); incarnations as in SWIM (Das, Gupta, Motivala 2002).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Annotated, Any, Final, Generic

from msgspec import Meta, Struct
from msgspec.structs import replace
from typing_extensions import TypeVar

from paceline.errors import UsageError
from paceline.protocol.bounds import Number, Rank

INCARNATION_RANGE: Final = 1 << 20
"""More incarnations than one scheduler gives."""


class Role(Enum):
    """What a node does. Observers look on (progress, dashboard) and are in no view."""

    SERVER = "server"
    WORKER = "worker"
    OBSERVER = "observer"


Address = TypeVar("Address", default=Any)
"""The type of members' addresses, which the protocol only passes on. The product has the transport's Endpoint."""


class ProcessIdentity(Struct, frozen=True, array_like=True):
    """Identity of one process among all that ever ran."""

    host: str
    """The boot of the machine, and the namespace of the process ids."""
    pid: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    started: int
    """Start time, in the units of the host's kernel."""


class Member(Struct, Generic[Address], frozen=True):
    """One live node: a process with a unique name."""

    node: str
    role: Role
    rank: Rank
    incarnation: Number
    address: Address | None = None
    """The address of its listener. Every server has one."""
    process: ProcessIdentity | None = None

    def __post_init__(self) -> None:
        if self.role is Role.SERVER and self.address is None:
            raise UsageError(f"server {self.rank} ({self.node}) has no address: every server has one")


class Membership:
    """The live members.

    Arguments: `expected_servers`, how many the cluster begins with; `heartbeat_timeout_s`, how long a member may be
    silent before it is overdue; `first_incarnation`, the lowest that is given to a newcomer.

    Raises:
        UsageError: a number is out of range.
    """

    def __init__(self, expected_servers: int, heartbeat_timeout_s: float = 10.0, *, first_incarnation: int = 1) -> None:
        if expected_servers < 0 or not heartbeat_timeout_s > 0 or first_incarnation < 1:
            raise UsageError(
                f"Membership(expected_servers={expected_servers}, heartbeat_timeout_s={heartbeat_timeout_s}, "
                f"first_incarnation={first_incarnation}): expected at least 0, more than 0 and at least 1."
            )
        self.expected_servers = expected_servers
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self._next_incarnation = first_incarnation
        self._members: dict[int, Member] = {}  # by incarnation
        self._by_node: dict[str, Member] = {}
        self._by_rank: dict[Role, dict[int, Member]] = {role: {} for role in Role}
        self._free_rank = dict.fromkeys(Role, 0)  # no rank below it is free
        self._heard_s: dict[int, float] = {}
        # Incarnations that the scheduler before may have given, and no view tells of: who has one may still come.
        self._unknown = range(0)
        self._unknown_until_s = 0.0

    @classmethod
    def rebuild(
        cls,
        members: Iterable[Member],
        first_incarnation: int,
        *,
        expected_servers: int,
        now_s: float,
        heartbeat_timeout_s: float = 10.0,
        last_known: int | None = None,
    ) -> Membership:
        """Go on with these members, all of them as if heard now.

        Of two that claim one name or one rank the later incarnation is taken. Those with incarnations between
        `last_known` and the first that is given may come within the time-out: no view tells of them.
        """
        self = cls(expected_servers, heartbeat_timeout_s, first_incarnation=first_incarnation)
        for member in sorted(members, key=lambda each: -each.incarnation):
            self._next_incarnation = max(self._next_incarnation, member.incarnation + 1)
            if member.node not in self._by_node and member.rank not in self._by_rank[member.role]:
                self._add(member, now_s)
        self._unknown = range(first_incarnation if last_known is None else last_known + 1, first_incarnation)
        self._unknown_until_s = now_s + heartbeat_timeout_s
        return self

    @property
    def last_incarnation(self) -> int:
        """Whoever has an incarnation up to this one, and is no member, is gone."""
        return self._unknown.start - 1 if self._unknown else self._next_incarnation - 1

    def is_unknown(self, incarnation: int) -> bool:
        """Whether one that no view tells of may have this incarnation."""
        return incarnation in self._unknown

    def expire_unknown(self, now_s: float) -> bool:
        """Take those for gone that no view tells of if their time is over; return whether it has just ended."""
        is_over = bool(self._unknown) and now_s >= self._unknown_until_s
        if is_over:
            self._unknown = range(0)
        return is_over

    @property
    def ready(self) -> bool:
        """Whether the expected servers are all there."""
        return len(self._by_rank[Role.SERVER]) >= self.expected_servers

    @property
    def members(self) -> tuple[Member, ...]:
        """All live members, observers included: by role, then rank."""
        return tuple(each for role in Role for each in self.of(role))

    def of(self, role: Role) -> tuple[Member, ...]:
        """The members of a role, by rank."""
        by_rank = self._by_rank[role]
        return tuple([by_rank[rank] for rank in sorted(by_rank)])

    @property
    def servers(self) -> dict[int, int]:
        """The ranks of the servers, by incarnation."""
        return {each.incarnation: each.rank for each in self.of(Role.SERVER)}

    def find(self, incarnation: int) -> Member | None:
        """The member of this incarnation."""
        return self._members.get(incarnation)

    def named(self, node: str) -> Member | None:
        """The member of this name."""
        return self._by_node.get(node)

    def register(
        self,
        node: str,
        role: Role,
        now_s: float,
        *,
        rank: int | None = None,
        address: Any = None,
        process: ProcessIdentity | None = None,
    ) -> Member:
        """Take in a node; return the member that it is now. One that is a member already stays the same.

        `rank`: this one or none; without it the smallest free rank of the role.

        Raises:
            UsageError: the rank is taken or negative; nothing has changed.
        """
        known = self._by_node.get(node)
        if known is not None:
            # Rule 1: a name is one process. Who registers again has not heard its welcome.
            self.heard(known.incarnation, now_s)
            return known
        taken = self._by_rank[role]
        if rank is None:
            rank = self._find_rank(role)  # Rule 2: the smallest free rank of the role
        elif rank < 0 or rank in taken:
            holder = f"is held by node {taken[rank].node!r}" if rank in taken else "is negative"
            raise UsageError(
                f"Node {node!r} asked to be {role.value} {rank}, but that rank {holder}; it was not taken in. Ask for "
                "another rank or for none."
            )
        # Rule 3: no incarnation is ever given twice.
        member = Member(node, role, rank, self._next_incarnation, address, process)
        self._next_incarnation += 1
        self._add(member, now_s)
        return member

    def readmit(self, member: Member, now_s: float) -> Member | None:
        """Take in again one that a former scheduler had welcomed, and of whom no view tells; return the member.

        It is none if another one has its name or rank; but an observer has another rank then.
        """
        if member.node in self._by_node or member.incarnation >= self._next_incarnation:
            return None
        if member.rank in self._by_rank[member.role]:
            if member.role is not Role.OBSERVER:
                return None
            member = replace(member, rank=self._find_rank(member.role))
        self._add(member, now_s)
        return member

    def heard(self, incarnation: int, now_s: float) -> bool:
        """Note a sign of life; return whether it is a member's. The dead stay dead."""
        if incarnation not in self._members:
            return False
        self._heard_s[incarnation] = max(now_s, self._heard_s[incarnation])
        return True

    def doubt(self, incarnation: int) -> bool:
        """Count a member as overdue until it is heard again; return whether it is one."""
        if incarnation not in self._members:
            return False
        self._heard_s[incarnation] = -float("inf")
        return True

    def overdue(self, now_s: float) -> tuple[Member, ...]:
        """The members that were silent for longer than the time-out, by incarnation."""
        due_s = now_s - self.heartbeat_timeout_s
        return tuple([self._members[each] for each in sorted(self._heard_s) if self._heard_s[each] < due_s])

    def remove(self, incarnation: int) -> Member | None:
        """Forget a member; return it, or None if it is none."""
        member = self._members.pop(incarnation, None)
        if member is not None:
            del self._by_node[member.node], self._by_rank[member.role][member.rank], self._heard_s[incarnation]
            self._free_rank[member.role] = min(member.rank, self._free_rank[member.role])
            if incarnation > self.last_incarnation:
                self._unknown = range(0)  # views must say that it is gone, and say so of all up to it
        return member

    def _find_rank(self, role: Role) -> int:
        """The smallest free rank of a role."""
        rank = self._free_rank[role]
        while rank in self._by_rank[role]:
            rank += 1
        self._free_rank[role] = rank
        return rank

    def _add(self, member: Member, now_s: float) -> None:
        self._members[member.incarnation] = member
        self._by_node[member.node] = member
        self._by_rank[member.role][member.rank] = member
        self._heard_s[member.incarnation] = now_s

    def validate(self) -> None:
        """Assert the invariants."""
        members = self._members
        assert all(incarnation == member.incarnation for incarnation, member in members.items())
        assert {member.node: member for member in members.values()} == self._by_node, "two members of one name"
        for role, by_rank in self._by_rank.items():
            assert by_rank == {m.rank: m for m in members.values() if m.role is role}, "two members of one rank"
            assert all(rank in by_rank for rank in range(self._free_rank[role])), "a free rank is overlooked"
        assert self._heard_s.keys() == members.keys()
        assert max(members, default=0) < self._next_incarnation, "an incarnation would be given twice"
