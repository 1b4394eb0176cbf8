"""The members of the cluster: their ranks and incarnations, and the times of their last heartbeats.

After a restart the scheduler rebuilds this state from the processes' reports (:meth:`Membership.rebuild`). Training
continues during that time, because iterations do not involve the scheduler.

Source: OSDI'14 "Scaling Distributed Machine Learning with the Parameter Server", sections 4.4 and 4.5 (server and
worker management); incarnations as in SWIM (Das, Gupta, Motivala 2002). Comments refer to the rules of section
"Members and views" in docs/explanation/protocol.md.
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
"""The number of incarnations reserved for one scheduler, which is more than the scheduler will assign."""


class Role(Enum):
    """The role of a process. Observers (progress, dashboard) are in no view."""

    SERVER = "server"
    WORKER = "worker"
    OBSERVER = "observer"


Address = TypeVar("Address", default=Any)
"""The type of members' addresses, which the protocol only passes on: :class:`paceline.transport.Endpoint` in Paceline.
"""


class ProcessIdentity(Struct, frozen=True, array_like=True):
    """Identity of one process, which no other process ever has."""

    host: str
    """The machine, its current boot, and the namespace of the process ids."""
    pid: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    started: int
    """Start time, in the units of the host's kernel."""


class Member(Struct, Generic[Address], frozen=True):
    """One live process with a unique name, `node`."""

    node: str
    role: Role
    rank: Rank
    incarnation: Number
    address: Address | None = None
    """The address of the member's listener. Every server has an address."""
    process: ProcessIdentity | None = None

    def __post_init__(self) -> None:
        if self.role is Role.SERVER and self.address is None:
            raise UsageError(f"server {self.rank} ({self.node}) has no address: every server needs one")


