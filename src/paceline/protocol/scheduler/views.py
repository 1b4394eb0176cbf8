"""Views of the cluster, and the quorums that prepare a view before members act on it.

A :class:`View` has the members of the cluster and the chain of servers of each bucket. A view that does more than add
workers is first *prepared*: the servers store the view and answer. Servers act on a view once it is *committed*. So the
next scheduler finds every view that a member may have acted on. If two schedulers lead the same cluster, one of them
can neither commit a view nor take over:

* A view is committed once two groups of servers have stored it: half of the voters of the former view (or all but
  `replicas` of the voters, if that is fewer), and every server that gains a bucket by the view (:class:`Proposal`).
* A new scheduler takes over once a majority of the voters of the newest known view (or `replicas` + 1 voters, if that
  is more) has rejoined (:func:`may_take_over`). This group shares a server with every group that can commit a view.
* If the newest view may be uncommitted, the former scheduler may still continue from the previous view. In this case,
  the new scheduler also needs the same quorum of the previous view's voters.
* Views that are sent to workers list no workers. If only workers have the newest view, the new scheduler also needs
  the same quorum of the newest view that lists workers. Otherwise a removed worker could count as a member.
* All voters in these quorums have promised not to prepare a view of a lower term.

The voters of a view are its servers that have a bucket. A voter whose process has ended need not answer, and an earlier
answer of this voter does not count, because another scheduler may also continue without the voter.

Source: views and their change as in Viewstamped Replication Revisited (Liskov and Cowling 2012); the two kinds of
quorums, which must intersect each other: Howard, Malkhi and Spiegelman 2016 "Flexible Paxos".
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Generic

from msgspec import Struct
from msgspec.structs import replace

from paceline.errors import ProtocolError, UsageError
from paceline.protocol.bounds import Natural, Number, Term, Version
from paceline.protocol.chains import ChainGroup, changed_groups, lost_buckets, with_changes
from paceline.protocol.membership import Address, Member, Role


def _check_groups(groups: Iterable[ChainGroup]) -> None:
    union = num_named = 0
    for group in groups:
        union |= group.buckets
        num_named += group.buckets.bit_count()
    if union != (1 << num_named) - 1:
        raise UsageError(f"a view's chains name {num_named} buckets: expected each from 0 to {num_named - 1} once")


class View(Struct, Generic[Address], frozen=True, tag=True):
    """The members of the cluster, and the chains of its buckets. The scheduler sends a View when it is committed."""

    term: Term = 0
    """The term of the scheduler that published the view; the term rises with every takeover."""
    epoch: Number = 0
    """The number of the view, which rises with every change."""
    version: Version = 0
    """The number of the chains, which rises when the chains change; 0 before the first chains."""
    members: tuple[Member[Address], ...] = ()
    groups: tuple[ChainGroup, ...] = ()
    last_incarnation: Number = 0
    """A process that is not a member, and whose incarnation is at most this number, was removed."""
    is_partial: bool = False
    """Whether the view was sent without the workers."""
    former_voters: tuple[Number, ...] = ()
    """The voters of the view that was committed when this view was prepared."""
    num_waiting: Natural = 0
    """The number of servers that have registered, while the cluster is forming."""

    def __post_init__(self) -> None:
        _check_groups(self.groups)

    @property
    def order(self) -> tuple[int, int]:
        """The sort key of views, from old to new."""
        return self.term, self.epoch

    @property
    def servers(self) -> dict[int, int]:
        return {member.incarnation: member.rank for member in self.members if member.role is Role.SERVER}

    @property
    def incarnations(self) -> frozenset[int]:
        return frozenset(member.incarnation for member in self.members)

    @property
    def voters(self) -> frozenset[int]:
        """The servers that have a bucket. The next view needs a quorum of these servers."""
        return frozenset(server for group in self.groups for server in group.members)

    @property
    def num_buckets(self) -> int:
        return sum(group.buckets.bit_count() for group in self.groups)

    @property
    def num_lost(self) -> int:
        return lost_buckets(self.groups).bit_count()

    @property
    def is_ready(self) -> bool:
        """Whether all servers of the cluster's start have registered."""
        return self.version > 0

    def of_role(self, role: Role) -> tuple[Member[Address], ...]:
        return tuple(sorted((member for member in self.members if member.role is role), key=lambda member: member.rank))

    def same_servers(self, other: View) -> bool:
        return self.groups == other.groups and self.servers == other.servers

    def only_adds_workers(self, former: View) -> bool:
        """Whether this view only adds workers to a former view; such a change needs no quorum."""
        return self.same_servers(former) and former.incarnations <= self.incarnations

    def without_workers(self) -> View:
        servers = tuple(member for member in self.members if member.role is Role.SERVER)
        return replace(self, members=servers, is_partial=True)

    def excludes(self, incarnation: int) -> bool:
        if self.is_partial or incarnation > self.last_incarnation:
            return False
        return all(member.incarnation != incarnation for member in self.members)


