"""How a scheduler that was started in the place of another learns what that one knew: from the members.

:class:`Recovery` collects those that come back, with the newest view that each has seen, committed or prepared. The
newest of all views is the one to go on from, once enough of its servers are back (see
:mod:`paceline.protocol.scheduler.views` for why), and everybody else too, or the time-out is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

from paceline.protocol.membership import Member, Role
from paceline.protocol.scheduler.views import View, may_take_over


@dataclass(frozen=True, slots=True)
class Returned:
    """A member that has come to the new scheduler, and what it knows."""

    peer: object
    """The connection that it came by."""
    member: Member
    cluster: str
    """Which cluster it is a member of."""
    view: View
    """The newest that it has seen."""
    promised: int = 0
    """The term of which it has promised that it prepares nothing lower."""
    has_committed: bool = True
    """Whether it knows that this view is committed."""
    is_leaving: bool = False
    """Whether it is a server that waits for its release."""
    job: int = 0
    """The number of the latest job that it knows of."""
    has_posted: bool = False
    """Whether it has posted that job."""
    former: tuple[Member, ...] = ()
    """The servers of the view that it acts on, if it does not know that the newest is committed."""
    knowledge: object = None
    """What else it knows, for the runtime."""


class Recovery:
    """The members that have come back so far."""

    def __init__(self) -> None:
        self._returned: dict[object, Returned] = {}  # by connection

    @property
    def is_empty(self) -> bool:
        """Whether nobody has come back."""
        return not self._returned

    def add(self, returned: Returned) -> None:
        """Note a member that is back; its newest connection counts."""
        name = returned.cluster, returned.member.incarnation
        for peer, known in list(self._returned.items()):
            if (known.cluster, known.member.incarnation) == name:
                del self._returned[peer]
        self._returned[returned.peer] = returned

    def forget(self, peer: object) -> Returned | None:
        """Note that a connection broke, or that its member goes; return what that member had said."""
        return self._returned.pop(peer, None)

    def drain(self, peer: object) -> None:
        """Note that a member wants to leave."""
        if peer in self._returned:
            self._returned[peer] = replace(self._returned[peer], is_leaving=True)

    def promise(self, peer: object, term: int) -> None:
        """Note what a member has promised."""
        if peer in self._returned:
            self._returned[peer] = replace(self._returned[peer], promised=term)

    def all(self) -> list[Returned]:
        """All that are back, of whatever cluster."""
        return list(self._returned.values())

    @property
    def cluster(self) -> str:
        """The cluster that most servers, or else most members, are of; empty if nobody is back."""
        votes = Counter(each.cluster for each in self._returned.values())
        servers = Counter(each.cluster for each in self._returned.values() if each.member.role is Role.SERVER)
        return max(votes, key=lambda name: (servers[name], votes[name]), default="")

    def ours(self) -> list[Returned]:
        """The members of that cluster."""
        cluster = self.cluster
        return [each for each in self._returned.values() if each.cluster == cluster]

    def others(self) -> list[Returned]:
        """The members of other clusters."""
        ours = {each.cluster for each in self.ours()}
        return [each for each in self._returned.values() if each.cluster not in ours]

    def latest_view(self) -> View:
        """The newest view that any of ours has seen, with the workers of the newest that names workers.

        So it is complete: a worker is removed only by a view that enough servers have prepared.
        """
        views = [each.view for each in self.ours()]
        newest = max(views, key=lambda view: view.order, default=View())
        if not newest.is_partial:
            return newest
        whole = max((view for view in views if not view.is_partial), key=lambda view: view.order, default=View())
        workers = tuple(member for member in whole.members if member.role is Role.WORKER)
        members = (*newest.members, *workers)
        return replace(newest, members=members, last_incarnation=whole.last_incarnation, is_partial=False)

    def is_member(self, returned: Returned) -> bool:
        """Whether one that is back is still a member: not if the newest view says that it is gone."""
        return returned.member.role is Role.OBSERVER or not self.latest_view().excludes(returned.member.incarnation)

    def missing(self, ended: Collection[int]) -> tuple[Member, ...]:
        """The members of the newest view that are neither back nor known to have ended."""
        there = self._back() | set(ended)
        return tuple(member for member in self.latest_view().members if member.incarnation not in there)

    def awaited(self, ended: Collection[int]) -> tuple[Member, ...]:
        """Those that are missing, and the voters that are: whether they have ended is worth knowing."""
        awaited = (*self.missing(ended), *self.missing_voters(ended))
        return tuple({member.incarnation: member for member in awaited}.values())

    @property
    def highest_term(self) -> int:
        """The highest of which any of ours has a view, or has promised that it prepares nothing lower."""
        return max((max(each.view.term, each.promised) for each in self.ours()), default=0)

    def has_quorum(self, ended: Collection[int], replicas: int, *, promised: int = 0) -> bool:
        """Whether servers enough are back, and have made this promise, to go on from the newest view."""
        back = self._back(promised)
        return all(may_take_over(voters, ended, back, replicas) for voters in self._electorates())

    def _back(self, promised: int = 0) -> set[int]:
        """The incarnations of ours that are back, and have promised that they prepare nothing below that term."""
        return {each.member.incarnation for each in self.ours() if each.promised >= promised}

    def _electorates(self) -> list[Collection[int]]:
        """The voters of every view that the former scheduler may be going on from."""
        latest = self.latest_view()
        is_committed = any(each.has_committed and each.view.order == latest.order for each in self.ours())
        return [latest.voters] if is_committed else [latest.voters, latest.former_voters]

    @property
    def has_voter(self) -> bool:
        """Whether one of the voters is back, of each view that may be the newest."""
        back = self._back()
        return all(not back.isdisjoint(voters) for voters in self._electorates() if voters)

    def absent_voters(self, ended: Collection[int]) -> frozenset[int]:
        """The voters that are neither back nor known to have ended."""
        return frozenset().union(*self._electorates()) - self._back() - set(ended)

    def missing_voters(self, ended: Collection[int]) -> tuple[Member, ...]:
        """Those of them that somebody knows by name."""
        known = {member.incarnation: member for each in self.ours() for member in (*each.former, *each.view.members)}
        return tuple(known[each] for each in sorted(self.absent_voters(ended)) if each in known)

    def is_complete(self, ended: Collection[int]) -> bool:
        """Whether all members of the newest view are back, and whoever has posted the latest job."""
        ours = self.ours()
        number = max((each.job for each in ours), default=0)
        has_poster = not number or any(each.has_posted and each.job == number for each in ours)
        return bool(ours) and has_poster and not self.missing(ended)
