"""The scheduler's work grows in proportion to the number of its members."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable

from paceline.protocol import Role
from paceline.protocol.scheduler import events
from paceline.protocol.scheduler.core import SchedulerCore
from paceline.protocol.scheduler.events import SendMessage
from paceline.protocol.scheduler.member_state import MemberState
from paceline.protocol.scheduler.messages import Heartbeat, Register, SchedulerSettings, Welcome
from paceline.protocol.scheduler.numbered_messages import MessageNumbers
from paceline.protocol.scheduler.views import ViewChange

NUM_SERVERS = 4


class Cluster:
    """A scheduler, four servers and many workers. The members answer immediately."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.members: dict[str, MemberState] = {}
        self.time_s = 0.0
        self.start_scheduler()

    def start_scheduler(self, *, replaces: bool = False) -> None:
        settings = SchedulerSettings(cluster="one", num_servers=NUM_SERVERS, replicas=1)
        self.core = SchedulerCore(settings, num_buckets=8, replaces=replaces)
        self.sent: list[object] = []

    def do(self, instructions: list[events.Instruction]) -> None:
        """Execute instructions, and deliver the answers of members."""
        for instruction in instructions:
            if isinstance(instruction, SendMessage):
                self.sent.append(instruction.message)
                member = self.members.get(str(instruction.peer).partition("/")[0], MemberState(8))
                if isinstance(instruction.message, Welcome):
                    member.welcomed(instruction.message)
                elif (answer := member.take(instruction.message)[1]) is not None:
                    self.receive(str(instruction.peer), answer)

    def receive(self, peer: str, message: object) -> None:
        self.do(self.core.receive(peer, message, MessageNumbers(1), self.time_s))

    def join(self) -> None:
        """Register some workers before a cluster exists, then the servers, and then more workers."""
        names = [f"w{number}" for number in range(self.num_workers // 2)]
        names += [f"s{number}" for number in range(NUM_SERVERS)]
        names += [f"v{number}" for number in range(self.num_workers - self.num_workers // 2)]
        for name in names:
            state = self.members[name] = MemberState(8)
            role = Role.SERVER if name.startswith("s") else Role.WORKER
            state.registration = Register(node=name, role=role, address=name)
            self.core.connected(name)
            self.receive(name, state.registration)
        self.do(self.core.handle(events.Flush(), self.time_s))

    def lose_workers(self) -> None:
        """Stop the heartbeats of a tenth of the workers."""
        for name in [name for name in self.members if name.startswith("v")][: self.num_workers // 10]:
            del self.members[name]
        self.pass_time(self.members)

    def restart(self) -> None:
        """Replace the scheduler; all members rejoin. Half of the members rejoin after the deadline."""
        self.start_scheduler(replaces=True)
        members = sorted(self.members.items(), reverse=True)  # the first half has no servers
        for number, (name, state) in enumerate(members):
            peer = f"{name}/2"
            self.core.connected(peer)
            self.receive(peer, state.rejoin((), None))
            self.receive(peer, Heartbeat())
            if number == len(members) // 2:
                self.pass_time()
        for _ in range(2):  # decide to request promises, and take over
            self.do(self.core.handle(events.Flush(), self.time_s))

    def pass_time(self, peers: Iterable[str] = ()) -> None:
        """Let 15 heartbeat intervals pass, which is more than the timeout. Members on `peers` send heartbeats."""
        for _ in range(15):
            self.time_s += self.core.heartbeat_s
            for peer in peers:
                self.receive(peer, Heartbeat())
            self.do(self.core.handle(events.TimePassed(), self.time_s))

    def validate(self) -> None:
        self.core.validate()
        assert self.core.cluster.is_established
        view = self.core.cluster.committed
        assert {member.node for member in view.members} == set(self.members)


def phases(num_workers: int) -> dict[str, float]:
    """Return the processor time of each phase."""
    cluster, durations = Cluster(num_workers), {}
    work: list[Callable[[], None]] = [cluster.join, cluster.lose_workers, cluster.restart]
    gc.disable()
    for phase in work:
        began_s = time.thread_time()
        phase()
        durations[phase.__name__] = time.thread_time() - began_s
        cluster.validate()
    gc.enable()
    return durations


def test_four_times_the_members_need_less_than_eight_times_the_work() -> None:
    """A quadratic cost would be 16 times as high."""
    small, large = ([phases(size) for _ in range(3)] for size in (400, 1600))
    for name in small[0]:
        assert min(run[name] for run in large) < 8 * min(run[name] for run in small), name


def test_members_receive_changes_instead_of_complete_views() -> None:
    """Only a welcome and a first view contain all chains. Servers that join together are in one change."""
    cluster = Cluster(100)
    cluster.join()
    changes = [message for message in cluster.sent if isinstance(message, ViewChange)]
    assert len(changes) > 1
    assert len({id(change) for change in changes}) * NUM_SERVERS == len(changes)
    assert all(not change.groups for change in changes)
