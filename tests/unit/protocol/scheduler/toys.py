"""A scheduler that executes the instructions of its core, and simulated members, for tests.

Their messages wait on a :class:`Wire`, in order, until they are delivered. Tests can deliver them immediately.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from paceline.protocol import Member, Role
from paceline.protocol.buckets import to_bytes
from paceline.protocol.chains import ChainGroup, chain_group
from paceline.protocol.jobs import JobMemory, JobRecord
from paceline.protocol.scheduler import events, messages
from paceline.protocol.scheduler.cluster import ClusterCore, Phase
from paceline.protocol.scheduler.events import MemberMessage, MessageReceived
from paceline.protocol.scheduler.views import KnownViews, View

TIMEOUT_S = 10.0
HEARTBEAT_S = 1.0

T = TypeVar("T")


class Wire:
    """A connection of a node to a scheduler. If it breaks, undelivered messages are lost."""

    def __init__(self, node: Node, scheduler: Scheduler) -> None:
        self.node = node
        self.scheduler = scheduler
        self.to_scheduler: deque[events.Event] = deque()
        self.to_node: deque[Callable[[], None]] = deque()
        self.is_open = True
        self.is_welcomed = False

    def __repr__(self) -> str:
        return f"<{self.node.name} to {self.scheduler.core.name}>"

    def deliver_to_scheduler(self) -> None:
        self.scheduler.feed(self.to_scheduler.popleft())

    def deliver_to_node(self) -> None:
        self.to_node.popleft()()

    def cut(self) -> None:
        """Break the connection."""
        if self.is_open:
            self.is_open = False
            self.to_scheduler.clear()
            self.to_node.clear()
            if self.node.wire is self:
                self.node.wire = None
            self.scheduler.wires.remove(self)
            self.scheduler.feed(events.Disconnected(self))


class Node:
    """A process: its state, and its replies."""

    def __init__(self, name: str, role: Role) -> None:
        self.name = name
        self.role = role
        self.wire: Wire | None = None
        self.member: Member | None = None
        self.cluster = ""
        self.views = KnownViews()
        self.is_leaving = False
        self.is_extra = False
        self.rank: int | None = None
        """The requested rank."""
        self.is_alive = True
        self.is_silent = False
        """Whether the process is stopped: it sends and receives nothing, although it lives and is connected."""
        self.has_worked = False
        """Whether the process has received shards of a job."""
        self.prepares = True
        """Whether the process prepares views on request."""
        self.has_prepared: set[tuple[int, int]] = set()
        """The orders of all views that the process has prepared."""
        self.fate: object = None
        """The message that ended the process: Expel, ReleaseServer or Reject."""

    @property
    def incarnation(self) -> int:
        assert self.member is not None
        return self.member.incarnation

    def send(self, message: MemberMessage) -> None:
        assert self.wire is not None
        self.wire.to_scheduler.append(MessageReceived(self.wire, message))

    def registration(self) -> messages.Register:
        """Return the message of a process that is not yet a member."""
        return messages.Register(
            node=self.name,
            role=self.role,
            rank=self.rank,
            address=self.name,
            is_extra=self.is_extra,
            highest_term=self.views.highest_term,
        )

    def returned(self) -> messages.Rejoin:
        """Return the report of a member to a new scheduler."""
        assert self.member is not None
        assert self.views.newest is not None
        return messages.Rejoin(
            member=self.member,
            settings=messages.SchedulerSettings(cluster=self.cluster),
            view=self.views.newest,
            promised=self.views.promised,
            has_committed=self.views.is_committed,
            is_leaving=self.is_leaving,
            job=JobMemory(record=JobRecord(number=0), working=True, last_lease=0) if self.has_worked else None,
            former=() if self.views.former is None else self.views.former.members,
        )

    def welcomed(self, member: Member, cluster: str, view: View) -> None:
        self.member, self.cluster = member, cluster
        self.views.commit(view)

    def receive_prepare(self, wire: Wire, view: View) -> None:
        if self.prepares and self.views.prepare(view):
            self.has_prepared.add(view.order)
            wire.to_scheduler.append(MessageReceived(wire, messages.Prepared(view.term, view.epoch)))

    def receive_promise_request(self, wire: Wire, term: int) -> None:
        if self.views.promise(term):
            wire.to_scheduler.append(MessageReceived(wire, messages.Promised(term)))

    def ended(self, wire: Wire, fate: object) -> None:
        self.is_alive, self.fate = False, fate
        wire.cut()


class Scheduler:
    """A scheduler. `sent_instructions` contains all instructions of its core."""

    def __init__(self, cluster: str = "ours", *, now_s: float = 100.0, **options: Any) -> None:
        options = {"num_servers": 1, "num_buckets": 8, "salt": 1, **options}
        self.core = ClusterCore(heartbeat_timeout_s=TIMEOUT_S, name=cluster, **options)
        self.now_s = now_s
        self.wires: list[Wire] = []
        self.sent_instructions: list[events.Instruction] = []
        self.must_decide = False
        """Whether the recovering core has requested a Flush."""
        self.on_commit: Callable[[Scheduler, View, View], None] = lambda scheduler, former, view: None

    # Actions of tests.

    def all(self, kind: type[T]) -> list[T]:
        """Return all instructions of one kind."""
        return [event for event in self.sent_instructions if isinstance(event, kind)]

    def last(self, kind: type[T]) -> T:
        return self.all(kind)[-1]

    @property
    def notes(self) -> list[str]:
        """Return the messages for the operator of the cluster."""
        return [note.text for note in self.all(events.NotifyOperator)]

    @property
    def view(self) -> View:
        return self.core.committed

    def member(self, node: Node) -> Member | None:
        """Return the member that a node is for this scheduler."""
        return None if node.member is None else self.core.membership.find(node.incarnation)

    # Execution of the core's instructions.

    def feed(self, event: events.Event) -> list[events.Instruction]:
        former = self.core.committed
        instructions = self.core.handle(event, self.now_s)
        self.core.validate()
        self.sent_instructions += instructions
        for instruction in instructions:
            if isinstance(instruction, events.Publish):
                self.on_commit(self, former, instruction.view)
                former = instruction.view
            self._execute(instruction)
        return instructions

    def _execute(self, instruction: events.Instruction) -> None:
        match instruction:
            case events.Admit(peer, member):
                cluster, view = self.core.name, self._seen_by(member.role, self.core.committed)
                assert isinstance(peer, Wire)
                peer.is_welcomed = True
                self._deliver_to(peer, lambda wire: wire.node.welcomed(member, cluster, view))
            case events.Prepare(peers, view):
                for peer in peers:
                    self._deliver_to(peer, lambda wire: wire.node.receive_prepare(wire, view))
            case events.RequestPromise(peers, term):
                for peer in peers:
                    self._deliver_to(peer, lambda wire: wire.node.receive_promise_request(wire, term))
            case events.Publish(view):
                for wire in self.wires:
                    if wire.is_welcomed:
                        seen = self._seen_by(wire.node.role, view)
                        self._deliver_to(wire, lambda wire, seen=seen: wire.node.views.commit(seen))  # type: ignore[misc]
            case events.DeclareDead(peer) | events.ReleaseServer(peer) | events.Reject(peer):
                self._deliver_to(peer, lambda wire: wire.node.ended(wire, instruction))
            case events.SendElsewhere(peer):
                self._deliver_to(peer, lambda wire: wire.cut())
            case events.FlushSoon():
                self.must_decide = self.core.phase is Phase.RECOVERING
            case _:
                pass

    @staticmethod
    def _seen_by(role: Role, view: View) -> View:
        return view.without_workers() if role is Role.WORKER else view

    def _deliver_to(self, peer: object, do: Callable[[Wire], None]) -> None:
        assert isinstance(peer, Wire)
        if peer.is_open:
            peer.to_node.append(lambda: do(peer))

    # Delivery of all messages in flight.

    def deliver_all(self) -> None:
        """Deliver messages until none is in flight, also the messages of a recovering scheduler's decision."""
        while True:
            while busy := self._busy():
                for wire in busy:
                    while wire.to_scheduler:
                        wire.deliver_to_scheduler()
                    while wire.to_node and not wire.node.is_silent:
                        wire.deliver_to_node()
            if not self.must_decide:
                return
            self.must_decide = False
            self.feed(events.Flush())

    def _busy(self) -> list[Wire]:
        return [wire for wire in self.wires if wire.to_scheduler or (wire.to_node and not wire.node.is_silent)]

    def wake(self, *nodes: Node) -> None:
        """Resume silent nodes, and deliver all messages that arrived meanwhile."""
        for node in nodes:
            node.is_silent = False
            if node.wire is not None:
                self.feed(MessageReceived(node.wire, messages.Heartbeat()))
        self.deliver_all()

    def connect(self, node: Node) -> Wire:
        """Connect a node, and break its former connection."""
        if node.wire is not None:
            node.wire.cut()
        wire = node.wire = Wire(node, self)
        self.wires.append(wire)
        return wire

    def register(self, node: Node, rank: int | None = None, *, is_extra: bool = False) -> Node:
        node.rank, node.is_extra = rank, is_extra
        self.connect(node)
        node.send(node.registration())
        self.deliver_all()
        return node

    def rejoin(self, *nodes: Node) -> None:
        """Connect members of this or another cluster, and deliver their reports."""
        for node in nodes:
            self.connect(node)
            node.send(node.returned())
            self.deliver_all()

    def handle(self, *received: events.Event) -> None:
        """Feed events. After each event, deliver all messages."""
        for event in received:
            self.feed(event)
            self.deliver_all()

    def kill(self, *nodes: Node, is_known: bool = True) -> None:
        """Kill processes; with `is_known` the kernel of their host reports their end."""
        for node in nodes:
            node.is_alive = False
            if node.wire is not None:
                node.wire.cut()
        for node in nodes:
            if is_known:
                self.feed(events.ProcessEnded(node.incarnation))
        self.deliver_all()

    def leave(self, node: Node) -> None:
        node.send(messages.Leave())
        self.deliver_all()

    def drain(self, *nodes: Node) -> None:
        for node in nodes:
            node.is_leaving = True
            node.send(messages.Drain())
            self.deliver_all()

    def fill(self, target: Node | int, buckets: int | None = None, *, version: int | None = None) -> None:
        """Report a completed fill of a server: of `buckets`, or of all its buckets in the committed view."""
        server = target if isinstance(target, int) else target.incarnation
        mask = sum(group.buckets for group in self.view.groups if group.filling == server)
        version = self.view.version if version is None else version
        self.handle(filled(version, server, mask if buckets is None else buckets), events.Flush())

    def fill_all(self) -> None:
        """Finish all fills, one after the other."""
        for _ in range(20):
            filling = {group.filling for group in self.view.groups if group.filling is not None}
            if not filling:
                return
            self.fill(min(filling))
        raise AssertionError(f"fills do not end: {self.view.groups}")

    def pass_time(self, duration_s: float, *, unreachable: Mapping[str, tuple[int, ...]] | None = None) -> None:
        """Advance the time: connected members that are not silent send heartbeats."""
        for _ in range(round(duration_s / HEARTBEAT_S)):
            self.now_s += HEARTBEAT_S
            for wire in list(self.wires):
                if wire.is_open and not wire.node.is_silent:
                    heartbeat = messages.Heartbeat(unreachable=(unreachable or {}).get(wire.node.name, ()))
                    self.feed(MessageReceived(wire, heartbeat))
            self.feed(events.TimePassed())
            self.deliver_all()


