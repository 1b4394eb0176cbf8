"""Check that the scheduler's core makes exactly the transitions of the state table of incarnations."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TypeAlias

from paceline.protocol import Member, Role
from paceline.protocol.scheduler import events, messages
from paceline.protocol.scheduler.cluster import Phase
from paceline.protocol.scheduler.events import MessageReceived
from paceline.protocol.scheduler.members import MEMBER
from paceline.protocol.transitions import OUTSIDE

from ..scheduler.toys import HEARTBEAT_S, TIMEOUT_S, Node, Scheduler, Wire  # noqa: TID252
from .watching import Sight, Watch

START_S = 100.0
RARE = (41, 74, 361, 563, 1313, 1419, 1892, 2179)
"""Seeds of runs with rare cases, which occur in fewer than one run of fifty.

Other seeds are tried if this changes.
"""

Cause: TypeAlias = events.Event | str
CausedInstruction: TypeAlias = tuple[Cause, events.Instruction | None]


class Watched(Scheduler):
    """A scheduler whose events are recorded, with their effect on each incarnation."""

    def __init__(self, watch: Watch, cluster: str, **options: int | bool) -> None:
        super().__init__(cluster, now_s=START_S, **options)
        self.watch = watch
        self.looked_s = 0  # the time of the core's last check for overdue members
        self.known: set[int] = set()  # incarnations that are or were members, or are certainly no members
        self.seen: dict[int, Sight] = {}
        self.feed(events.TimePassed())  # start the time of the core

    def states(self) -> dict[int, Sight]:
        """The state of every incarnation, and the time when it is overdue."""
        due_s: dict[int, int] = {}
        for at_s in reversed(range(self.looked_s, self.looked_s + int(TIMEOUT_S) + 3)):
            due_s.update((member.incarnation, at_s) for member in self.core.membership.overdue(at_s))
        found: dict[int, Sight] = dict.fromkeys(self.known, ("gone",))
        for incarnation, at_s in due_s.items():
            found[incarnation] = ("silent",) if at_s <= self.looked_s else ("live", at_s)
        return found

    def feed(self, event: events.Event) -> list[events.Instruction]:
        before, phase = self.seen, self.core.phase
        instructions = super().feed(event)
        if isinstance(event, events.TimePassed):
            self.looked_s = int(self.now_s - START_S)
        cause: Cause = event
        if phase is not self.core.phase is Phase.LEADING:
            has_taken_over = any(isinstance(instruction, events.TakenOver) for instruction in instructions)
            cause = "form" if self.core.is_established and not has_taken_over else "take over"
        elif phase is Phase.RECOVERING is not self.core.phase:
            cause = "give up"
        instructions_of = self.instructions_of(cause, instructions)
        if cause == "form":
            before, self.known = {}, set()  # the incarnations belong to another cluster
        members = self.core.membership.members
        if cause == "take over":
            members += self.core.committed.members
        self.known |= {member.incarnation for member in members}
        self.seen = self.states()
        for incarnation, after in self.seen.items():
            former = before.get(incarnation, (OUTSIDE,))
            by, instruction = instructions_of.get(incarnation, (cause, None))
            if after[0] == "gone":
                self.watch.saw(former, "take over" if cause == "take over" else by, after, instruction)
            else:
                self.watch.saw(former, self.entry(cause, former, incarnation), after)
                self.watch.saw(after, by, after, instruction)
        return instructions

    def instructions_of(self, cause: Cause, instructions: list[events.Instruction]) -> dict[int, CausedInstruction]:
        """Return the instruction to each incarnation, if any, and its cause."""
        instructions_of: dict[int, CausedInstruction] = {}
        for instruction in instructions:
            match instruction:
                case events.Publish():
                    cause = "publish"
                case events.Reject():
                    self.watch.saw((OUTSIDE,), cause, (OUTSIDE,), instruction)
                case events.Admit(_, member):
                    instructions_of[member.incarnation] = "welcome", instruction
                case events.DeclareDead(peer) | events.ReleaseServer(peer):
                    assert isinstance(peer, Wire)
                    incarnation = self.core.incarnation_of(peer) or peer.node.incarnation
                    stays = self.core.membership.find(incarnation) is not None
                    instructions_of[incarnation] = "publish" if stays else cause, instruction
                    self.known.add(incarnation)
                case events.Removed(member):
                    instructions_of.setdefault(member.incarnation, (cause, None))
                case events.TakenOver(_, dead):
                    for member in dead:
                        instructions_of.setdefault(member.incarnation, (cause, None))
                    self.known |= {member.incarnation for member in dead}
                case _:
                    pass
        return instructions_of

    def entry(self, cause: Cause, former: Sight, incarnation: int) -> Cause:
        """Return the event by which an incarnation joins: its own event, or a view that it awaited."""
        member = self.core.membership.find(incarnation)
        assert member is not None
        if former != (OUTSIDE,):
            return cause
        match cause:
            case MessageReceived(_, messages.Register(node=node) | messages.Rejoin(member=Member(node))) if (
                node == member.node
            ):
                return cause
        return cause if isinstance(cause, str) else "publish"


class Run:
    """Several successive schedulers, and their nodes."""

    def __init__(self, random: Random, watch: Watch) -> None:
        self.random, self.watch = random, watch
        self.options = {"num_servers": random.choice((1, 2, 3)), "replicas": random.choice((0, 1, 2))}
        self.scheduler = Watched(watch, "the first", **self.options)
        self.nodes: list[Node] = []
        for _ in range(self.options["num_servers"]):
            self.start(Role.SERVER)

    def start(self, role: Role, rank: int | None = None, *, is_silent: bool = False) -> None:
        node = Node(f"{role.value} {len(self.nodes)}", role)
        node.is_silent = is_silent
        self.nodes.append(node)
        node.rank, node.is_extra = rank, role is Role.SERVER and self.scheduler.core.is_established
        self.scheduler.feed(MessageReceived(self.scheduler.connect(node), node.registration()))

    def living_nodes(self, *, connected: bool | None = None) -> list[Node]:
        living = [node for node in self.nodes if node.is_alive]
        return [node for node in living if connected is None or (node.wire is not None) is connected]

    def step(self) -> None:
        """Execute an action, and process all consequences."""
        actions: list[Callable[[], None]] = [
            self.pass_time,
            self.pass_time,
            self.join,
            self.fill,
            self.fill,
            self.stop_or_continue,
            self.cut,
            self.reconnect,
            self.reconnect,
            self.leave,
            self.kill,
            self.suspect,
        ]
        self.random.choice(actions)()
        if self.random.random() < 0.7:
            self.scheduler.deliver_all()
        if self.random.random() < 0.12:
            self.restart()

    def pass_time(self) -> None:
        servers = self.scheduler.core.membership.of(Role.SERVER)
        unreachable = {}
        if len(servers) > 1 and self.random.random() < 0.3:
            one, other = self.random.sample(servers, 2)
            unreachable = {one.node: (other.incarnation,)}
        self.scheduler.pass_time(self.random.choice((1, 2, 5, 12)) * HEARTBEAT_S, unreachable=unreachable)
        self.scheduler.handle(events.Flush())

    def join(self) -> None:
        if len(self.living_nodes()) < 8:
            is_silent = self.random.random() < 0.2  # the node does not receive its welcome
            self.start(self.random.choice(list(Role)), self.random.choice((None, None, -1, 0, 1)), is_silent=is_silent)

    def fill(self) -> None:
        filling = [group.filling for group in self.scheduler.view.groups if group.filling is not None]
        if filling:
            self.scheduler.fill(self.random.choice(filling))

    def stop_or_continue(self) -> None:
        for node in self.random.sample(
            self.living_nodes(), min(len(self.living_nodes()), self.random.choice((1, 1, 3)))
        ):
            node.prepares = self.random.random() < 0.7
            node.is_silent = not node.is_silent
            if not node.is_silent:
                self.scheduler.wake(node)

    def cut(self) -> None:
        if self.living_nodes(connected=True):
            wire = self.random.choice(self.living_nodes(connected=True)).wire
            assert wire is not None
            wire.cut()

    def reconnect(self) -> None:
        """A disconnected process reconnects."""
        lost = [node for node in self.living_nodes(connected=False) if not node.is_silent]
        if lost:
            node = self.random.choice(lost)
            if node.member is None:
                self.scheduler.register(node, node.rank, is_extra=node.is_extra)
            else:
                self.scheduler.rejoin(node)

    def leave(self) -> None:
        """Let a member leave, or a server drain."""
        node = self.random.choice(self.living_nodes(connected=True) or [None])
        if node is None or node.member is None or node.wire is None:
            return
        if node.role is Role.SERVER and self.random.random() < 0.8:
            wire = node.wire
            node.is_leaving, node.is_silent = True, self.random.random() < 0.3
            self.scheduler.feed(MessageReceived(wire, messages.Drain()))
            if self.random.random() < 0.5:  # the server does not receive its release
                wire.cut()
        else:
            self.scheduler.feed(MessageReceived(node.wire, messages.Leave()))
            node.is_alive = False
            node.wire.cut()

    def kill(self) -> None:
        if self.living_nodes():
            node = self.random.choice(self.living_nodes())
            if self.is_of_cluster(node) and self.random.random() < 0.2:  # reported before its connection breaks
                self.scheduler.feed(events.ProcessEnded(node.incarnation))
            self.scheduler.kill(node, is_known=self.is_of_cluster(node) and self.random.random() < 0.7)

    def suspect(self) -> None:
        core = self.scheduler.core
        members = (*core.membership.members, *core.missing_members)
        for member in self.random.sample(members, min(len(members), 2)):
            self.scheduler.feed(events.Suspected(member.incarnation))

    def is_of_cluster(self, node: Node) -> bool:
        """Whether a node may be a member of the scheduler's cluster."""
        core = self.scheduler.core
        return node.member is not None and (node.cluster == core.name or core.phase is Phase.RECOVERING)

    def restart(self) -> None:
        """Start a new scheduler. All nodes connect to it later."""
        former = self.scheduler
        if not former.core.is_established:
            return
        for wire in list(former.wires):
            wire.cut()
        for node in self.living_nodes():  # members of an earlier cluster end
            node.is_alive = node.member is None or node.cluster == former.core.name
            node.is_silent &= self.random.random() < 0.5
        name = f"the one after {former.core.name}"
        self.scheduler = Watched(self.watch, name, **self.options, replaces=self.random.random() < 0.5)


def test_the_core_follows_the_table_of_incarnations() -> None:
    watch = Watch(MEMBER)
    for number, seed in enumerate((*RARE, *range(5000))):
        if number >= 60 and watch.has_seen_all:
            break
        run = Run(Random(seed), watch)
        for _ in range(60):
            run.step()
    watch.ends()
