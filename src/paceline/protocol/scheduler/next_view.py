"""The view after the committed view: its chains, and the servers that it removes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, KeysView

from paceline.protocol.chains import VERSION_GAP, ChainGroup, Planner, lost_buckets
from paceline.protocol.membership import Member, Membership, Role
from paceline.protocol.reachability import Reachability
from paceline.protocol.scheduler.events import BucketsLost, NotifyOperator, Publish, waits_for
from paceline.protocol.scheduler.publication import Publication, Step
from paceline.protocol.scheduler.recovery import Succession
from paceline.protocol.scheduler.views import View


class Suspects:
    """Members that may be alive, but send no heartbeats or are unreachable for other servers.

    A member is overdue after more than `timeout_s` of silence.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._reachability = Reachability(timeout_s / 2)
        self._reasons: dict[int, str] = {}  # member that counts as silent before it is overdue → reason
        self._silent: dict[int, bool] = {}  # overdue server → whether the wait for this server was reported
        self._cut_off: dict[int, str] = {}  # server that other servers do not reach → reason for its removal
        self.needed: tuple[Member, ...] = ()

    @property
    def servers(self) -> Collection[int]:
        return self._silent.keys() | self._cut_off.keys()

    @property
    def silent(self) -> KeysView[int]:
        """The silent servers, in the order in which they fell silent."""
        return self._silent.keys()

    @property
    def with_unreachable_peers(self) -> frozenset[int]:
        """The servers that report another server as unreachable, and the reported servers."""
        return self._reachability.in_doubt

    def reasons(self) -> dict[int, str]:
        return {**{server: self.reason(server) for server in self._silent}, **self._cut_off}

    def reason(self, incarnation: int) -> str:
        return self._reasons.get(incarnation, f"it was silent for {self._timeout_s:g} s")

    def suspect(self, incarnation: int, reason: str) -> None:
        self._reasons[incarnation] = reason

    def take_over(self, absent: Iterable[int]) -> None:
        for server in absent:
            self._silent[server] = False
            self._reasons[server] = "it did not rejoin the scheduler that took over"

    def record_heartbeat(self, incarnation: int) -> bool | None:
        """Record a heartbeat; return None if the member was not silent, else whether the operator was notified."""
        self._reasons.pop(incarnation, None)
        return self._silent.pop(incarnation, None)

    def report(self, server: int, unreachable: Collection[int], time_s: float) -> None:
        self._reachability.record_heartbeat(server, unreachable, time_s)

    def forget_reports(self) -> None:
        self._reachability = Reachability(self._timeout_s / 2)

    def removed(self, incarnation: int) -> None:
        for known in (self._silent, self._cut_off, self._reasons):
            known.pop(incarnation, None)

    def suspect_unreachable(self, ranks: dict[int, int], groups: Iterable[ChainGroup], time_s: float) -> bool:
        """Suspect a live server that other live servers do not reach; return False if there is no such server."""
        cut_off = self._reachability.decide(ranks.keys() - self._cut_off.keys(), groups, time_s)
        if cut_off is None:
            return False
        peers = " and ".join(f"server {ranks[other]}" for other in cut_off.peers)
        reason = f"it and {peers} could not reach each other for {self._timeout_s:g} s, although all are alive"
        self._cut_off[cut_off.server] = reason
        return True

    def fall_silent(self, servers: Collection[int]) -> None:
        """Suspect these overdue servers, because the cluster continues without them."""
        self._silent = {**dict.fromkeys(servers, False), **self._silent}

    def wait_for(self, servers: tuple[Member, ...]) -> list[NotifyOperator]:
        """Wait for these overdue servers, which the cluster needs; notify the operator once."""
        is_reported, self.needed = servers == self.needed, servers
        return [] if is_reported else [waits_for(servers, "to continue without them")]

    def wait_no_more(self) -> list[NotifyOperator]:
        was_needed, self.needed = self.needed, ()
        text = "enough servers with buckets are connected again: the scheduler continues"
        return [NotifyOperator(text)] if was_needed else []

    def report_waits(self, servers: Iterable[int]) -> list[int]:
        """Return the silent servers among `servers` with unreported waits, and mark their waits as reported."""
        unreported = [server for server in servers if not self._silent.get(server, True)]
        self._silent.update(dict.fromkeys(unreported, True))
        return unreported


