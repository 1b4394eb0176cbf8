"""The takeover of a cluster by a new scheduler, from the members' records.

Each member sends the newest view that it has received, committed or prepared (:class:`Evidence`). The takeover
(:class:`Succession`) continues from the newest of these views. The takeover needs a quorum of servers
(:mod:`paceline.protocol.scheduler.views`), and until the timeout it also waits for all other members. The servers first
promise to prepare no view of a former scheduler; otherwise a server could rejoin here, return to a live former
scheduler, and prepare a view there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from msgspec.structs import replace

from paceline.protocol.membership import Member, Role
from paceline.protocol.scheduler import events
from paceline.protocol.scheduler.messages import Rejoin
from paceline.protocol.scheduler.publication import term_after
from paceline.protocol.scheduler.views import View, may_take_over


class Evidence:
    """The records of one cluster's rejoined members. `ended` are the incarnations whose processes have ended."""

    def __init__(self, by_peer: Mapping[object, Rejoin]) -> None:
        self.by_peer = dict(by_peer)
        self.returned = tuple(by_peer.values())
        newest = _newest(rejoin.view for rejoin in self.returned)
        complete = _newest(rejoin.view for rejoin in self.returned if not rejoin.view.is_partial)
        self.orders = newest.order, complete.order
        self.latest = newest if newest is complete else _with_workers(newest, complete)
        """The newest view of all members, with the workers of the newest view that lists workers.

        The list is complete: a removal of a worker is in a view that a quorum of servers has prepared.
        """
        self._members = self.latest.incarnations
        # The voters of every view from which the former scheduler may continue. A view that only workers have lists no
        # workers. In this case, add the voters of the newest view with workers: they may have stored views with later
        # workers.
        self._electorates = self._voters_of(newest) + (self._voters_of(complete) if newest is not complete else [])

    def _voters_of(self, view: View) -> list[Collection[int]]:
        """Return the voters of a view and, if the view may be uncommitted, the voters of the view before it."""
        is_committed = any(rejoin.has_committed and rejoin.view.order == view.order for rejoin in self.returned)
        return [view.voters] if is_committed else [view.voters, view.former_voters]

    def is_member(self, returned: Rejoin) -> bool:
        incarnation = returned.member.incarnation
        is_new = self.latest.is_partial or incarnation > self.latest.last_incarnation
        return returned.member.role is Role.OBSERVER or is_new or incarnation in self._members

    def missing(self, ended: Collection[int]) -> tuple[Member, ...]:
        """Return the members of the newest view that have neither rejoined nor ended."""
        known = self._returned_members() | set(ended)
        return tuple(member for member in self.latest.members if member.incarnation not in known)

    def missing_members(self, ended: Collection[int]) -> tuple[Member, ...]:
        members = (*self.missing(ended), *self.missing_voters(ended))
        return tuple({member.incarnation: member for member in members}.values())

    @property
    def highest_term(self) -> int:
        return max((rejoin.highest_term for rejoin in self.returned), default=0)

    def has_quorum(self, ended: Collection[int], replicas: int, *, promised: int = 0) -> bool:
        """Whether enough servers have rejoined, and promised this term, to continue from the newest view."""
        returned = self._returned_members(promised)
        return all(may_take_over(voters, ended, returned, replicas) for voters in self._electorates)

    @property
    def has_voter(self) -> bool:
        """Whether each view that may be the newest has at least one voter that has rejoined."""
        returned = self._returned_members()
        return all(not returned.isdisjoint(voters) for voters in self._electorates if voters)

    def absent_voters(self, ended: Collection[int]) -> frozenset[int]:
        """Return the voters that have neither rejoined nor ended."""
        return frozenset().union(*self._electorates) - self._returned_members() - set(ended)

    def missing_voters(self, ended: Collection[int]) -> tuple[Member, ...]:
        known = {
            member.incarnation: member for rejoin in self.returned for member in (*rejoin.former, *rejoin.view.members)
        }
        return tuple(known[server] for server in sorted(self.absent_voters(ended)) if server in known)

    def is_complete(self, ended: Collection[int]) -> bool:
        """Return whether all members of the newest view, and the poster of the latest job, have rejoined.

        If no worker has rejoined, there may be a job whose record only the poster has.
        """
        number = max((rejoin.job_number for rejoin in self.returned), default=0)
        has_poster = any(rejoin.has_posted and rejoin.job_number == number for rejoin in self.returned)
        if not number:
            workers = {member.incarnation for member in self.latest.members if member.role is Role.WORKER}
            has_poster = not workers or not workers.isdisjoint(self._returned_members())
        return bool(self.returned) and has_poster and not self.missing(ended)

    def _returned_members(self, promised: int = 0) -> set[int]:
        return {rejoin.member.incarnation for rejoin in self.returned if rejoin.promised >= promised}


def _newest(views: Iterable[View]) -> View:
    """Return the newest view. Among copies of this view, prefer one with workers."""
    return max(views, key=lambda view: (view.order, not view.is_partial), default=View())


