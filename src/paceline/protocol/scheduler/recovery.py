"""How a scheduler that was started in the place of another takes over: the members tell it what that one knew.

:class:`Recovery` collects those that come back. It goes on from the newest view that they know of when enough of its
servers are back and everybody else too, or the time-out is over (:class:`Succession`). Before that it has those servers
promise that they prepare nothing of a former scheduler any more: else one that has come here, and goes back to a
former one that lives, could prepare a view there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

from msgspec.structs import replace

from paceline.protocol.membership import Member, Role
from paceline.protocol.scheduler import events
from paceline.protocol.scheduler.evidence import Evidence
from paceline.protocol.scheduler.messages import Rejoin
from paceline.protocol.scheduler.publication import term_after


@dataclass(frozen=True, slots=True)
class Succession:
    """The cluster that is to be taken over now."""

    evidence: Evidence
    """What its members know that are back."""
    term: int
    """The new scheduler's."""
    unheard: frozenset[int]
    """Members that never heard their welcome, and register again."""
    ended: frozenset[int]
    """Incarnations whose processes are known to have ended."""

    @property
    def cluster(self) -> str:
        """Its name."""
        return self.evidence.returned[0].cluster

    def goes_on(self, returned: Rejoin) -> bool:
        """Whether one that is back still is a member."""
        return returned.member.incarnation not in self.ended and self.evidence.is_member(returned)

    def present(self) -> list[Member]:
        """The members that are there."""
        returned = [each.member for each in self.evidence.returned if self.goes_on(each)]
        return returned + [member for member in self.evidence.latest.members if member.incarnation in self.unheard]

    def absent(self) -> list[Member]:
        """The servers that may be there and have not come."""
        there = self.ended | {member.incarnation for member in self.present()}
        servers = (member for member in self.evidence.latest.members if member.role is Role.SERVER)
        return [member for member in servers if member.incarnation not in there]

    def leaving(self) -> list[int]:
        """Those that want to leave."""
        return [each.member.incarnation for each in self.evidence.returned if each.is_leaving and self.goes_on(each)]


@dataclass(frozen=True, slots=True)
class Abandoned:
    """There is no cluster to be taken over (any more)."""


Outcome: TypeAlias = events.RequestPromise | events.Note | events.Expel | events.Foreign | Abandoned | Succession