class Drains:
    """The servers that want to leave once other servers have their buckets."""

    def __init__(self) -> None:
        self.servers: set[int] = set()
        self._are_all = False  # whether all live servers wanted to leave at the last request
        self._released: set[int] = set()  # the servers that were released while all servers were draining

    def take_over(self, leaving: Iterable[int], servers: Collection[int], num_expected: int) -> None:
        """Drain the servers in both `leaving` and `servers`, after a new scheduler has taken over.

        If fewer servers than expected remain, the missing servers may have died, so the remaining servers must keep the
        data.
        """
        self.servers = set(leaving) & set(servers)
        self._are_all = set(servers) <= self.servers and len(servers) >= num_expected

    def add(self, server: int, servers: Collection[int]) -> None:
        self.servers.add(server)
        self._are_all = set(servers) <= self.servers

    def connected(self, incarnation: int) -> None:
        """Record that a member has reconnected. The member may not have received its release."""
        self._released.discard(incarnation)

    def removed(self, incarnation: int) -> None:
        self.servers.discard(incarnation)
        self._released.discard(incarnation)

    def release_all(self, servers: Collection[int], connected: Collection[int]) -> list[int]:
        """Return the servers to release although no server takes their buckets, because all servers want to leave.

        If the other servers died, the remaining servers have the only copies and are not released.
        """
        self._are_all = self._are_all and set(servers) <= self.servers
        released = [server for server in sorted(set(servers) - self._released) if server in connected and self._are_all]
        self._released.update(released)
        return released


class NextView:
    """Plans the view after the committed view, from the live servers `servers` (incarnation → rank) and ended fills."""

    def __init__(self, planner: Planner, publication: Publication, timeout_s: float) -> None:
        self.planner = planner
        self.publication = publication
        self.suspects = Suspects(timeout_s)
        self.drains = Drains()
        self.ended: set[int] = set()
        self._filled: list[tuple[int, int]] = []  # (target, buckets) of the reports since the last commit

    def take_over(self, succession: Succession, membership: Membership) -> None:
        latest, absent = succession.evidence.latest, [member.incarnation for member in succession.absent()]
        self.ended = set(succession.ended)
        self.drains.take_over(succession.leaving(), latest.servers, membership.expected_servers)
        self.suspects.take_over(absent)
        if latest.version:
            version, replicas = latest.version + VERSION_GAP, self.publication.replicas
            self.planner = Planner.rebuild(
                latest.groups, version, membership.servers, replicas, self.drains.servers, absent
            )

    def filled(self, version: int, target: int, buckets: int) -> bool:
        """Record that a server has these buckets; return False for a report of another view."""
        # A report of another view may be obsolete. Servers repeat valid reports for the committed view.
        if version != self.publication.committed.version:
            return False
        self._filled.append((target, buckets))
        return True

    @property
    def has_fills(self) -> bool:
        return bool(self._filled)

    def plan(self, servers: dict[int, int]) -> None:
        committed = self.publication.committed
        if not committed.version:
            return
        suspected = self.suspects.servers
        # A suspected server counts as filled only in chains without a live member. The next view is committed only when
        # this server has prepared it.
        alone = sum(group.buckets for group in committed.groups if servers.keys().isdisjoint(group.members))
        filled = [(target, buckets & alone if target in suspected else buckets) for target, buckets in self._filled]
        self.planner.restore(committed.groups, filled)
        self.planner.servers_changed(servers, self.drains.servers, suspected)

    def departing(self) -> dict[int, str | None]:
        """Return the servers to remove because no chain needs them, with the reason; None for a requested departure.

        A silent server with the only copy of a bucket stays, because its removal would lose the bucket.
        """
        reasons = {**dict.fromkeys(self.drains.servers), **self.suspects.reasons()}
        needed = {server for group in self.planner.groups for server in (*group.members, group.filling)}
        return {server: reason for server, reason in reasons.items() if server not in needed}

    def offer(self, membership: Membership, departing: Collection[int]) -> Step:
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
        if view.version != former.version:
            self._filled = []
        self.ended &= view.servers.keys()
        lost = lost_buckets(view.groups) & ~lost_buckets(former.groups)
        return [Publish(view), BucketsLost(lost)] if lost else [Publish(view)]

    def removed(self, incarnation: int) -> None:
        self.suspects.removed(incarnation)
        self.drains.removed(incarnation)

    def notes(self, membership: Membership) -> list[NotifyOperator]:
        """Return notes for the operator about silent servers with the only copy of a bucket: one for each server,
        returned once."""
        notes = []
        needed = {server for server in self.suspects.silent if self.planner.member_of(server)}
        for server in self.suspects.report_waits(needed):
            member, num_buckets = membership.find(server), self.planner.member_of(server).bit_count()
            if member is None:  # the server was replaced by a rejoined member with the same rank
                continue
            notes.append(
                NotifyOperator(
                    f"server {member.rank} is silent and has the only copy of {num_buckets} buckets: requests for them "
                    "may wait until the server returns"
                )
            )
        return notes

    def validate(self, servers: Collection[int]) -> None:
        self.planner.validate()
        assert set(self.suspects.servers) <= set(servers), "a suspected server is not a member"
        assert self.drains.servers <= {*servers, *self.ended}, "a draining server is not a member"
        proposal = self.publication.proposal
        assert proposal is None or proposal.committed is self.publication.committed
