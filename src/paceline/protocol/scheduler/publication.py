"""Publication of the next view: first prepared, then committed when enough servers have it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, TypeAlias

from msgspec.structs import replace

from paceline.protocol.chains import VERSION_GAP
from paceline.protocol.scheduler.views import Proposal, View, may_commit

_TERM_BITS: Final = 16  # of a term that differ between two schedulers that took over from the same one


@dataclass(frozen=True, slots=True)
class Committed:
    """All members may act on the view now."""

    view: View
    former: View


@dataclass(frozen=True, slots=True)
class Proposed:
    """The view must be prepared first."""

    proposal: Proposal


Step: TypeAlias = Committed | Proposed | None


def term_after(term: int, salt: int) -> int:
    """Return the term of the next scheduler: higher, and unique by its salt."""
    return ((term >> _TERM_BITS) + 1 << _TERM_BITS) | salt % (1 << _TERM_BITS)


class Publication:
    """The views of one scheduler. `salt` is a number that no other scheduler has."""

    def __init__(self, replicas: int, salt: int) -> None:
        self.replicas = replicas
        self.term = term_after(0, salt)
        self.committed = View(term=self.term)
        """The view that members act on."""
        self.is_established = False
        self.proposal: Proposal | None = None
        self.epoch = 0
        """The epoch of the newest view, committed or not."""

    def take_over(self, latest: View, term: int) -> None:
        self.term = term
        self.committed, self.epoch, self.proposal = latest, latest.epoch + VERSION_GAP, None

    def may_follow(self, heard: Collection[int], ended: Collection[int]) -> bool:
        return may_commit(self.committed.voters, ended, heard, self.replicas)

    def offer(self, wanted: View, *, released: Collection[int], ended: Collection[int]) -> Step:
        """Return the step that makes this the view. Its term, epoch and version are assigned here.

        `released` servers leave by this view at their request; the processes of `ended` have ended.
        """
        same_chains = wanted.groups == self.committed.groups and self.is_established
        version = self.committed.version if same_chains else wanted.version
        former = tuple(sorted(self.committed.voters))
        now = replace(wanted, term=self.term, epoch=self.epoch + 1, version=version, former_voters=former)
        if self.is_established and now.only_adds_workers(self.committed):
            self.proposal = None
            if (now.members, now.last_incarnation) == (self.committed.members, self.committed.last_incarnation):
                return None
            return self._commit(now)
        if not self.committed.version:  # no server has acted on any view
            return self._commit(now)
        if self.proposal is None or not now.same_servers(self.proposal.view):
            self.epoch = now.epoch
            self.proposal = Proposal(now, self.committed, self.replicas, frozenset(released))
            return Proposed(self.proposal)
        return self._commit(self.proposal.view) if self.proposal.is_accepted(ended) else None

    def prepared(self, server: int, term: int, epoch: int) -> bool:
        """Record that a server has the view of this order; return whether that view is being prepared."""
        if self.proposal is None or (term, epoch) != self.proposal.view.order:
            return False
        self.proposal.prepared.add(server)
        return True

    def _commit(self, view: View) -> Committed:
        former, self.committed, self.proposal = self.committed, view, None
        self.epoch, self.is_established = view.epoch, True
        return Committed(view, former)
