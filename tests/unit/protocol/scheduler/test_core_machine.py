"""The scheduler's core under any order of events, with one scheduler or with two that both act as leader.

Simulated members register, prepare, fill each other, fall silent, drain, leave and die, and their connections break at
any moment. New connections go to the newest scheduler. At the end all living members send heartbeats and all ends of
processes are known. Then the cluster must reach a stable state.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from paceline.protocol import Role
from paceline.protocol.buckets import buckets_in, to_bytes
from paceline.protocol.scheduler import events, messages
from paceline.protocol.scheduler.cluster import Phase
from paceline.protocol.scheduler.events import MessageReceived
from paceline.protocol.scheduler.views import View, commit_quorum, gaining

from .toys import HEARTBEAT_S, Node, Scheduler, chains

NUM_BUCKETS = 6
MAX_NODES = 14


class Run:
    """One cluster with `num_schedulers` successive schedulers. If `is_split`, a former scheduler may continue."""

    def __init__(self, seed: int, *, num_schedulers: int, is_split: bool) -> None:
        self.random = Random(seed)
        self.num_schedulers = num_schedulers
        self.is_split = is_split
        self.num_servers = self.random.choice((1, 2, 3, 4))
        self.replicas = self.random.choice((0, 1, 1, 2))
        self.nodes: list[Node] = []
        self.by_incarnation: dict[int, Node] = {}
        self.seen: set[type] = set()
        self.schedulers: list[Scheduler] = []
        self.start_scheduler(replaces=False)
        for number in range(self.num_servers):
            self.start(Role.SERVER, rank=number if self.random.random() < 0.5 else None)
        self.start(Role.WORKER)

    # Processes.

    @property
    def scheduler(self) -> Scheduler:
        """The newest scheduler, to which every process connects."""
        return self.schedulers[-1]

    def start_scheduler(self, *, replaces: bool) -> None:
        number = len(self.schedulers)
        scheduler = Scheduler(
            f"cluster {number}",
            salt=self.random.getrandbits(16),
            num_servers=self.num_servers,
            replicas=self.replicas,
            replaces=replaces,
            num_buckets=NUM_BUCKETS,
        )
        scheduler.on_commit = self.committed
        self.schedulers.append(scheduler)

    def start(self, role: Role, *, rank: int | None = None, is_extra: bool = False) -> None:
        node = Node(f"{role.value}{len(self.nodes)}", role)
        node.is_extra = is_extra
        node.rank = rank
        self.nodes.append(node)
        self.connect(node)

    def connect(self, node: Node) -> None:
        """Connect a node to the newest scheduler."""
        self.scheduler.connect(node)
        is_member = node.member is not None
        node.send(node.returned() if is_member else node.registration())

    @property
    def alive(self) -> list[Node]:
        return [node for node in self.nodes if node.is_alive]

    @property
    def by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    def is_alive(self, incarnation: int) -> bool:
        return self.by_incarnation[incarnation].is_alive

    def members(self, role: Role | None = None) -> list[Node]:
        """Return the nodes that are connected members and not silent."""
        return [
            node
            for node in self.alive
            if node.member is not None
            and node.wire is not None
            and not node.is_silent
            and (role is None or node.role is role)
        ]

    # Invariants.

    def committed(self, scheduler: Scheduler, former: View, view: View) -> None:
        """Check a committed view: its order is unique, enough servers have prepared it, no bucket is lost."""
        self.by_incarnation.update({member.incarnation: self.by_name[member.node] for member in view.members})
        for known in self.known(scheduler):
            assert known.order != view.order or known.same_servers(view), "two views of one order"
            assert known.version != view.version or known.groups == view.groups, "two chains of one version"
        assert view.order > former.order
        assert view.version >= former.version
        assert (view.version == former.version) == (view.groups == former.groups) or former.term != view.term
        if former.voters and not (former.term == view.term and view.only_adds_workers(former)):
            newest = max((known.term for known in self.known(scheduler)), default=0)
            assert view.term >= newest, "a superseded scheduler commits a view"
            self.check_prepared(former, view)
        for bucket, (members, _) in chains(view).items():
            before, _ = chains(former).get(bucket, ((), None))
            if before and not members:
                assert not any(map(self.is_alive, before)), "a bucket is lost, although a living server has it"

    def known(self, scheduler: Scheduler) -> list[View]:
        """Return the views that living members have applied and the views that other schedulers have committed."""
        cluster = scheduler.core.name
        views = [node.views.committed for node in self.alive if node.cluster == cluster]
        rivals = [
            candidate.core
            for candidate in self.schedulers
            if candidate is not scheduler and candidate.core.is_established
        ]
        views += [core.committed for core in rivals if core.name == cluster]
        return [view for view in views if view is not None]

    def check_prepared(self, former: View, view: View) -> None:
        prepared = {incarnation for incarnation, node in self.by_incarnation.items() if view.order in node.has_prepared}
        departed = former.voters - view.servers.keys()
        leaving = {
            incarnation
            for incarnation in departed
            if self.is_alive(incarnation) and self.by_incarnation[incarnation].is_leaving
        }
        quorum = commit_quorum(len(former.voters), self.replicas)
        for voters, num_left in ((former.voters, 0), (former.voters - leaving, len(leaving))):
            needed = min(max(quorum - num_left, 1), sum(map(self.is_alive, voters)))
            assert len(prepared & voters) >= needed, "too few servers have prepared the view"
        assert gaining(former.groups, view.groups) <= prepared, "a server with new buckets has not prepared the view"

    # Events.

    def step(self) -> None:
        actions: list[tuple[int, Callable[[], None]]] = [
            (60, self.deliver),
            (8, self.tick),
            (6, self.beat),
            (12, self.fill),
            (3, self.cut),
            (12, self.reconnect),
            (3, self.stop_or_continue),
            (3, self.join),
            (6, self.flush),
            (2, self.leave),
            (2, self.kill),
            (1, self.suspect),
        ]
        weights = [weight for weight, _ in actions]
        self.random.choices([action for _, action in actions], weights)[0]()
        if len(self.schedulers) < self.num_schedulers and self.random.random() < 0.02:
            self.replace_scheduler()

    def deliver(self) -> None:
        wires = [wire for scheduler in self.schedulers for wire in scheduler.wires]
        to_scheduler = [wire for wire in wires if wire.to_scheduler]
        to_node = [wire for wire in wires if wire.to_node and not wire.node.is_silent]
        if to_scheduler and (not to_node or self.random.random() < 0.5):
            self.random.choice(to_scheduler).deliver_to_scheduler()
        elif to_node:
            self.random.choice(to_node).deliver_to_node()

    def tick(self) -> None:
        """Advance the time for one scheduler; its members usually send heartbeats."""
        scheduler = self.random.choice(self.schedulers)
        scheduler.now_s += HEARTBEAT_S
        for wire in list(scheduler.wires):
            if wire.is_welcomed and not wire.node.is_silent and self.random.random() < 0.9:
                wire.to_scheduler.append(MessageReceived(wire, messages.Heartbeat()))
        scheduler.feed(events.TimePassed())

    def beat(self) -> None:
        members = self.members()
        if members:
            self.random.choice(members).send(messages.Heartbeat())

    def fill(self) -> None:
        """Report, by the last member of a chain, that the server that is being filled has some of its buckets."""
        for node in self.random.sample(self.members(Role.SERVER), len(self.members(Role.SERVER))):
            view = node.views.committed
            fills = [
                (group.filling, group.buckets)
                for group in (view.groups if view is not None else ())
                if group.filling is not None
                and group.members[-1:] == (node.incarnation,)
                and self.is_alive(group.filling)
            ]
            if view is not None and fills:
                target, buckets = self.random.choice(fills)
                if self.random.random() < 0.5:
                    buckets = 1 << self.random.choice(list(buckets_in(buckets)))
                node.send(messages.Filled(view.version, target, to_bytes(buckets)))
                return

    def cut(self) -> None:
        wires = [wire for scheduler in self.schedulers for wire in scheduler.wires]
        if wires:
            self.random.choice(wires).cut()

    def reconnect(self) -> None:
        """Reconnect a member that has lost its connection."""
        lost = [node for node in self.alive if node.wire is None and not node.is_silent]
        if lost:
            self.connect(self.random.choice(lost))

    def stop_or_continue(self) -> None:
        if self.alive:
            node = self.random.choice(self.alive)
            node.is_silent = not node.is_silent

    def join(self) -> None:
        if len(self.alive) < MAX_NODES and len(self.nodes) < 2 * MAX_NODES:
            self.start(self.random.choice((Role.SERVER, Role.SERVER, Role.WORKER)), is_extra=True)

    def flush(self) -> None:
        self.random.choice(self.schedulers).feed(events.Flush())

    def leave(self) -> None:
        """A worker leaves, or a server drains."""
        staying = [node for node in self.members() if not node.is_leaving]
        if len(staying) > 2:
            node = self.random.choice(staying)
            node.is_leaving = True
            node.send(messages.Drain() if node.role is Role.SERVER else messages.Leave())

    def kill(self) -> None:
        """End a process.

        Only the newest scheduler is notified, because the process would have connected to it.
        """
        if len(self.alive) > 2:
            filling = [self.by_incarnation.get(group.filling or 0) for group in self.scheduler.view.groups]
            victims = [node for node in filling if node is not None and node.is_alive]
            node = self.random.choice(victims if victims and self.random.random() < 0.4 else self.alive)
            node.is_alive = False
            if node.wire is not None:
                node.wire.cut()
            if node.member is not None and self.random.random() < 0.6:
                self.scheduler.feed(events.ProcessEnded(node.incarnation))

    def suspect(self) -> None:
        """Report to a scheduler that no process listens at the address of an ended process."""
        dead_nodes = [node for node in self.nodes if not node.is_alive and node.member is not None]
        if dead_nodes:
            self.random.choice(self.schedulers).feed(events.Suspected(self.random.choice(dead_nodes).incarnation))

    def replace_scheduler(self) -> None:
        former = self.scheduler
        if not former.core.is_established:
            return
        self.start_scheduler(replaces=self.random.random() < 0.5)
        if not self.is_split:
            self.end_scheduler(former)

    def end_scheduler(self, scheduler: Scheduler) -> None:
        self.schedulers.remove(scheduler)
        scheduler.on_commit = lambda *_: None
        for wire in list(scheduler.wires):
            wire.cut()

    # The end.

    def pause(self) -> None:
        """Without further faults, the cluster must reach a stable state."""
        for scheduler in self.schedulers[:-1]:
            self.end_scheduler(scheduler)
        for node in self.nodes:
            node.is_silent = False
        for _ in range(40):
            if self.scheduler.core.phase is Phase.SUPERSEDED:
                # The scheduler has met a member that was requested to prepare a view of an earlier scheduler, so the
                # next scheduler receives this fact.
                former = self.scheduler
                self.start_scheduler(replaces=True)
                self.end_scheduler(former)
            scheduler = self.scheduler
            for member in (*scheduler.core.membership.members, *scheduler.core.missing_members):
                if not self.by_name[member.node].is_alive:
                    scheduler.feed(events.ProcessEnded(member.incarnation))
            for node in self.alive:
                if node.wire is None:
                    self.connect(node)
            scheduler.deliver_all()
            scheduler.pass_time(2 * HEARTBEAT_S)
            scheduler.handle(events.Flush())
            self.fill_all()
        self.check_pause()

    def fill_all(self) -> None:
        for node in self.members(Role.SERVER):
            view = node.views.committed
            for group in view.groups if view is not None else ():
                if group.filling is not None and group.members[-1:] == (node.incarnation,) and node.wire is not None:
                    node.send(messages.Filled(self.scheduler.view.version, group.filling, to_bytes(group.buckets)))
        self.scheduler.deliver_all()
        self.scheduler.handle(events.Flush())

    def check_pause(self) -> None:
        scheduler = self.scheduler
        self.seen |= {type(event) for event in scheduler.sent_instructions}
        if not scheduler.core.is_established:  # the living members are waiting for servers
            assert sum(node.role is Role.SERVER and not node.is_extra for node in self.alive) < self.num_servers
            return
        assert scheduler.core.phase is Phase.LEADING
        assert scheduler.core.needed == ()
        # members of other clusters wait for their own scheduler
        members_of_cluster = [node for node in self.alive if node.cluster in ("", scheduler.core.name)]
        members = {node.incarnation for node in members_of_cluster if node.member is not None}
        assert {member.incarnation for member in scheduler.view.members} == members
        for node in members_of_cluster:
            assert scheduler.member(node) == node.member is not None, f"{node.name} still waits"
            assert node.views.committed is not None
            if node.role is Role.SERVER:
                assert node.views.committed == scheduler.view
        for members_of, filling in chains(scheduler.view).values():
            assert filling is None
            assert all(map(self.is_alive, members_of))


FIRST = [pytest.param(first, marks=[pytest.mark.thorough] * (first > 0)) for first in range(0, 160, 20)]
"""The first seeds of the tests; each test runs twenty seeds."""


@pytest.mark.parametrize("first", FIRST)
def test_one_scheduler_keeps_promises(first: int) -> None:
    for seed in range(first, first + 20):
        run = Run(seed, num_schedulers=1, is_split=False)
        for _ in range(250):
            run.step()
        run.pause()


@pytest.mark.parametrize("first", FIRST)
def test_successive_schedulers_keep_promises(first: int) -> None:
    for seed in range(first, first + 20):
        run = Run(seed, num_schedulers=3, is_split=False)
        for _ in range(250):
            run.step()
        run.pause()


@pytest.mark.parametrize("first", FIRST)
def test_two_simultaneous_leaders_keep_promises(first: int) -> None:
    for seed in range(first, first + 20):
        run = Run(seed, num_schedulers=2, is_split=True)
        for _ in range(250):
            run.step()
        run.pause()
