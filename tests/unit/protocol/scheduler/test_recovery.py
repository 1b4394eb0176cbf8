"""A new scheduler recovers the state of the cluster from returning members."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from paceline.protocol import Member, Role
from paceline.protocol.jobs import JobMemory, JobRecord, JobSpec
from paceline.protocol.scheduler import events, messages
from paceline.protocol.scheduler.recovery import Abandoned, Evidence, Recovery, Succession
from paceline.protocol.scheduler.views import View

from .toys import group

NO_MEMBERS: tuple[int, ...] = ()


def member(name: str) -> Member:
    """Return a member by name. The name has the first letter of its role, and its incarnation: s1, w2 or o3."""
    roles = {"s": Role.SERVER, "w": Role.WORKER, "o": Role.OBSERVER}
    return Member(name, roles[name[0]], int(name[1:]), int(name[1:]), name)


def view(epoch: int, *names: str, term: int = 1, voters: tuple[int, ...] | None = None) -> View:
    """Return a view of these members. The voters are `voters`, or all servers."""
    members = tuple([member(name) for name in names])
    servers = (
        tuple([member.incarnation for member in members if member.role is Role.SERVER]) if voters is None else voters
    )
    return View(term, epoch, 1, members, (group(*servers),) if servers else (), last_incarnation=50)


def job(number: int, *, is_poster: bool = False) -> JobMemory:
    spec = JobSpec(description=b"", files=(), epochs=1, assignment="first-come")
    return JobMemory(record=JobRecord(number=number), posted=spec if is_poster else None)


@dataclass
class Returns:
    """A recovery, and the connections of returned members."""

    recovery: Recovery = field(default_factory=lambda: Recovery(replicas=0, timeout_s=10.0, salt=1))
    num_peers: int = 0

    @property
    def evidence(self) -> Evidence:
        return self.recovery.evidence()

    def back(self, name: str, seen: View, *, cluster: str = "ours", **options: Any) -> int:
        """Return a member to the scheduler, and return its connection."""
        self.num_peers += 1
        rejoin = messages.Rejoin(
            member=member(name), settings=messages.SchedulerSettings(cluster=cluster), view=seen, **options
        )
        self.recovery.add(self.num_peers, rejoin, 0.0)
        return self.num_peers

    def names(self, returned: Iterable[messages.Rejoin]) -> list[str]:
        return [record.member.node for record in returned]


def test_recovery_is_complete_when_the_members_of_the_newest_view_have_returned() -> None:
    coming = Returns()
    assert not coming.evidence.is_complete(NO_MEMBERS)
    old, new = view(4, "s1", "w2", "w4"), view(5, "s1", "w3")
    coming.back("s1", old)
    w4 = coming.back("w4", old)
    assert not coming.evidence.is_complete(NO_MEMBERS)
    assert coming.evidence.missing(NO_MEMBERS) == (member("w2"),)
    assert coming.evidence.is_complete({2})  # the only missing member has ended
    coming.recovery.forget(w4)
    peer = coming.back("w3", new)
    assert coming.evidence.is_complete(NO_MEMBERS)
    coming.recovery.forget(peer)  # the member's connection broke again
    coming.recovery.forget(peer)
    assert not coming.evidence.is_complete(NO_MEMBERS)
    coming.back("w3", new)
    coming.back("w2", old)  # the member was removed, but not notified
    evidence = coming.evidence
    assert evidence.is_complete(NO_MEMBERS)
    assert [record.member.node for record in evidence.returned if not evidence.is_member(record)] == ["w2"]


def test_a_member_that_reconnects_is_counted_once() -> None:
    coming = Returns()
    first = coming.back("s1", view(4, "s1", "s2"))
    coming.back("s1", view(5, "s1"))
    assert len(coming.evidence.returned) == 1
    coming.recovery.forget(first)  # the break of the former connection is reported late
    assert coming.evidence.is_complete(NO_MEMBERS)


def test_the_newest_view_has_the_highest_term() -> None:
    coming = Returns()
    coming.back("s1", view(9, "s1", "s2"))
    coming.back("s2", view(3, "s1", "s2", "s3", term=2))
    assert coming.evidence.latest.order == (2, 3)
    assert coming.evidence.missing(NO_MEMBERS) == (member("s3"),)


def test_voters_of_earlier_views_are_needed_if_only_a_worker_has_the_newest_view() -> None:
    # Found by the simulation: the newest view removed a server, and a view before it removed w6.
    coming = Returns()
    old = view(3, "s1", "s2", "s3", "s4", "w5", "w6")
    coming.back("s2", old)
    coming.back("s3", old)
    coming.back("w6", old.without_workers())
    coming.back("w5", view(11, "s1", "s2", "s3", "w5").without_workers())
    assert not coming.evidence.has_quorum(NO_MEMBERS, 1)
    coming.back("s1", view(11, "s1", "s2", "s3", "w5"))
    assert coming.evidence.has_quorum(NO_MEMBERS, 1)
    assert [member.incarnation for member in coming.evidence.latest.members if member.role is Role.WORKER] == [5]


def test_a_view_without_workers_uses_the_workers_of_the_newest_full_view() -> None:
    coming = Returns()
    coming.back("w3", view(9, "s1", "s2", "w3", "w4").without_workers())
    coming.back("s1", view(7, "s1", "w3", "w4"))
    coming.back("s2", view(6, "s1", "w3"))
    latest = coming.evidence.latest
    assert latest.order == (1, 9)
    assert [member.node for member in latest.members] == ["s1", "s2", "w3", "w4"]
    assert not latest.is_partial
    assert coming.evidence.missing(NO_MEMBERS) == (member("w4"),)


def test_unknown_workers_are_not_excluded() -> None:
    coming = Returns()
    coming.back("w3", view(9, "s1", "w3", "w4").without_workers())
    assert [member.node for member in coming.evidence.latest.members] == ["s1"]
    assert all(coming.evidence.is_member(record) for record in coming.evidence.returned)


def test_members_in_no_view_are_excluded_only_if_possibly_in_it() -> None:
    coming = Returns()
    coming.back("s1", view(5, "s1"))
    for name in ("w7", "o8", "w51"):
        coming.back(name, view(4, "s1"))
    # Observers are in no view. Incarnation 51 is newer than the view.
    members = [record for record in coming.evidence.returned if coming.evidence.is_member(record)]
    assert coming.names(members) == ["s1", "o8", "w51"]


def test_recovery_waits_for_the_poster_of_the_latest_job() -> None:
    coming = Returns()
    seen = view(1, "w1")
    coming.back("w1", seen, job=job(2))
    assert not coming.evidence.is_complete(NO_MEMBERS)
    coming.back("o7", seen, job=job(1, is_poster=True))
    assert not coming.evidence.is_complete(NO_MEMBERS)
    poster = coming.back("o8", seen, job=job(2, is_poster=True))
    assert coming.evidence.is_complete(NO_MEMBERS)
    coming.recovery.forget(poster)
    assert not coming.evidence.is_complete(NO_MEMBERS)


def test_recovery_waits_for_a_poster_if_all_workers_have_ended() -> None:
    """Servers have no record of jobs. Otherwise the job would fail, although its poster returns shortly afterwards."""
    coming = Returns()
    seen = view(1, "s1", "w2")
    coming.back("s1", seen)
    assert not coming.evidence.is_complete({2})
    coming.back("o7", seen, job=job(1, is_poster=True))
    assert coming.evidence.is_complete({2})


def test_a_quorum_consists_of_bucket_owners_of_the_newest_view() -> None:
    coming = Returns()
    seen = view(1, "s1", "s2", "s3", "s4", "w5", voters=(1, 2, 3))
    coming.back("s4", seen)
    coming.back("w5", seen)
    coming.back("s1", seen)
    assert not coming.evidence.has_quorum(NO_MEMBERS, 0)
    assert coming.evidence.has_quorum({2, 3}, 0)
    assert coming.evidence.missing_voters(NO_MEMBERS) == (member("s2"), member("s3"))
    assert coming.evidence.missing_voters({2}) == (member("s3"),)
    coming.back("s2", seen)
    assert coming.evidence.has_quorum(NO_MEMBERS, 0)
    assert coming.evidence.missing(NO_MEMBERS) == (member("s3"),)
    # A later view has other servers, and these servers are needed.
    coming.back("w6", view(2, "s1", "s2", "s3", "s4", "w6", voters=(3, 4)))
    assert not coming.evidence.has_quorum(NO_MEMBERS, 0)


def test_without_buckets_no_server_is_needed() -> None:
    coming = Returns()
    coming.back("w1", view(1, "s2", "w1", voters=()))
    assert coming.evidence.has_quorum(NO_MEMBERS, 1)
    assert coming.evidence.missing_voters(NO_MEMBERS) == ()


@pytest.mark.parametrize("is_first", [True, False])
def test_the_cluster_with_more_servers_is_chosen(is_first: bool) -> None:
    coming = Returns()
    if is_first:
        coming.back("s1", view(1, "s1"))
    for name in ("w2", "w3"):
        coming.back(name, view(9, "w2", "w3"), cluster="theirs")
    if not is_first:
        coming.back("s1", view(1, "s1"))
    assert coming.names(coming.evidence.returned) == ["s1"]
    assert len(coming.recovery.reject_foreign()) == 2
    assert coming.evidence.latest.epoch == 1
    assert coming.evidence.is_complete(NO_MEMBERS)


def test_without_servers_the_cluster_with_more_members_is_chosen() -> None:
    coming = Returns()
    coming.back("o1", view(1), cluster="theirs")
    for name in ("w2", "w3"):
        coming.back(name, view(1, "w2", "w3"))
    assert coming.names(coming.evidence.returned) == ["w2", "w3"]
    assert Returns().recovery.reject_foreign() == []
    assert Evidence({}).latest == View()


def test_drain_requests_are_recovered() -> None:
    coming = Returns()
    peer = coming.back("s1", view(1, "s1"))
    coming.back("s2", view(1, "s1"), is_leaving=True)
    coming.recovery.drain(peer)
    coming.recovery.drain("nobody")
    assert [record.is_leaving for record in coming.evidence.returned] == [True, True]


def test_a_successor_requests_promises_and_takes_over_on_arrival() -> None:
    coming = Returns()
    seen = view(3, "s1", "s2", "w3")
    s1, s2, _ = [coming.back(name, seen) for name in ("s1", "s2", "w3")]
    (promise,) = coming.recovery.decide((), 1.0)
    assert isinstance(promise, events.RequestPromise)
    assert promise.peers == (s1, s2)
    assert promise.term > seen.term
    assert coming.recovery.decide((), 1.0) == []  # the scheduler has sent its request for promises
    for peer in (s1, s2):
        coming.recovery.promise(peer, promise.term)
    (succession,) = coming.recovery.decide((), 1.0)
    assert isinstance(succession, Succession)
    assert (succession.cluster, succession.term) == ("ours", promise.term)
    assert [member.node for member in succession.present()] == ["s1", "s2", "w3"]
    assert succession.absent() == succession.leaving() == []


def test_recovery_waits_for_needed_servers_beyond_the_timeout() -> None:
    coming = Returns()
    coming.back("s1", view(3, "s1", "s2", "s3"))
    watched = [events.WatchProcess(member(name), is_connected=False) for name in ("s2", "s3")]
    assert coming.recovery.decide((), 9.0) == watched
    note, *others = coming.recovery.decide((), 10.0)
    assert others == watched
    assert isinstance(note, events.NotifyOperator)
    assert "server 2 (s2) and server 3 (s3)" in note.text
    assert coming.recovery.needed == (member("s2"), member("s3"))
    assert coming.recovery.decide((), 11.0) == watched  # the message is sent once


def test_a_cluster_without_servers_is_abandoned() -> None:
    coming = Returns()
    peer = coming.back("w2", view(3, "s1", "w2"))
    coming.recovery.ended(1)
    note, expel, abandoned = coming.recovery.decide((), 1.0)
    assert isinstance(note, events.NotifyOperator)
    assert isinstance(expel, events.DeclareDead)
    assert expel.peer == peer
    assert abandoned == Abandoned()
    coming.recovery.reset()
    assert coming.recovery.decide((), 1.0) == [Abandoned()]  # no member has returned