class Membership:
    """The live members.

    `expected_servers` is the number of servers at the cluster's start. A member is overdue after `heartbeat_timeout_s`
    of silence. `first_incarnation` is the lowest incarnation to assign. Raises UsageError if `expected_servers` is
    negative, or one of the other two numbers is not positive.
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
        self._members: dict[int, Member] = {}  # incarnation → member
        self._by_node: dict[str, Member] = {}
        self._by_rank: dict[Role, dict[int, Member]] = {role: {} for role in Role}
        self._free_rank = dict.fromkeys(Role, 0)  # role → a rank below which no rank is free
        self._heartbeat_s: dict[int, float] = {}
        # Incarnations that the former scheduler may have assigned after its last view. Their processes may still
        # reconnect.
        self._unknown = range(0)
        self._unknown_until_s = 0.0

    @classmethod
    def rebuild(
        cls,
        members: Iterable[Member],
        first_incarnation: int,
        *,
        expected_servers: int,
        time_s: float,
        heartbeat_timeout_s: float = 10.0,
        last_known: int | None = None,
    ) -> Membership:
        """Restore the membership with these members, as if their heartbeats came at `time_s`.

        If two members have the same name or rank, the member with the higher incarnation is used. Members with
        incarnations after `last_known` and before `first_incarnation` are in no view; they may still reconnect.
        """
        self = cls(expected_servers, heartbeat_timeout_s, first_incarnation=first_incarnation)
        for member in sorted(members, key=lambda member: -member.incarnation):
            self._next_incarnation = max(self._next_incarnation, member.incarnation + 1)
            if member.node not in self._by_node and member.rank not in self._by_rank[member.role]:
                self._add(member, time_s)
        self._unknown = range(first_incarnation if last_known is None else last_known + 1, first_incarnation)
        self._unknown_until_s = time_s + heartbeat_timeout_s
        return self

    @property
    def last_incarnation(self) -> int:
        """Every process with an incarnation up to this number that is not a member has left or died."""
        return self._unknown.start - 1 if self._unknown else self._next_incarnation - 1

    def is_unknown(self, incarnation: int) -> bool:
        return incarnation in self._unknown

    def expire_unknown(self, time_s: float) -> bool:
        """After the timeout, stop waiting for processes that are in no view; return whether this call did so."""
        is_over = bool(self._unknown) and time_s >= self._unknown_until_s
        if is_over:
            self._unknown = range(0)
        return is_over

    @property
    def ready(self) -> bool:
        return len(self._by_rank[Role.SERVER]) >= self.expected_servers

    @property
    def members(self) -> tuple[Member, ...]:
        """All live members, including observers, sorted by role and then by rank."""
        return tuple(member for role in Role for member in self.of(role))

    def of(self, role: Role) -> tuple[Member, ...]:
        by_rank = self._by_rank[role]
        return tuple([by_rank[rank] for rank in sorted(by_rank)])

    @property
    def servers(self) -> dict[int, int]:
        return {server.incarnation: server.rank for server in self.of(Role.SERVER)}

    def find(self, incarnation: int) -> Member | None:
        return self._members.get(incarnation)

    def named(self, node: str) -> Member | None:
        return self._by_node.get(node)

    def register(
        self,
        node: str,
        role: Role,
        time_s: float,
        *,
        rank: int | None = None,
        address: Any = None,
        process: ProcessIdentity | None = None,
    ) -> Member:
        """Admit a process; return its member. A process that is already a member stays unchanged.

        Without `rank` the process gets the smallest free rank of the role. Raises UsageError if the rank is in use or
        negative; nothing is changed.
        """
        known = self._by_node.get(node)
        if known is not None:
            # Rule 1: a name belongs to one process. If the process registers again, it has not received its welcome.
            self.record_heartbeat(known.incarnation, time_s)
            return known
        taken = self._by_rank[role]
        if rank is None:
            rank = self._find_rank(role)  # Rule 2: by default the smallest free rank
        elif rank < 0 or rank in taken:
            problem = f"belongs to node {taken[rank].node!r}" if rank in taken else "is negative"
            raise UsageError(
                f"Node {node!r} was rejected: it requests to be {role.value} {rank}, but this rank {problem}. Request "
                "another rank, or omit the rank to get the smallest free rank."
            )
        # Rule 3: no incarnation is ever assigned twice.
        member = Member(node, role, rank, self._next_incarnation, address, process)
        self._next_incarnation += 1
        self._add(member, time_s)
        return member

    def readmit(self, member: Member, time_s: float) -> Member | None:
        """Readmit a member that a former scheduler admitted, but that no known view lists; return the member.

        Return None if another member has the same name or rank. An observer whose rank is in use gets another rank.
        """
        if member.node in self._by_node or member.incarnation >= self._next_incarnation:
            return None
        if member.rank in self._by_rank[member.role]:
            if member.role is not Role.OBSERVER:
                return None
            member = replace(member, rank=self._find_rank(member.role))
        self._add(member, time_s)
        return member

    def record_heartbeat(self, incarnation: int, time_s: float) -> bool:
        """Record a heartbeat; return whether its sender is a member. Former members are not readmitted."""
        if incarnation not in self._members:
            return False
        self._heartbeat_s[incarnation] = max(time_s, self._heartbeat_s[incarnation])
        return True

    def suspect(self, incarnation: int) -> bool:
        """Count a member as overdue until its next heartbeat. Return False if the process is not a member."""
        if incarnation not in self._members:
            return False
        self._heartbeat_s[incarnation] = -float("inf")
        return True

    def overdue(self, time_s: float) -> tuple[Member, ...]:
        due_s = time_s - self.heartbeat_timeout_s
        return tuple([self._members[member] for member, last_s in sorted(self._heartbeat_s.items()) if last_s < due_s])

    def remove(self, incarnation: int) -> Member | None:
        member = self._members.pop(incarnation, None)
        if member is not None:
            del self._by_node[member.node], self._by_rank[member.role][member.rank], self._heartbeat_s[incarnation]
            self._free_rank[member.role] = min(member.rank, self._free_rank[member.role])
            if incarnation > self.last_incarnation:
                self._unknown = range(0)  # raise `last_incarnation`, so that views exclude this process
        return member

    def _find_rank(self, role: Role) -> int:
        rank = self._free_rank[role]
        while rank in self._by_rank[role]:
            rank += 1
        self._free_rank[role] = rank
        return rank

    def _add(self, member: Member, time_s: float) -> None:
        self._members[member.incarnation] = member
        self._by_node[member.node] = member
        self._by_rank[member.role][member.rank] = member
        self._heartbeat_s[member.incarnation] = time_s

    def validate(self) -> None:
        members = self._members
        assert all(incarnation == member.incarnation for incarnation, member in members.items())
        assert {member.node: member for member in members.values()} == self._by_node, "two members with one name"
        for role, by_rank in self._by_rank.items():
            assert by_rank == {m.rank: m for m in members.values() if m.role is role}, "two members with one rank"
            assert all(rank in by_rank for rank in range(self._free_rank[role])), "a free rank is overlooked"
        assert self._heartbeat_s.keys() == members.keys()
        assert max(members, default=0) < self._next_incarnation, "an incarnation would be assigned twice"
