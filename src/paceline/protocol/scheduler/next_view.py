"""The next view: its chains, and the servers that leave by it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from paceline.protocol.buckets import count
from paceline.protocol.chains import VERSION_GAP, Planner, lost_buckets
from paceline.protocol.membership import Membership, Role
from paceline.protocol.scheduler.departures import Drains, Suspects
from paceline.protocol.scheduler.events import BucketsLost, Note, Publish
from paceline.protocol.scheduler.publication import Publication, Step
from paceline.protocol.scheduler.recovery import Succession
from paceline.protocol.scheduler.views import View


class NextView:
    """The view after the committed one, with the live servers and the fills that have ended since.

    The parameter `servers` has the live servers: incarnation → rank.
    """

    def __init__(self, planner: Planner, publication: Publication, timeout_s: float) -> None:
        self.planner = planner
        self.publication = publication
        self.suspects = Suspects(timeout_s)
        self.drains = Drains()
        self.ended: set[int] = set()
        """Incarnations whose processes are known to have ended."""
        self._filled: list[tuple[int, int]] = []  # reports since the last commit: target, buckets

    def take_over(self, succession: Succession, membership: Membership) -> None:
        """Continue from another scheduler's newest view, with these members."""
        latest, absent = succession.evidence.latest, [member.incarnation for member in succession.absent()]
        self.ended = set(succession.ended)
        self.drains.take_over(succession.leaving(), latest.servers, membership.expected_servers)
        self.suspects.take_over(absent)
        if latest.version:
            version, replicas = latest.version + VERSION_GAP, self.publication.replicas
            self.planner, _ = Planner.rebuild(
                latest.groups, version, membership.servers, replicas, self.drains.servers, absent
            )

    def filled(self, version: int, target: int, buckets: int) -> bool:
        """Note that a server has these buckets now; return False if the report is of another view."""
        # A report of another view may be obsolete; servers repeat it for the committed view.
        if version != self.publication.committed.version:
            return False
        self._filled.append((target, buckets))
        return True

    def plan(self, servers: dict[int, int]) -> None:
        """Plan the chains of the live servers, from the committed chains."""
        committed = self.publication.committed
        if not committed.version:
            return
        doubtful = self.suspects.servers
        # A doubtful server that is filled is a member only of chains that have no other: the view waits for it.
        alone = sum(group.buckets for group in committed.groups if servers.keys().isdisjoint(group.members))
        filled = [(target, buckets & alone if target in doubtful else buckets) for target, buckets in self._filled]
        self.planner.restore(committed.groups, filled)
        self.planner.servers_changed(servers, self.drains.servers, doubtful)

    def departing(self) -> dict[int, str | None]:
        """Return the servers that no chain needs; the value is the reason, None for servers that requested to leave.

        A silent server with the only copy of a bucket stays, because its removal would lose the bucket.
        """
        reasons = {**dict.fromkeys(self.drains.servers), **self.suspects.reasons()}
        needed = {server for group in self.planner.groups for server in (*group.members, group.filling)}
        return {server: reason for server, reason in reasons.items() if server not in needed}

    def offer(self, membership: Membership, departing: Collection[int]) -> Step:
        """Return the step that brings the view up to date."""
        servers = (member for member in membership.of(Role.SERVER) if member.incarnation not in departing)
        wanted = View(
            version=self.planner.version,
            members=(*servers, *membership.of(Role.WORKER)),
            groups=self.planner.groups,
            last_incarnation=membership.last_incarnation,
        )
        released = self.drains.servers.intersection(departing)
        return self.publication.offer(wanted, released=released, ended=self.ended)

    def committed(self, view: View, former: View) -> list[Publish | BucketsLost]:
        """Continue from a newly committed view."""
        if view.version != former.version:
            self._filled = []
        self.ended &= view.servers.keys()
        lost = lost_buckets(view.groups) & ~lost_buckets(former.groups)
        return [Publish(view), BucketsLost(lost)] if lost else [Publish(view)]

    def removed(self, incarnation: int) -> None:
        """Forget a removed member."""
        self.suspects.removed(incarnation)
        self.drains.removed(incarnation)

    def notes(self, waited_for: Iterable[int], membership: Membership) -> list[Note]:
        """Return notes about waits for these servers, once for each silent server."""
        notes = []
        for server in self.suspects.report_waits(waited_for):
            member, num_buckets = membership.find(server), count(self.planner.member_of(server))
            if member is None:  # a foreign member with its rank has rejoined
                continue
            notes.append(
                Note(
                    f"server {member.rank} is silent, and nobody else has {num_buckets} of its buckets: requests for "
                    "them wait until it is back"
                )
            )
        return notes

    def validate(self, servers: Collection[int]) -> None:
        """Assert the invariants."""
        self.planner.validate()
        assert set(self.suspects.servers) <= set(servers), "a doubtful server is not a member"
        assert self.drains.servers <= {*servers, *self.ended}, "a draining server is not a member"
        proposal = self.publication.proposal
        assert proposal is None or proposal.committed is self.publication.committed