def observer(name: str) -> Node:
    return Node(name, Role.OBSERVER)


def server(name: str) -> Node:
    return Node(name, Role.SERVER)


def worker(name: str) -> Node:
    return Node(name, Role.WORKER)


def started(
    num_servers: int, num_workers: int = 0, *, replicas: int = 0, **options: Any
) -> tuple[Scheduler, list[Node], list[Node]]:
    """Return a scheduler with a formed cluster, its servers s0, s1, … and its workers w0, w1, …"""
    scheduler = Scheduler(num_servers=num_servers, replicas=replicas, **options)
    servers = [scheduler.register(server(f"s{number}")) for number in range(num_servers)]
    workers = [scheduler.register(worker(f"w{number}")) for number in range(num_workers)]
    scheduler.handle(events.Flush())
    assert scheduler.core.phase is Phase.LEADING
    assert all(node.member is not None for node in (*servers, *workers))
    return scheduler, servers, workers


def chains(view: View) -> dict[int, tuple[tuple[int, ...], int | None]]:
    """Return the chain of each bucket: its members, and the server that is being filled."""
    return {
        bucket: (group.members, group.filling)
        for group in view.groups
        for bucket in range(group.buckets.bit_length())
        if group.buckets >> bucket & 1
    }


def holders(view: View, node: Node) -> int:
    """Return the buckets that a node holds as a member of their chains."""
    return sum(group.buckets for group in view.groups if node.incarnation in group.members)


def group(*members: int, filling: int | None = None, buckets: int = 1) -> ChainGroup:
    return chain_group(members, filling, buckets)


def filled(version: int, target: int, buckets: int) -> events.Event:
    """Return the primary's report that its successor in the chain has these buckets."""
    return MessageReceived(None, messages.Filled(version, target, to_bytes(buckets)))
