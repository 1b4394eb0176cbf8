"""The scheduler, or its successor, processes each message once."""

from __future__ import annotations

import pytest

from paceline.protocol.jobs.messages import GetJob, LeaseDone
from paceline.protocol.membership import Role
from paceline.protocol.scheduler.messages import Heartbeat, Register
from paceline.protocol.scheduler.numbered_messages import MemberEnd, MessageNumbers, SchedulerEnd, SentMessage


def numbers(messages: list[SentMessage]) -> list[int]:
    return [message.number for message in messages]


def test_received_messages_are_not_resent() -> None:
    end = MemberEnd()
    for number in range(1, 5):
        end.add(number, answer="call" if number % 2 else None)
    assert numbers(end.since(0)) == [1, 2, 3, 4]
    assert numbers(end.since(2)) == [3, 4]
    end.received(2)
    assert numbers(end.since(0)) == [1, 3, 4]
    assert end.take(1) is not None
    assert end.take(1) is None
    assert numbers(end.calls()) == [3]
    assert end.lowest == 3


def test_messages_possibly_missing_at_the_new_scheduler_are_resent() -> None:
    """The scheduler may have taken over with data that the process sent on an earlier connection."""
    end = MemberEnd()
    end.add("call", answer="call")
    end.add("sent before")
    end.received(2)
    end.add("sent while the scheduler recovers")
    assert [message.content for message in end.since(-1)] == ["call", "sent while the scheduler recovers"]


def test_an_unnumbered_message_is_resent_until_the_reply() -> None:
    end = MemberEnd()
    message = end.add(Register(node="a", role=Role.WORKER), answer="call")
    assert not message.is_numbered
    assert end.since(100) == [message]


def test_a_message_has_its_number_and_the_lowest_pending_call() -> None:
    end = MemberEnd()
    sent = [end.add(GetJob(after=0), answer="call"), end.add(LeaseDone(job=1, lease=0)), end.add(Heartbeat())]
    assert [end.numbers(each) for each in sent] == [
        MessageNumbers(1, 1, 1), MessageNumbers(0, 2, 1), MessageNumbers(0, 0, 1)
    ]  # fmt: skip
    end.take(1)
    assert end.numbers(sent[1]).lowest == 4  # all earlier calls have replies


@pytest.mark.parametrize(("progress", "is_kept"), [({}, False), ({"examples": 1.0}, True)])
def test_an_unsent_heartbeat_with_progress_is_kept(progress: dict[str, float], is_kept: bool) -> None:
    end = MemberEnd()
    message = end.add(Heartbeat(progress=progress))
    assert message.is_numbered == is_kept
    assert end.since(0) == [message] * is_kept


def test_only_the_newest_heartbeat_is_kept() -> None:
    end = MemberEnd()
    end.add(Heartbeat(progress={"examples": 1.0}))
    kept = end.add(LeaseDone(job=1, lease=0))
    newest = end.add(Heartbeat(progress={"examples": 2.0}))
    end.add(Heartbeat())
    assert end.since(0) == [kept, newest]


def test_a_member_of_a_former_cluster_has_no_welcome_number_before_the_first_message() -> None:
    end = SchedulerEnd(is_foreign=True)
    assert (end.welcome_number, SchedulerEnd().welcome_number) == (-1, 0)
    assert end.receive(0, 1)
    assert end.welcome_number == -1
    assert end.receive(7, 1)
    assert not end.receive(7, 1)
    assert end.welcome_number == 7
