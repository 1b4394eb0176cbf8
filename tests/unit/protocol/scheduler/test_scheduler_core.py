"""The scheduler's core with sessions and jobs: messages in, messages out."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import ProtocolError
from paceline.protocol import Member, Role
from paceline.protocol.chains import ChainGroup, chain_group
from paceline.protocol.jobs import JobSpec, Lease
from paceline.protocol.jobs.messages import JobNews, PostJob, TakeLease
from paceline.protocol.scheduler import events
from paceline.protocol.scheduler.core import SchedulerCore
from paceline.protocol.scheduler.events import SendMessage, WatchProcess
from paceline.protocol.scheduler.messages import (
    Drain,
    Elsewhere,
    EndCluster,
    Ended,
    GetSettings,
    GetView,
    Heartbeat,
    Leave,
    Prepared,
    PrepareView,
    Promised,
    Register,
    Rejoin,
    SchedulerSettings,
    Welcome,
)
from paceline.protocol.scheduler.numbered_messages import MessageNumbers
from paceline.protocol.scheduler.views import View

SETTINGS = SchedulerSettings(cluster="ours")
SPEC = JobSpec(description=b"do", files=(2,), epochs=1, assignment="first-come")


class Run:
    """A core, its time, and the messages that it has sent to each peer."""

    def __init__(self, settings: SchedulerSettings = SETTINGS, **options: Any) -> None:
        self.core = SchedulerCore(settings, num_buckets=8, **options)
        self.time_s = 0.0
        self.sent: dict[object, list[SendMessage]] = {}
        self.instructions: list[events.Instruction] = []

    def do(self, instructions: list[events.Instruction]) -> list[events.Instruction]:
        self.instructions += instructions
        for instruction in instructions:
            if isinstance(instruction, SendMessage):
                self.sent.setdefault(instruction.peer, []).append(instruction)
        self.core.validate()
        return instructions

    def receive(self, peer: str, message: Any, request: int = 0, sequence: int = 0, body: bytes = b"") -> list[Any]:
        """Deliver a message; return the messages that its process receives immediately."""
        if peer not in self.core.sessions.connected:
            self.core.connected(peer)
        before = len(self.sent.get(peer, []))
        self.core.check(peer, message)
        self.do(self.core.receive(peer, message, MessageNumbers(request, sequence, request), self.time_s, body))
        return [send.message for send in self.sent.get(peer, [])[before:]]

    def prepare(self, peer: str) -> None:
        """Acknowledge the last view that the scheduler requested a server to prepare."""
        views = [send.message.view for send in self.sent[peer] if isinstance(send.message, PrepareView)]
        self.receive(peer, Prepared(views[-1].term, views[-1].epoch))

    def handle(self, event: Any) -> None:
        self.do(self.core.handle(event, self.time_s))


def started() -> Run:
    """Return a cluster of one server "s" and one worker "w"."""
    run = Run()
    (server,) = run.receive("s", Register(node="s", role=Role.SERVER, address="s"), 1)
    assert isinstance(server, Welcome)
    assert run.receive("w", Register(node="w", role=Role.WORKER), 1) == []
    run.handle(events.Flush())
    (welcome,) = [send.message for send in run.sent["w"]]
    assert (welcome.rank, welcome.settings, welcome.received) == (0, SETTINGS, 0)
    assert [member.node for member in welcome.view.members] == ["s"]  # workers receive only the servers of a view
    return run


def test_members_are_welcomed_with_settings_and_view() -> None:
    run = started()
    watched = [instruction.member.node for instruction in run.instructions if isinstance(instruction, WatchProcess)]
    assert watched == ["s", "w"]
    (view,) = run.receive("w", GetView(), 2, 2)
    assert [member.node for member in view.members] == ["s", "w"]
    assert run.receive("observer", GetSettings(), 1, 1) == [SETTINGS]


def test_a_repeated_call_is_executed_once_and_answered_again() -> None:
    run = started()
    assert run.receive("poster", PostJob(spec=SPEC), 1, 1) == [1]
    assert run.receive("poster", PostJob(spec=SPEC), 1, 1) == [1]
    take = TakeLease(job=1, wait=True)
    first, second = (run.receive("w", TakeLease(job=1, wait=False), number, number)[0] for number in (2, 3))
    assert {type(first), type(second)} == {Lease}
    assert run.receive("w", take, 4, 4) == []  # no shard is free
    assert run.receive("w", take, 4, 4) == []
    assert run.core.sessions.connected["w"].end.received == 4


def test_a_reconnecting_member_receives_the_replies_again() -> None:
    run = started()
    run.receive("poster", PostJob(spec=SPEC), 1, 1)
    (lease,) = run.receive("w", TakeLease(job=1, wait=False), 2, 2)
    (welcome,) = [send.message for send in run.sent["w"] if isinstance(send.message, Welcome)]
    run.do(run.core.disconnected("w", run.time_s))
    assert events.MemberDisconnected(welcome.incarnation) in run.instructions
    member = Member("w", Role.WORKER, welcome.rank, welcome.incarnation)
    rejoin = Rejoin(member=member, settings=SETTINGS, view=welcome.view)
    again, answer, news = run.receive("w again", rejoin, 9)
    assert (again.incarnation, again.received) == (welcome.incarnation, 2)
    assert answer == lease
    assert isinstance(news, JobNews)


def test_changes_of_a_job_are_sent_in_one_message() -> None:
    run = started()
    run.receive("poster", PostJob(spec=SPEC), 1, 1)
    run.receive("w", TakeLease(job=1, wait=False), 2, 2)
    assert sum(isinstance(instruction, events.NewsSoon) for instruction in run.instructions) == 1
    run.handle(events.NewsDue())
    assert sum(isinstance(send.message, JobNews) for send in run.sent["w"]) == 1
    assert not any(isinstance(send.message, JobNews) for send in run.sent["s"])


def test_a_process_registers_once_on_a_connection() -> None:
    run = started()
    with pytest.raises(ProtocolError, match="'w'"):
        run.receive("w", Register(node="w", role=Role.WORKER), 5)


@pytest.mark.parametrize(("version", "buckets"), [(1, 0b1111), (1, 0), (0, 0xFF)])
def test_a_view_without_chains_for_all_buckets_is_rejected(version: int, buckets: int) -> None:
    run = Run()
    member = Member("s", Role.SERVER, 0, 1, "s")
    groups = (chain_group((1,), None, buckets),) if buckets else ()
    rejoin = Rejoin(member=member, settings=SETTINGS, view=View(version=version, groups=groups))
    with pytest.raises(ProtocolError, match=f"version {version} with chains of {buckets.bit_count()} buckets"):
        run.receive("s", rejoin, 1)


def former_member(settings: SchedulerSettings) -> Rejoin:
    group: ChainGroup = chain_group((7,), None, 0xFF)
    member = Member("s", Role.SERVER, 0, 7, "s")
    view = View(1, 3, 2, (member,), (group,), last_incarnation=9)
    return Rejoin(member=member, settings=settings, view=view)


def test_a_cluster_with_other_settings_is_not_taken_over() -> None:
    run = Run()
    for peer in ("s", "s again"):
        rejoin = former_member(SchedulerSettings(cluster="theirs", num_servers=2))
        assert run.receive(peer, rejoin, 1) == [Elsewhere()]
    (note,) = [instruction for instruction in run.instructions if isinstance(instruction, events.NotifyOperator)]
    assert "num_servers=2" in note.text
    assert "num_servers=1" in note.text


def test_requests_wait_until_the_cluster_is_recovered() -> None:
    run = Run(replaces=True)
    assert run.receive("observer", GetSettings(), 1, 1) == []
    run.receive("s", former_member(SchedulerSettings(cluster="theirs")), 1)
    run.handle(events.Flush())
    (promise,) = [send.message for send in run.sent["s"]]
    run.receive("s", Promised(promise.term))
    run.handle(events.Flush())
    run.prepare("s")
    (settings,) = [send.message for send in run.sent["observer"]]
    assert settings.cluster == "theirs"
    assert any(isinstance(instruction, events.TakenOver) for instruction in run.instructions)


def test_every_process_receives_the_end_of_the_cluster() -> None:
    run = started()
    assert run.receive("poster", EndCluster(), 1, 1)[-1] is None
    assert events.ClusterEnded() in run.instructions
    for peer in ("s", "w", "poster"):
        assert any(isinstance(send.message, Ended) for send in run.sent[peer])


def test_a_member_leaves() -> None:
    run = started()
    run.receive("w", Heartbeat(progress={"job": 0.0}))
    run.receive("w", Leave())
    assert events.Close("w") in run.instructions
    run.prepare("s")
    (removed,) = [instruction for instruction in run.instructions if isinstance(instruction, events.Removed)]
    assert (removed.member.node, removed.reason) == ("w", None)
    run.receive("s", Drain())
    assert any(isinstance(send.message, Ended) for send in run.sent["s"])


def test_requests_about_tables_are_served_by_the_runtime() -> None:
    run = started()
    run.receive("w", "a request", 2, 2)
    run.receive("w", "a request", 2, 2)  # the call is repeated before its answer
    (serve,) = [instruction for instruction in run.instructions if isinstance(instruction, events.ServeRequest)]
    (send,) = run.core.reply(serve.call, "an answer")  # type: ignore[arg-type]
    assert send == SendMessage("w", "an answer", 2, 2)
