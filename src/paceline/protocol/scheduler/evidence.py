"""The common knowledge of the members that rejoin under a new scheduler.

Each member brings the newest view that it has received, committed or prepared. The scheduler continues from the newest
of these views once enough of its servers are back (:mod:`paceline.protocol.scheduler.views` has the reason).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec.structs import replace

from paceline.protocol.membership import Member, Role
from paceline.protocol.scheduler.messages import Rejoin
from paceline.protocol.scheduler.views import View, may_take_over


class Evidence:
    """The knowledge of the members of one cluster that are back, by connection. `ended` are ended incarnations."""

    def __init__(self, by_peer: Mapping[object, Rejoin]) -> None:
        self.by_peer = dict(by_peer)
        self.returned = tuple(by_peer.values())
        newest = _newest(rejoin.view for rejoin in self.returned)
        whole = _newest(rejoin.view for rejoin in self.returned if not rejoin.view.is_partial)
        self.latest = newest if newest is whole else _with_workers(newest, whole)
        """The newest view of all members, with the workers of the newest view that contains workers.

        It is complete, because a worker is removed only by a view that a quorum of servers has prepared.
        """
        # The voters of every view from which the former scheduler may continue. If only workers have the newest view,
        # which contains no workers, the voters of the newest view with workers count too: they know later ones.
        self._electorates = self._voters_of(newest) + (self._voters_of(whole) if newest is not whole else [])

    def _voters_of(self, view: View) -> list[Collection[int]]:
        """Return the voters of a view, and of the view before if this one is possibly not committed."""
        is_committed = any(rejoin.has_committed and rejoin.view.order == view.order for rejoin in self.returned)
        return [view.voters] if is_committed else [view.voters, view.former_voters]

    def is_member(self, returned: Rejoin) -> bool:
        """Whether a process that is back is still a member by the newest view."""
        return returned.member.role is Role.OBSERVER or not self.latest.excludes(returned.member.incarnation)

    def missing(self, ended: Collection[int]) -> tuple[Member, ...]:
        """Return the members of the newest view that are neither back nor known to have ended."""
        there = self._back() | set(ended)
        return tuple(member for member in self.latest.members if member.incarnation not in there)

    def awaited(self, ended: Collection[int]) -> tuple[Member, ...]:
        """Return the missing members and voters, whose processes may have ended."""
        awaited = (*self.missing(ended), *self.missing_voters(ended))
        return tuple({member.incarnation: member for member in awaited}.values())

    @property
    def highest_term(self) -> int:
        """The highest term of all members."""
        return max((rejoin.highest_term for rejoin in self.returned), default=0)

    def has_quorum(self, ended: Collection[int], replicas: int, *, promised: int = 0) -> bool:
        """Whether enough servers are back, and have promised this term, to continue from the newest view."""
        back = self._back(promised)
        return all(may_take_over(voters, ended, back, replicas) for voters in self._electorates)

    @property
    def has_voter(self) -> bool:
        """Whether a voter is back of each view that may be the newest."""
        back = self._back()
        return all(not back.isdisjoint(voters) for voters in self._electorates if voters)

    def absent_voters(self, ended: Collection[int]) -> frozenset[int]:
        """Return the voters that are neither back nor known to have ended."""
        return frozenset().union(*self._electorates) - self._back() - set(ended)

    def missing_voters(self, ended: Collection[int]) -> tuple[Member, ...]:
        """Return the absent voters whose names are known."""
        known = {
            member.incarnation: member for rejoin in self.returned for member in (*rejoin.former, *rejoin.view.members)
        }
        return tuple(known[server] for server in sorted(self.absent_voters(ended)) if server in known)

    def is_complete(self, ended: Collection[int]) -> bool:
        """Whether all members of the newest view are back, and the process that has posted the latest job.

        If no worker is back, a job may exist that only its poster knows.
        """
        number = max((rejoin.job_number for rejoin in self.returned), default=0)
        has_poster = any(rejoin.has_posted and rejoin.job_number == number for rejoin in self.returned)
        if not number:
            workers = {member.incarnation for member in self.latest.members if member.role is Role.WORKER}
            has_poster = not workers or not workers.isdisjoint(self._back())
        return bool(self.returned) and has_poster and not self.missing(ended)

    def _back(self, promised: int = 0) -> set[int]:
        """Return the incarnations that are back and have promised this term."""
        return {rejoin.member.incarnation for rejoin in self.returned if rejoin.promised >= promised}


def _newest(views: Iterable[View]) -> View:
    """Return the newest view; of equal ones, a view with workers."""
    return max(views, key=lambda view: (view.order, not view.is_partial), default=View())


def _with_workers(partial: View, whole: View) -> View:
    """Return a view with the workers of an older one."""
    workers = tuple(member for member in whole.members if member.role is Role.WORKER)
    return replace(
        partial, members=(*partial.members, *workers), last_incarnation=whole.last_incarnation, is_partial=False
    )
