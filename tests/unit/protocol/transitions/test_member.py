"""Membership does to the incarnations of nodes what its table says."""

from __future__ import annotations

from copy import deepcopy
from random import Random

from paceline.protocol import Member, Membership, Role
from paceline.protocol.membership import (
    MEMBER,
    Clock,
    Dead,
    Disconnected,
    Event,
    Expel,
    Expelled,
    Heartbeat,
    Leave,
    Refuse,
    Register,
    Welcome,
)
from paceline.protocol.transitions import OUTSIDE

from .watching import Sight, Watch

TIMEOUT_S, GRACE_S = 6.0, 3.0


class Run:
    """One scheduler after another, and the nodes that they know. Time goes on in whole seconds."""

    def __init__(self, random: Random, watch: Watch) -> None:
        self.random, self.watch = random, watch
        self.grace_s = random.choice([0.0, GRACE_S])
        self.membership = Membership(0, TIMEOUT_S, disconnect_grace_s=self.grace_s)
        self.now_s = 0.0
        self.known: list[Member] = []

    def sights(self) -> dict[int, Sight]:
        """What every incarnation is, and when its silence will be its death: a copy of the machine shows it."""
        found: dict[int, Sight] = {member.incarnation: ("gone",) for member in self.known}
        probe = deepcopy(self.membership)
        for after_s in range(int(TIMEOUT_S) + 1):
            for dead in probe.handle(Clock(self.now_s + after_s + 0.5)):
                if isinstance(dead, Dead):
                    state = "doubtful" if "connection broke" in dead.reason else "live"
                    found[dead.incarnation] = state, self.now_s + after_s
        assert not probe.members
        return found

    def step(self) -> None:
        """Do something, and watch what becomes of every incarnation."""
        self.now_s += self.random.choice([0, 0, 1])
        if self.random.random() < 0.05:
            self.restart()
            return
        before, event = self.sights(), self.event()
        told: dict[int, object] = {}
        for each in self.membership.handle(event):
            if isinstance(each, Refuse):
                self.watch.saw((OUTSIDE,), event, (OUTSIDE,), each)
            elif isinstance(each, Welcome):
                self.known.append(Member(each.node, each.role, each.rank, each.incarnation, "here"))
                told[each.incarnation] = each
            elif isinstance(each, Dead | Expelled):
                told[each.incarnation] = each
        for incarnation, after in self.sights().items():
            self.watch.saw(before.get(incarnation, (OUTSIDE,)), event, after, told.get(incarnation))

    def event(self) -> Event:
        if not self.known or self.random.random() < 0.3:
            rank = self.random.choice([None, None, -1, 0, 1])
            role = self.random.choice([Role.WORKER, Role.OBSERVER])
            return Register(self.random.choice("abcd"), role, "here", self.now_s, rank)
        each = self.random.choice(self.known[-6:])
        events: list[Event] = [
            Heartbeat(each.node, each.incarnation, self.now_s),
            Disconnected(each.node, each.incarnation, self.now_s),
            Leave(each.node, each.incarnation),
            Expel(each.incarnation, "it and another one do not reach each other"),
            Clock(self.now_s),
        ]
        return self.random.choice(events)

    def restart(self) -> None:
        """A new scheduler hears of all members, and of some that are none any more; observers come later."""
        living = self.membership.members
        newest = max((each.incarnation for each in living if each.role is Role.WORKER), default=0)
        late = [each for each in living if each.role is Role.OBSERVER and each.incarnation < newest]
        stale = self.random.sample(self.known, min(2, len(self.known)))
        self.known = list({each.incarnation: each for each in [*living, *stale]}.values())
        self.membership = Membership.rebuild(
            [each for each in self.known if each not in late],
            self.membership.epoch,
            expected_servers=0,
            now_s=self.now_s,
            heartbeat_timeout_s=TIMEOUT_S,
            disconnect_grace_s=self.grace_s,
        )
        sights = self.sights()
        for each in self.known:
            if each not in late:
                self.watch.saw((OUTSIDE,), "rebuild", sights[each.incarnation])
            elif self.membership.readmit(each, self.now_s):
                self.watch.saw((OUTSIDE,), "readmit", self.sights()[each.incarnation])


def test_membership_does_what_its_table_says() -> None:
    watch, random = Watch(MEMBER), Random(3)
    for _ in range(40):
        run = Run(random, watch)
        for _ in range(60):
            run.step()
    watch.ends()
