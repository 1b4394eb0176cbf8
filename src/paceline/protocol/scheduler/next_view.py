"""What the next view ought to be: its chains, and the servers that go by it."""

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
    """The view that follows the committed one: with the servers that live, and the fills that have ended since.

    `servers` of methods are the live ones: incarnation → rank.
    """

    def __init__(self, planner: Planner, publication: Publication, timeout_s: float) -> None:
        self.planner = planner
        self.publication = publication
        self.suspects = Suspects(timeout_s)
        self.drains = Drains()
        self.ended: set[int] = set()
        """Incarnations whose processes are known to have ended."""
        self._filled: list[tuple[int, int]] = []  # what was reported since the last commit: target, buckets

    def take_over(self, succession: Succession, membership: Membership) -> None:
        """Go on from another scheduler's newest view, with these members."""
        latest, absent = succession.evidence.latest, [each.incarnation for each in succession.absent()]
        self.ended = set(succession.ended)
        self.drains.take_over(succession.leaving(), latest.servers, membership.expected_servers)
        self.suspects.take_over(absent)
        if latest.version:
            version, replicas = latest.version + VERSION_GAP, self.publication.replicas
            self.planner, _ = Planner.rebuild(
                latest.groups, version, membership.servers, replicas, self.drains.servers, absent
            )

    def filled(self, version: int, target: int, buckets: int) -> bool:
        """Note that a server has these buckets now; return whether that is of the committed view."""
        # What was said of another view may not hold any more; of this one it is said again.
        if version != self.publication.committed.version:
            return False
        self._filled.append((target, buckets))
        return True

    def plan(self, servers: dict[int, int]) -> None:
        """Have the chains follow the servers that live, from the committed ones on."""
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
        """Return the servers that no chain needs any more, and the reason of those that do not leave as they wish.

        One that is silent, and has what nobody else has, stays, however long: nothing would be gained without it.
        """
        reasons = {**dict.fromkeys(self.drains.servers), **self.suspects.reasons()}
        needed = {each for group in self.planner.groups for each in (*group.members, group.filling)}
        return {server: reason for server, reason in reasons.items() if server not in needed}

    def offer(self, membership: Membership, departing: Collection[int]) -> Step:
        """Say what is to be done so that the view becomes what it ought to be."""
        servers = (each for each in membership.of(Role.SERVER) if each.incarnation not in departing)
        wanted = View(
            version=self.planner.version,
            members=(*servers, *membership.of(Role.WORKER)),
            groups=self.planner.groups,
            last_incarnation=membership.last_incarnation,
        )
        released = self.drains.servers.intersection(departing)
        return self.publication.offer(wanted, released=released, ended=self.ended)

    def committed(self, view: View, former: View) -> list[Publish | BucketsLost]:
        """Go on from a view that is committed."""
        if view.version != former.version:
            self._filled = []
        self.ended &= view.servers.keys()
        lost = lost_buckets(view.groups) & ~lost_buckets(former.groups)
        return [Publish(view), BucketsLost(lost)] if lost else [Publish(view)]

    def removed(self, incarnation: int) -> None:
        """Forget one that is no member any more."""
        self.suspects.removed(incarnation)
        self.drains.removed(incarnation)

    def notes(self, waited_for: Iterable[int], membership: Membership) -> list[Note]:
        """Tell once of each of these servers that is silent that it is waited for."""
        notes = []
        for server in self.suspects.tell(waited_for):
            member, num_buckets = membership.find(server), count(self.planner.member_of(server))
            if member is None:  # a member with its rank, which is none of ours, has come
                continue
            notes.append(
                Note(
                    f"server {member.rank} is silent, and nobody else has {num_buckets} of its buckets: requests for "
                    "those wait until it is back"
                )
            )
        return notes

    def validate(self, servers: Collection[int]) -> None:
        """Assert the invariants."""
        self.planner.validate()
        assert set(self.suspects.servers) <= set(servers), "a doubtful server that is no member"
        assert self.drains.servers <= {*servers, *self.ended}, "a draining server that is no member"
        proposal = self.publication.proposal
        assert proposal is None or proposal.committed is self.publication.committed