class ViewChange(Struct, Generic[Address], frozen=True, kw_only=True, tag=True):
    """The difference of a view from the view of epoch `base`, which the receiver has. Sent in place of a View."""

    base: Number
    epoch: Number
    term: Term
    version: Version
    last_incarnation: Number
    joined: tuple[Member[Address], ...] = ()
    removed: tuple[Number, ...] = ()
    groups: tuple[ChainGroup, ...] = ()
    """The chains of the buckets whose chains have changed."""
    former_voters: tuple[Number, ...] = ()

    @classmethod
    def between(cls, base: View, view: View) -> ViewChange:
        before, after = base.incarnations, view.incarnations
        return ViewChange(
            base=base.epoch,
            term=view.term,
            epoch=view.epoch,
            version=view.version,
            last_incarnation=view.last_incarnation,
            joined=tuple([member for member in view.members if member.incarnation not in before]),
            removed=tuple([member.incarnation for member in base.members if member.incarnation not in after]),
            groups=changed_groups(base.groups, view.groups),
            former_voters=view.former_voters,
        )

    def apply(self, base: View[Address]) -> View[Address]:
        """Return the view that results from `base`. Raises ProtocolError if the change is of another view."""
        if base.epoch != self.base:
            raise ProtocolError(
                f"the scheduler has sent the change from view {self.base}, and this process has view {base.epoch}"
            )
        removed = set(self.removed)
        return replace(
            base,
            term=self.term,
            epoch=self.epoch,
            version=self.version,
            last_incarnation=self.last_incarnation,
            members=(*(member for member in base.members if member.incarnation not in removed), *self.joined),
            groups=with_changes(base.groups, self.groups),
            former_voters=self.former_voters,
        )


class KnownViews:
    """The views that one member stores for itself and for the next scheduler."""

    def __init__(self) -> None:
        self.committed: View | None = None
        """The view that the member acts on; None before the first view."""
        self.prepared: View | None = None
        self.promised = 0
        """The lowest term whose views the member may still prepare."""

    @property
    def newest(self) -> View | None:
        known = [view for view in (self.committed, self.prepared) if view is not None]
        return max(known, key=lambda view: view.order, default=None)

    @property
    def highest_term(self) -> int:
        """The highest term that the member has promised, or of a view that it has."""
        return max(self.promised, 0 if self.newest is None else self.newest.term)

    def prepare(self, view: View) -> bool:
        """Store a view that may be committed later; return whether to answer with Prepared.

        Return False if a newer scheduler has superseded the view's scheduler.
        """
        newest = self.newest
        if view.term < self.promised or (newest is not None and view.term < newest.term):
            return False
        if self.prepared is None or view.order > self.prepared.order:
            self.prepared = view
        return True

    @property
    def is_committed(self) -> bool:
        return self.committed is not None and self.committed is self.newest

    @property
    def former(self) -> View | None:
        """The committed view, if the member does not know whether the newest view is committed; else None."""
        return None if self.is_committed else self.committed

    def promise(self, term: int) -> bool:
        """Promise not to prepare a view of a lower term; return whether to answer with Promised."""
        self.promised = max(self.promised, term)
        return self.promised == term

    def commit(self, view: View) -> bool:
        """Store a committed view; return whether it is newer than the last committed view."""
        if self.committed is not None and view.order <= self.committed.order:
            return False
        self.committed = view
        return True


def commit_quorum(num_voters: int, replicas: int) -> int:
    """Return the number of voters that must have a view before it is committed.

    >>> [commit_quorum(voters, replicas=1) for voters in (0, 1, 2, 3, 4, 5)]
    [0, 1, 1, 2, 2, 3]
    """
    return min((num_voters + 1) // 2, max(num_voters - replicas, 1)) if num_voters else 0


def may_commit(voters: Collection[int], ended: Collection[int], prepared: Collection[int], replicas: int) -> bool:
    """Whether the next view may be committed, given the `voters` of this view and the servers that have prepared it."""
    return _have(commit_quorum(len(voters), replicas), voters, ended, prepared)


def may_take_over(voters: Collection[int], ended: Collection[int], returned: Collection[int], replicas: int) -> bool:
    """Whether a scheduler may continue from a view with these `voters`, given the rejoined servers."""
    return _have(len(voters) - commit_quorum(len(voters), replicas) + 1, voters, ended, returned)


def _have(quorum: int, voters: Collection[int], ended: Collection[int], answered: Collection[int]) -> bool:
    """Whether a quorum of the voters has answered, or all voters that have not ended."""
    living = [server for server in voters if server not in ended]
    return sum(server in answered for server in living) >= min(quorum, len(living))


def gaining(before: Iterable[ChainGroup], after: Iterable[ChainGroup]) -> frozenset[int]:
    """Return the servers that are members of a bucket's chain in `after` and were not in `before`."""
    had: dict[int, int] = {}
    for group in before:
        for server in group.members:
            had[server] = had.get(server, 0) | group.buckets
    return frozenset(server for group in after for server in group.members if group.buckets & ~had.get(server, 0))


@dataclass(slots=True)
class Proposal:
    """A view that is being prepared, to follow the view `committed`."""

    view: View
    committed: View
    replicas: int
    released: frozenset[int] = frozenset()
    """The servers that requested to leave, and leave by this view."""
    prepared: set[int] = field(default_factory=set)
    audience: frozenset[int] = field(init=False)
    gaining: frozenset[int] = field(init=False)
    voters: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.audience = frozenset({*self.committed.servers, *self.view.servers})
        self.gaining = gaining(self.committed.groups, self.view.groups)
        self.voters = self.committed.voters

    def is_accepted(self, ended: Collection[int]) -> bool:
        """Whether a quorum has the view and enough of these servers stay, and all gaining servers have the view."""
        voters = self.voters
        quorum = commit_quorum(len(voters), self.replicas)
        has_quorum = _have(quorum, voters, ended, self.prepared)
        # No scheduler may take over from the former view with voters that all lack this view. If n - quorum + 1 of the
        # n voters live, a takeover needs as many (:func:`may_take_over`), and `has_quorum` ensures that fewer lack
        # this view. If fewer voters live, because the released servers have ended, all living voters suffice. Therefore
        # at least one of the voters that stay must have this view.
        staying = voters - self.released
        stays = _have(max(quorum - len(voters) + len(staying), 1), staying, ended, self.prepared)
        return has_quorum and stays and self.gaining <= self.prepared