def _with_workers(partial: View, complete: View) -> View:
    workers = tuple(member for member in complete.members if member.role is Role.WORKER)
    return replace(
        partial, members=(*partial.members, *workers), last_incarnation=complete.last_incarnation, is_partial=False
    )


@dataclass(frozen=True, slots=True)
class Succession:
    """Outcome: the scheduler takes over this cluster."""

    evidence: Evidence
    term: int
    unwelcomed: frozenset[int]
    """Members that never received their welcome, and therefore register again."""
    ended: frozenset[int]

    @property
    def cluster(self) -> str:
        return self.evidence.returned[0].cluster

    def goes_on(self, returned: Rejoin) -> bool:
        return returned.member.incarnation not in self.ended and self.evidence.is_member(returned)

    def present(self) -> list[Member]:
        returned = [rejoin.member for rejoin in self.evidence.returned if self.goes_on(rejoin)]
        return returned + [member for member in self.evidence.latest.members if member.incarnation in self.unwelcomed]

    def absent(self) -> list[Member]:
        known = self.ended | {member.incarnation for member in self.present()}
        servers = (member for member in self.evidence.latest.members if member.role is Role.SERVER)
        return [member for member in servers if member.incarnation not in known]

    def leaving(self) -> list[int]:
        return [
            rejoin.member.incarnation for rejoin in self.evidence.returned if rejoin.is_leaving and self.goes_on(rejoin)
        ]


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Outcome: no cluster can be taken over."""


Outcome: TypeAlias = (
    events.RequestPromise | events.NotifyOperator | events.DeclareDead | events.SendElsewhere | events.WatchProcess
    | Abandoned | Succession
)  # fmt: skip


class Recovery:
    """The members that have rejoined, and the members whose processes have ended.

    Recovery waits for all members until the timeout. After the timeout, `accepts_minority` allows a takeover without a
    quorum. `replaces` means that members of a former cluster exist. `salt` is unique to this scheduler.
    """

    def __init__(
        self, *, replicas: int, timeout_s: float, salt: int, replaces: bool = False, accepts_minority: bool = False
    ) -> None:
        self._replicas = replicas
        self._timeout_s = self._deadline_s = timeout_s
        self._salt = salt
        self._replaces = replaces
        self._accepts_minority = accepts_minority
        self._returned: dict[object, Rejoin] = {}  # connection → record of the rejoined member
        self._peers: dict[tuple[str, int], object] = {}  # cluster and incarnation → connection
        # The missing members for which the last decision was to wait. Until all of them are back, no new decision is
        # needed, unless a member has a newer view. `_orders` has the orders of the newest views in the evidence.
        self._awaited: set[int] = set()
        self._orders = (0, 0), (0, 0)
        self._num_registering = 0
        self._cluster = ""  # the cluster to take over
        self._ended: set[int] = set()
        self._suspected: set[int] = set()
        self._term = 0  # the term of this scheduler, if it takes over
        self._requested: set[object] = set()  # the servers that received the request to promise this term
        self.needed: tuple[Member, ...] = ()

    def reset(self) -> None:
        """Forget the former cluster, because a new cluster uses the same incarnations for other members."""
        self._returned, self._peers, self._cluster, self._replaces = {}, {}, "", False
        self._awaited = set()
        self._ended, self._suspected, self.needed = set(), set(), ()

    def is_hopeless(self, time_s: float) -> bool:
        """Whether no server has rejoined in time, so that the cluster's data is missing."""
        members = self._returned.values()
        return time_s >= self._deadline_s and all(rejoin.member.role is not Role.SERVER for rejoin in members)

    def add(self, peer: object, returned: Rejoin, time_s: float) -> None:
        if not self._returned:
            self._deadline_s = time_s + self._timeout_s
        incarnation, view = returned.member.incarnation, returned.view
        name = returned.cluster, incarnation
        if name in self._peers:
            self.forget(self._peers[name])
        self.forget(peer)
        self._returned[peer] = returned
        self._peers[name] = peer
        is_newer = view.order > self._orders[0] or (not view.is_partial and view.order > self._orders[1])
        if is_newer or returned.former or returned.cluster != self._cluster:
            self._awaited = set()
        self._awaited.discard(incarnation)

    def forget(self, peer: object) -> Rejoin | None:
        returned = self._returned.pop(peer, None)
        if returned is not None:
            del self._peers[returned.cluster, returned.member.incarnation]
            self._awaited = set()
        return returned

    def leave(self, peer: object) -> list[events.Instruction]:
        cluster, returned = self.cluster, self.forget(peer)
        if returned is None:
            return []
        if returned.cluster == cluster:
            self._ended.add(returned.member.incarnation)
        return [events.DeclareDead(peer, "it has left")]

    def drain(self, peer: object) -> None:
        if peer in self._returned:
            self._returned[peer] = replace(self._returned[peer], is_leaving=True)

    def promise(self, peer: object, term: int) -> None:
        if peer in self._returned:
            self._returned[peer] = replace(self._returned[peer], promised=term)

    def ended(self, incarnation: int) -> None:
        self._ended.add(incarnation)
        self._awaited.discard(incarnation)

    def suspect(self, incarnation: int) -> None:
        """Record that the process of a member has probably ended.

        If a quorum exists without this member, the takeover does not wait for the member.
        """
        self._suspected.add(incarnation)
        self._awaited.discard(incarnation)

    @property
    def cluster(self) -> str:
        """The cluster from which most servers have rejoined; empty if no member has rejoined.

        If several clusters have the same number of rejoined servers, the number of rejoined members decides.
        """
        votes = Counter(rejoin.cluster for rejoin in self._returned.values())
        servers = Counter(rejoin.cluster for rejoin in self._returned.values() if rejoin.member.role is Role.SERVER)
        return max(votes, key=lambda name: (servers[name], votes[name]), default="")

    def evidence(self) -> Evidence:
        cluster = self.cluster
        return Evidence({peer: rejoin for peer, rejoin in self._returned.items() if rejoin.cluster == cluster})

    def reject_foreign(self) -> list[events.SendElsewhere]:
        cluster = self.cluster
        return [events.SendElsewhere(peer) for peer, rejoin in self._returned.items() if rejoin.cluster != cluster]

    def reject_all(self) -> list[events.SendElsewhere]:
        """Reject all members, because this scheduler begins a new cluster."""
        return [events.SendElsewhere(peer) for peer in self._returned]

    def missing_members(self) -> tuple[Member, ...]:
        return self.evidence().missing_members(self._ended)

    def decide(self, registering: Collection[str], time_s: float, highest_term: int = 0) -> list[Outcome]:
        """Take over if the necessary members have rejoined.

        `registering` are the names of the nodes that register, and `highest_term` is the highest term of them.
        """
        is_late = time_s >= self._deadline_s
        must_decide = is_late or not self._awaited or len(registering) != self._num_registering
        self._num_registering = len(registering)
        if not must_decide:
            return []
        if not self._returned:
            return [Abandoned()] if is_late or not self._replaces else []
        if self.cluster != self._cluster:
            if self._cluster:  # former records belong to another cluster, with equal incarnations
                self._ended, self._suspected = set(), set()
            self._cluster = self.cluster
        evidence = self.evidence()
        out = self._decide(evidence, registering, max(evidence.highest_term, highest_term), is_late=is_late)
        if not any(isinstance(outcome, (Succession, Abandoned)) for outcome in out):
            missing = evidence.missing_members(self._ended)
            out += [events.WatchProcess(member, is_connected=False) for member in missing]
        return out

    def _decide(
        self, evidence: Evidence, registering: Collection[str], highest_term: int, *, is_late: bool
    ) -> list[Outcome]:
        latest = evidence.latest
        # Members that register again never received their welcome: they have committed no view and hold no bucket.
        unwelcomed = {member.incarnation for member in latest.members if member.node in registering}
        without, missing = self._ended | unwelcomed, set[int]()
        is_complete = is_late or evidence.is_complete(without | self._suspected)
        self._orders = evidence.orders
        missing_members = () if is_complete else evidence.missing(without | self._suspected)
        self._awaited = {member.incarnation for member in missing_members}
        has_quorum = evidence.has_quorum(without, self._replicas)
        if latest.voters and latest.voters <= self._ended:
            return self._give_up(evidence) if is_complete else []
        if self._accepts_minority and is_late and not has_quorum and evidence.has_voter:
            # The operator declares the missing voters dead. At least one voter must have rejoined, because otherwise
            # all data is lost.
            missing = set(evidence.absent_voters(without))
            has_quorum, without = True, without | missing
        if not has_quorum:
            return [*self._need(evidence.missing_voters(without))] if is_late else []
        out: list[Outcome] = []
        if is_complete:
            out += self._request_promises(evidence, highest_term)
            if evidence.has_quorum(without, self._replicas, promised=self._term):
                ended = frozenset(self._ended | missing)
                out += [*self.reject_foreign(), Succession(evidence, self._term, frozenset(unwelcomed - ended), ended)]
        return out

    def _request_promises(self, evidence: Evidence, highest_term: int) -> list[events.RequestPromise]:
        if highest_term > self._term:
            self._term, self._requested = term_after(highest_term, self._salt), set()
        servers = [peer for peer, rejoin in evidence.by_peer.items() if rejoin.member.role is Role.SERVER]
        peers = tuple(peer for peer in servers if peer not in self._requested)
        self._requested.update(peers)
        return [events.RequestPromise(peers, self._term)] if peers else []

    def _need(self, servers: tuple[Member, ...]) -> list[events.NotifyOperator]:
        if servers == self.needed:
            return []
        self.needed = servers
        advice = None
        if self._accepts_minority:
            advice = "At least one must return, even with --accept-minority. If all are dead, start a new cluster"
        return [events.waits_for(servers, "to take over from the former scheduler", advice)]

    def _give_up(self, evidence: Evidence) -> list[Outcome]:
        """Expel the members of a cluster whose servers have all ended; the next cluster is new."""
        return [
            events.NotifyOperator("all servers of the former cluster have ended: its other members are rejected"),
            *(events.DeclareDead(peer, "all servers of its cluster have ended") for peer in evidence.by_peer),
            *self.reject_foreign(),
            Abandoned(),
        ]
