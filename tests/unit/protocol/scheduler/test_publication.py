"""The next view: its preparation, its commit, and their order."""

from __future__ import annotations

from collections.abc import Collection

from paceline.protocol import Member, Role
from paceline.protocol.chains import VERSION_GAP, ChainGroup
from paceline.protocol.scheduler.publication import Committed, Proposed, Publication, Step, term_after
from paceline.protocol.scheduler.views import View

from .toys import group


class Offers:
    """A publication that receives proposals of views."""

    def __init__(self, replicas: int = 0, salt: int = 5) -> None:
        self.publication = Publication(replicas, salt)
        self.version = 0
        self.last: tuple[ChainGroup, ...] = ()

    def offer(
        self,
        *groups: ChainGroup,
        workers: tuple[int, ...] = (),
        released: Collection[int] = (),
        ended: Collection[int] = (),
    ) -> Step:
        """Offer the planner's proposal; it has another version if the chains differ."""
        if groups != self.last:
            self.last, self.version = groups, self.version + 1
        servers = {server for one in groups for server in (*one.members, one.filling) if server is not None}
        members = [Member(f"s{server}", Role.SERVER, server, server, f"s{server}") for server in sorted(servers)]
        members += [Member(f"w{worker}", Role.WORKER, worker, worker) for worker in workers]
        wanted = View(version=self.version, members=tuple(members), groups=groups, last_incarnation=50)
        return self.publication.offer(wanted, released=released, ended=ended)

    def begin(self, *groups: ChainGroup) -> View:
        """Commit the first view."""
        step = self.offer(*groups)
        assert isinstance(step, Committed)
        return step.view

    def prepared(self, *servers: int) -> list[bool]:
        """Report that these servers have prepared the view."""
        proposal = self.publication.proposal
        assert proposal is not None
        return [self.publication.prepared(server, *proposal.view.order) for server in servers]


def proposed(step: Step) -> View:
    assert isinstance(step, Proposed)
    return step.proposal.view


def committed(step: Step) -> View:
    assert isinstance(step, Committed)
    return step.view


def test_the_first_view_is_committed_immediately() -> None:
    assert not Publication(0, 5).is_established
    offers = Offers()
    first = offers.begin(group(1, 2))
    assert (first.term, first.epoch, first.version) == (offers.publication.term, 1, 1)
    assert offers.publication.is_established
    assert offers.publication.committed is first


def test_unchanged_views_are_not_published() -> None:
    offers = Offers()
    offers.begin(group(1))
    assert offers.offer(group(1)) is None
    assert offers.publication.epoch == 1


def test_new_workers_need_no_preparation() -> None:
    offers = Offers()
    offers.begin(group(1))
    view = committed(offers.offer(group(1), workers=(7, 8)))
    assert (view.epoch, view.version) == (2, 1)
    assert [member.incarnation for member in view.members] == [1, 7, 8]


def test_other_changes_are_prepared_before_the_commit() -> None:
    offers = Offers()
    first = offers.begin(group(1, 2))
    view = proposed(offers.offer(group(2)))
    assert (view.epoch, view.version) == (2, 2)
    assert offers.publication.committed is first
    assert offers.offer(group(2)) is None
    assert not offers.publication.prepared(2, *first.order)
    assert not offers.publication.prepared(2, view.term + 1, view.epoch)
    assert offers.offer(group(2)) is None
    assert offers.prepared(2) == [True]
    assert offers.offer(group(2)) == Committed(view, first)
    assert offers.publication.proposal is None
    assert not offers.publication.prepared(1, *view.order)  # a late message


def test_the_departure_of_a_worker_is_a_prepared_change() -> None:
    offers = Offers()
    offers.begin(group(1))
    committed(offers.offer(group(1), workers=(7,)))
    view = proposed(offers.offer(group(1)))
    assert (view.epoch, view.version) == (3, 1)  # the chains are unchanged
    assert [member.incarnation for member in view.members] == [1]


def test_a_proposal_is_kept_while_only_workers_join_and_leave() -> None:
    offers = Offers()
    offers.begin(group(1, 2))
    view = proposed(offers.offer(group(2), workers=(7,)))
    assert offers.offer(group(2), workers=(7, 8)) is None
    offers.prepared(2)
    assert committed(offers.offer(group(2), workers=(8,))) is view
    assert proposed(offers.offer(group(2), workers=(8,))).epoch == view.epoch + 1


def test_a_proposal_is_replaced_when_servers_change() -> None:
    offers = Offers()
    offers.begin(group(1, 2, 3))
    former = proposed(offers.offer(group(2, 3)))
    offers.prepared(2)
    view = proposed(offers.offer(group(3)))
    assert view.epoch == former.epoch + 1
    assert view.version > former.version
    assert not offers.publication.prepared(2, *former.order)
    assert offers.offer(group(3), ended={1, 2}) is None  # these servers have prepared the former view
    offers.prepared(3)
    assert committed(offers.offer(group(3), ended={1, 2})) is view


def test_a_proposal_is_dropped_if_its_changes_are_undone() -> None:
    offers = Offers()
    first = offers.begin(group(1, 2))
    view = proposed(offers.offer(group(2)))
    assert offers.offer(group(1, 2)) is None
    assert offers.publication.proposal is None
    assert offers.publication.committed is first
    # A member may have prepared the proposal, so the next view is newer.
    assert committed(offers.offer(group(1, 2), workers=(7,))).epoch == view.epoch + 1


def test_ended_servers_need_not_reply_but_released_servers_must() -> None:
    offers = Offers()
    offers.begin(group(1, 2, 3))
    proposed(offers.offer(group(3), released={1, 2}))
    assert offers.offer(group(3), released={1, 2}) is None
    offers.prepared(3)
    assert offers.offer(group(3), released={1, 2}) is None  # the remaining servers have the view, but are no quorum
    offers.prepared(1)
    committed(offers.offer(group(3), released={1, 2}))
    offers = Offers()
    offers.begin(group(1, 2, 3))
    proposed(offers.offer(group(3), ended={1, 2}))
    offers.prepared(3)
    committed(offers.offer(group(3), ended={1, 2}))


def test_a_takeover_raises_the_term_and_skips_possible_epochs() -> None:
    former = Offers(salt=7)
    latest = former.begin(group(1, 2))
    offers = Offers(salt=2)
    offers.publication.take_over(latest, term_after(latest.term, salt=2))
    assert offers.publication.term > latest.term
    assert offers.publication.committed is latest
    is_established = [offers.publication.is_established]
    offers.last, offers.version = latest.groups, latest.version + VERSION_GAP
    view = proposed(offers.offer(group(1, 2)))  # the contents are unchanged, but the term is new to all members
    assert view.term == offers.publication.term
    assert view.epoch > latest.epoch + VERSION_GAP
    assert view.version == latest.version + VERSION_GAP
    offers.prepared(1)
    assert committed(offers.offer(group(1, 2))) is view
    is_established.append(offers.publication.is_established)
    assert is_established == [False, True]


def test_two_successors_of_one_scheduler_have_different_terms() -> None:
    latest = Offers(salt=70_000).begin(group(1))
    terms = []
    for salt in (2, 1, 65_535):
        terms.append(term_after(latest.term, salt))
    assert len(set(terms)) == 3
    assert min(terms) > latest.term
    # The next order is higher than all these orders, with any salt.
    assert term_after(min(terms), salt=0) > max(terms)
