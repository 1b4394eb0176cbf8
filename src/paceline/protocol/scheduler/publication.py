"""Publication of the next view: servers prepare (store) the view, and it is committed when enough servers have it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, TypeAlias

from msgspec.structs import replace

from paceline.protocol.chains import VERSION_GAP
from paceline.protocol.scheduler.views import Proposal, View, may_commit

_TERM_BITS: Final = 16  # number of low bits of a term, which contain the scheduler's salt


@dataclass(frozen=True, slots=True)
class Committed:
    """The view is committed: all members may act on it."""

    view: View
    former: View


@dataclass(frozen=True, slots=True)
class Proposed:
    """The view of this proposal must be prepared by servers before it can be committed."""

    proposal: Proposal


Step: TypeAlias = Committed | Proposed | None


def term_after(term: int, salt: int) -> int:
    """Return the next scheduler's term, which is higher and unique, because it contains the scheduler's salt."""
    return ((term >> _TERM_BITS) + 1 << _TERM_BITS) | salt % (1 << _TERM_BITS)


class Publication:
    """The views of one scheduler. `salt` is a number that no other scheduler has."""

    def __init__(self, replicas: int, salt: int) -> None:
        self.replicas, self._salt = replicas, salt
        self.term = term_after(0, salt)
        self.committed = View(term=self.term)
        """The view that members act on."""
        self.incarnations: frozenset[int] = frozenset()
        """The members of the committed view."""
        self.is_established = False
        self.proposal: Proposal | None = None
        self.epoch = 0
        """The epoch of the newest view, which may be uncommitted."""

    def form(self, highest_term: int) -> None:
        """Begin a cluster of processes that have prepared no view after this term."""
        self.term = term_after(highest_term, self._salt)
        self.committed, self.is_established = View(term=self.term), True

    def take_over(self, latest: View, term: int) -> None:
        self.term = term
        self.committed, self.epoch, self.proposal = latest, latest.epoch + VERSION_GAP, None
        self.incarnations = latest.incarnations

    def may_follow(self, responsive: Collection[int], ended: Collection[int]) -> bool:
        return may_commit(self.committed.voters, ended, responsive, self.replicas)

    def offer(self, wanted: View, *, released: Collection[int], ended: Collection[int]) -> Step:
        """Return the next step to make `wanted` the committed view.

        This method assigns the term, epoch and version of the view. `released` servers requested to leave and are not
        in `wanted`; the processes of `ended` have ended.
        """
        same_chains = wanted.groups == self.committed.groups and self.is_established
        version = self.committed.version if same_chains else wanted.version
        former = tuple(sorted(self.committed.voters))
        view = replace(wanted, term=self.term, epoch=self.epoch + 1, version=version, former_voters=former)
        if self.is_established and view.only_adds_workers(self.committed):
            self.proposal = None
            if (view.members, view.last_incarnation) == (self.committed.members, self.committed.last_incarnation):
                return None
            return self._commit(view)
        if not self.committed.version:  # the first view needs no preparation, because no server has acted on a view
            return self._commit(view)
        if self.proposal is None or not view.same_servers(self.proposal.view):
            self.epoch = view.epoch
            self.proposal = Proposal(view, self.committed, self.replicas, frozenset(released))
            return Proposed(self.proposal)
        return self._commit(self.proposal.view) if self.proposal.is_accepted(ended) else None

    def prepared(self, server: int, term: int, epoch: int) -> bool:
        """Record that a server has stored the view of this order; return False if another view is being prepared."""
        if self.proposal is None or (term, epoch) != self.proposal.view.order:
            return False
        self.proposal.prepared.add(server)
        return True

    def _commit(self, view: View) -> Committed:
        former, self.committed, self.proposal = self.committed, view, None
        self.incarnations = view.incarnations
        self.epoch, self.is_established = view.epoch, True
        return Committed(view, former)