class Recovery:
    """The members that have come back so far, and what is known of the others.

    It waits for all of them until the time-out is over; with `accepts_minority` it takes over then from whoever
    has come. With `replaces` there are some, though none has come yet. `salt` is a number that no other scheduler has.
    """

    def __init__(
        self, *, replicas: int, timeout_s: float, salt: int, replaces: bool = False, accepts_minority: bool = False
    ) -> None:
        self._replicas = replicas
        self._timeout_s = self._deadline_s = timeout_s
        self._salt = salt
        self._replaces = replaces
        self._accepts_minority = accepts_minority
        self._returned: dict[object, Rejoin] = {}  # by connection
        self._cluster = ""  # the one that is to be taken over
        self._ended: set[int] = set()
        self._doubted: set[int] = set()
        self._term = 0  # the one that is to be its own
        self._asked: set[object] = set()  # whom it has asked to promise that
        self.needed: tuple[Member, ...] = ()
        """The servers without which it cannot take over."""

    def reset(self) -> None:
        """Forget the cluster that was to be taken over: a new one gives the same incarnations to others."""
        self._returned, self._cluster, self._replaces = {}, "", False
        self._ended, self._doubted, self.needed = set(), set(), ()

    def is_hopeless(self, now_s: float) -> bool:
        """Whether no server has come in time: one of another cluster has what nobody else may have."""
        has_servers = any(each.member.role is Role.SERVER for each in self._returned.values())
        return now_s >= self._deadline_s and not has_servers

    def add(self, peer: object, returned: Rejoin, now_s: float) -> None:
        """Note a member that is back; its newest connection counts."""
        if not self._returned:
            self._deadline_s = now_s + self._timeout_s
        name = returned.cluster, returned.member.incarnation
        for former, known in list(self._returned.items()):
            if (known.cluster, known.member.incarnation) == name:
                del self._returned[former]
        self._returned[peer] = returned

    def forget(self, peer: object) -> None:
        """Note that a connection broke."""
        self._returned.pop(peer, None)

    def leave(self, peer: object) -> list[events.Instruction]:
        """Note that a member goes in good order."""
        cluster, returned = self.cluster, self._returned.pop(peer, None)
        if returned is None:
            return []
        if returned.cluster == cluster:
            self._ended.add(returned.member.incarnation)
        return [events.Expel(peer, "it has left")]

    def drain(self, peer: object) -> None:
        """Note that a member wants to leave."""
        if peer in self._returned:
            self._returned[peer] = replace(self._returned[peer], is_leaving=True)

    def promise(self, peer: object, term: int) -> None:
        """Note what a member has promised."""
        if peer in self._returned:
            self._returned[peer] = replace(self._returned[peer], promised=term)

    def ended(self, incarnation: int) -> None:
        """Note that the process of a member has certainly ended."""
        self._ended.add(incarnation)

    def doubt(self, incarnation: int) -> None:
        """Note that the process of a member has probably ended: it is not waited for if a quorum is there without."""
        self._doubted.add(incarnation)

    @property
    def cluster(self) -> str:
        """The cluster that most servers, or else most members, are of; empty if nobody is back."""
        votes = Counter(each.cluster for each in self._returned.values())
        servers = Counter(each.cluster for each in self._returned.values() if each.member.role is Role.SERVER)
        return max(votes, key=lambda name: (servers[name], votes[name]), default="")

    def evidence(self) -> Evidence:
        """What the members of that cluster know."""
        cluster = self.cluster
        return Evidence({peer: each for peer, each in self._returned.items() if each.cluster == cluster})

    def others(self) -> list[events.Foreign]:
        """Send away the members of other clusters."""
        cluster = self.cluster
        return [events.Foreign(peer) for peer, each in self._returned.items() if each.cluster != cluster]

    def send_all_away(self) -> list[events.Foreign]:
        """Send away all members: this scheduler begins a cluster of its own."""
        return [events.Foreign(peer) for peer in self._returned]

    def awaited(self) -> tuple[Member, ...]:
        """The members that are not back: whether they have ended is worth knowing."""
        return self.evidence().awaited(self._ended)

    def decide(self, registering: Collection[str], now_s: float) -> list[Outcome]:
        """Take over if the members that are needed are back. `registering` are the nodes that ask to be taken in."""
        is_late = now_s >= self._deadline_s
        if not self._returned:
            return [Abandoned()] if is_late or not self._replaces else []
        if self.cluster != self._cluster:
            if self._cluster:  # of two that come here the other has more: its incarnations are others
                self._ended, self._doubted = set(), set()
            self._cluster = self.cluster
        evidence = self.evidence()
        latest = evidence.latest
        # Members that register again never heard their welcome: they have prepared no view and hold no bucket.
        unheard = {member.incarnation for member in latest.members if member.node in registering}
        without, missing = self._ended | unheard, set[int]()
        is_complete = is_late or evidence.is_complete(without | self._doubted)
        has_quorum = evidence.has_quorum(without, self._replicas)
        if latest.voters and latest.voters <= self._ended:
            return self._give_up(evidence) if is_complete else []
        if self._accepts_minority and is_late and not has_quorum and evidence.has_voter:
            # Whoever runs the cluster says that those that are missing are dead; without one that is back all is lost.
            missing = set(evidence.absent_voters(without))
            has_quorum, without = True, without | missing
        if not has_quorum:
            return [*self._need(evidence.missing_voters(without))] if is_late else []
        out: list[Outcome] = []
        if is_complete:
            out += self._ask(evidence)
            if evidence.has_quorum(without, self._replicas, promised=self._term):
                ended = frozenset(self._ended | missing)
                out += [*self.others(), Succession(evidence, self._term, frozenset(unheard - ended), ended)]
        return out

    def _ask(self, evidence: Evidence) -> list[events.RequestPromise]:
        """Ask those servers that have not been asked to prepare nothing of a former scheduler any more."""
        if evidence.highest_term > self._term:
            self._term, self._asked = term_after(evidence.highest_term, self._salt), set()
        servers = [peer for peer, each in evidence.by_peer.items() if each.member.role is Role.SERVER]
        peers = tuple(peer for peer in servers if peer not in self._asked)
        self._asked.update(peers)
        return [events.RequestPromise(peers, self._term)] if peers else []

    def _need(self, servers: tuple[Member, ...]) -> list[events.Note]:
        """Wait for these servers, and say so once."""
        if servers == self.needed:
            return []
        self.needed = servers
        advice = None
        if self._accepts_minority:
            advice = "One of them has to be back, --accept-minority or not; if all are dead, start a new cluster"
        return [events.waits_for(servers, "to take over from the scheduler before", advice)]

    def _give_up(self, evidence: Evidence) -> list[Outcome]:
        """Send away the members of a cluster whose servers have all ended; the next one is new."""
        return [
            events.Note("all servers of the former cluster have ended: its members are sent away"),
            *(events.Expel(peer, "the servers of its cluster are gone") for peer in evidence.by_peer),
            *self.others(),
            Abandoned(),
        ]
