"""Track the launchers of an elastic training on several nodes.

Each node has one launcher, which starts the node's ranks. The launcher of node 0 serves the coordinator and these
records. The other launchers send it a request at each start and end of a rank, and regularly in between. A launcher is
*lost* when its connection breaks or no request arrives for a time limit. All its ranks are then lost, and the other
ranks continue without them. If a lost launcher sends a request again, the answer names the lost ranks. The launcher
then kills these ranks and starts new ones. A new launcher of a node replaces the node's old launcher.

Torchrun and other systems send no such requests. The ranks that they start send the requests themselves: each rank is
its own launcher, with a node number of its own. :class:`OwnLaunchers` has the records of these ranks.

A *member* is the incarnation of a rank's process, as in :mod:`paceline.protocol.quorum`. Pure: the runtime is
:mod:`paceline.meeting.coordinator`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, TypeAlias

from msgspec import Meta, Struct
from typing_extensions import override

from paceline.errors import RankLostError, UsageError
from paceline.protocol.bounds import Number

# Requests of launchers, and the answer.


class RankStart(Struct, frozen=True, array_like=True, tag=True):
    """A launcher will start a process of a rank, and requests the number of this process."""

    node: Number
    launcher: Number
    serial: Number
    """The number of this start among those of the launcher. A repeated request has the same serial number."""
    rank: Number | None
    """None if the rank is its own launcher, because the rank has no number before it joins."""


class RankEnd(Struct, frozen=True, array_like=True, tag=True):
    """A process of a rank has ended."""

    node: Number
    launcher: Number
    member: Number
    is_failure: bool


class LauncherHeartbeat(Struct, frozen=True, array_like=True, tag=True):
    """The launcher lives. Sent regularly."""

    node: Number
    launcher: Number


class LauncherEnd(Struct, frozen=True, array_like=True, tag=True):
    """All ranks of the launcher have ended, and it will start no other ranks."""

    node: Number
    launcher: Number


LauncherRequest: TypeAlias = RankStart | RankEnd | LauncherHeartbeat | LauncherEnd


class LauncherAnswer(Struct, frozen=True, array_like=True):
    """The answer to each request of a launcher."""

    failure: Annotated[str, Meta(max_length=2000)] | None = None
    """The reason for which the training cannot continue; None if it can."""
    lost: tuple[Number, ...] = ()
    """Members of this launcher that were declared lost. The launcher must end their processes."""
    member: Number = 0
    """After a RankStart: the member to start."""
    has_joined: bool = False
    """After a RankEnd: whether the member took part in the training."""
    is_newcomer: bool = False
    """After a RankStart: whether the member enters a later quorum than the first one."""


@dataclass(slots=True)
class _Launcher:
    number: int
    """A random number that identifies the launcher."""
    name: str
    last_request_s: float
    members: dict[int, int] = field(default_factory=dict)
    """The members that have not ended, by the serial numbers of their starts."""
    lost: set[int] = field(default_factory=set)
    """Members that were declared lost, and whose end the launcher has not reported."""
    is_lost: bool = False

    def declare_lost(self) -> list[int]:
        """Declare all members lost. Return the members that were not declared lost before."""
        self.is_lost = True
        members = [member for member in self.members.values() if member not in self.lost]
        self.lost.update(members)
        return members


class Launchers:
    """The launchers of all nodes, and the numbers of their ranks' processes.

    The first process of each of the `num_ranks` ranks has the rank as its number. Later processes have larger numbers.
    A launcher is lost after `timeout_s` seconds without a request. At the time `start_by_s`, the initial ranks that no
    launcher has started are lost too.
    """

    server: ClassVar = "the launcher of node 0"
    """The process that serves the records, for messages."""

    def __init__(self, num_ranks: int, *, timeout_s: float, start_by_s: float) -> None:
        self.num_ranks = num_ranks
        self.timeout_s = timeout_s
        self._start_by_s = start_by_s
        self._unstarted = set(range(num_ranks))
        self._next_member = num_ranks
        self._nodes: dict[int, _Launcher] = {}
        self.notes: list[str] = []
        """Notes for the user that were not shown yet."""
        self._replaced: set[int] = set()
        """Numbers of launchers that another launcher of the same node has replaced."""

    @property
    def are_needed(self) -> bool:
        """Whether a launcher lives, or has not started its ranks yet."""
        return bool(self._unstarted) or not all(launcher.is_lost for launcher in self._nodes.values())

    @property
    def deadline_s(self) -> float | None:
        """The time at which :meth:`time_passed` must be called; None without launchers to wait for."""
        times = [launcher.last_request_s + self.timeout_s for launcher in self._nodes.values() if not launcher.is_lost]
        if self._unstarted:
            times.append(self._start_by_s)
        return min(times, default=None)

    def check_size(self, node: int, num_ranks: int | str | None) -> None:
        """Raise UsageError unless a launcher was started for the same number of ranks."""
        if num_ranks != self.num_ranks:
            raise UsageError(
                f"node {node} was started for {num_ranks} ranks, and node 0 for {self.num_ranks}. Pass the same "
                "--nnodes and --nproc-per-node on all nodes"
            )

    def new_member(self, rank: int | None) -> int:
        """Return the number of a new process of a rank."""
        if rank in self._unstarted:
            self._unstarted.remove(rank)
            return rank
        self._next_member += 1
        return self._next_member - 1

    def request_received(self, request: LauncherRequest, time_s: float, name: str = "") -> list[int]:
        """Record a request of a launcher. Return the members of the launcher that it replaces; they are lost.

        The `name` of the launcher is for notes. Raises RankLostError if another launcher has replaced this one.
        """
        if request.launcher in self._replaced:
            raise RankLostError(f"another launcher has started as node {request.node}")
        previous = self._nodes.get(request.node)
        if previous is not None and previous.number == request.launcher:
            if previous.is_lost:
                self.notes.append(f"{previous.name} is back, and its ranks join again")
            previous.last_request_s, previous.is_lost = time_s, False
            return []
        name = name or f"node {request.node}"
        self._nodes[request.node] = _Launcher(request.launcher, name, time_s)
        if previous is None:
            if not self._unstarted:
                self.notes.append(f"{name} has arrived")
            return []
        self._replaced.add(previous.number)
        replaces = "" if previous.is_lost else ", and replaces the first one"
        self.notes.append(f"another launcher has started as node {request.node}{replaces}")
        return previous.declare_lost()

    def start(self, request: RankStart) -> int:
        """Return the number of the process to start. A repeated request gets the same number, unless it was lost."""
        launcher = self._nodes[request.node]
        member = launcher.members.get(request.serial)
        if member is None or member in launcher.lost:
            member = launcher.members[request.serial] = self.new_member(request.rank)
        return member

    def ended(self, request: RankEnd) -> None:
        """Record the end of a process."""
        launcher = self._nodes[request.node]
        launcher.members = {key: member for key, member in launcher.members.items() if member != request.member}
        launcher.lost.discard(request.member)

    def launcher_ended(self, request: LauncherEnd) -> list[int]:
        """Remove a launcher; return its members that have not ended."""
        return self._nodes.pop(request.node).declare_lost()

    def disconnected(self, node: int, launcher: int) -> list[int]:
        """Record that the connection of a launcher is broken; return its members, which are lost."""
        current = self._nodes.get(node)
        return self._declare_lost(node) if current is not None and current.number == launcher else []

    def time_passed(self, time_s: float) -> list[int]:
        """Return the members of launchers that became silent, and the initial ranks that were not started in time."""
        lost: list[int] = []
        for node, launcher in list(self._nodes.items()):
            if time_s >= launcher.last_request_s + self.timeout_s:
                lost += self._declare_lost(node)
        if self._unstarted and time_s >= self._start_by_s:
            ranks = sorted(self._unstarted)
            self.notes.append(
                f"the other ranks start without rank {', '.join(map(str, ranks))}, which did not start in time"
            )
            lost += ranks
            self._unstarted.clear()
        return lost

    def expel(self, member: int) -> bool:
        """Let the launcher of a member end the member's process. Return False if no launcher has the member."""
        for launcher in self._nodes.values():
            if member in launcher.members.values():
                launcher.lost.add(member)
                return True
        return False

    def lost_members(self, node: int) -> tuple[int, ...]:
        """Return the members of a node's launcher that were declared lost and have not ended."""
        return tuple(sorted(self._nodes[node].lost)) if node in self._nodes else ()

    def _declare_lost(self, node: int) -> list[int]:
        """Declare a launcher lost; return its members that were not declared lost before."""
        launcher = self._nodes[node]
        members = launcher.declare_lost()
        if members:
            self.notes.append(f"{launcher.name} is lost")
        return members


class OwnLaunchers(Launchers):
    """The records of ranks that are their own launchers. A lost rank must end, and can return as a new process only."""

    server: ClassVar = "the coordinator"

    def __init__(self, *, timeout_s: float) -> None:
        super().__init__(0, timeout_s=timeout_s, start_by_s=math.inf)

    @override
    def check_size(self, node: int, num_ranks: int | str | None) -> None:
        if num_ranks != self.num_ranks:
            raise UsageError(
                f"node {node} of paceline run has reached paceline coordinator, which accepts only ranks that start "
                "without paceline run. Pass another --master-port"
            )

    @override
    def request_received(self, request: LauncherRequest, time_s: float, name: str = "") -> list[int]:
        if request.node not in self._nodes and not isinstance(request, RankStart):
            raise RankLostError(
                "the other ranks continue without this rank, because its connection broke or it was silent for "
                f"{self.timeout_s:g} s"
            )
        return super().request_received(request, time_s, name)

    @override
    def _declare_lost(self, node: int) -> list[int]:
        members = super()._declare_lost(node)
        del self._nodes[node]
        return members
