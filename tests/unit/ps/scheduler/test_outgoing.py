"""What a process has said to the scheduler is kept until it is known to have come."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from paceline.ps import messages
from paceline.ps.messages import CALL, NOTICE
from paceline.ps.scheduler.outgoing import Outgoing

from .lines import End


def lease_done(lease: int) -> messages.LeaseDone:
    return messages.LeaseDone(job=1, lease=lease)


def test_a_frame_says_its_number_and_the_lowest_call_that_is_not_answered() -> None:
    outgoing, end = Outgoing(), End()
    messages_sent = [
        outgoing.add(messages.GetJob(after=0), answer=Future()),
        outgoing.add(lease_done(0)),
        outgoing.add(messages.Heartbeat()),
    ]
    for message in messages_sent:
        outgoing.send(end.channel, message)
    assert [(each.kind, each.request, each.sequence, each.clock) for each in end.take()] == [
        (CALL, 1, 1, 1),
        (NOTICE, 0, 2, 1),
        (NOTICE, 0, 0, 1),
    ]
    outgoing.take(1)
    outgoing.send(end.channel, messages_sent[1])
    assert end.take()[0].clock == 4  # no call below the next one waits


def test_what_the_scheduler_has_is_not_sent_again() -> None:
    outgoing = Outgoing()
    for number in range(1, 5):
        outgoing.add(lease_done(number), answer=Future() if number % 2 else None)
    assert [each.number for each in outgoing.since(0)] == [1, 2, 3, 4]
    assert [each.number for each in outgoing.since(2)] == [3, 4]
    outgoing.received(2)
    assert [each.number for each in outgoing.since(0)] == [1, 3, 4]  # to another scheduler, which has nothing
    outgoing.forget_notices()
    assert [each.number for each in outgoing.since(0)] == [1, 3]
    assert outgoing.take(1) is not None
    assert outgoing.take(1) is None
    assert [each.number for each in outgoing.calls()] == [3]


def test_a_call_that_may_come_twice_is_sent_again_until_it_is_answered() -> None:
    outgoing = Outgoing()
    message = outgoing.add(messages.Leave(), answer=Future())
    assert not message.is_numbered
    assert outgoing.since(100) == [message]


@pytest.mark.parametrize(("progress", "is_kept"), [({}, False), ({"examples": 1.0}, True)])
def test_a_sign_of_life_is_kept_if_it_shows_progress(progress: dict[str, float], is_kept: bool) -> None:
    outgoing = Outgoing()
    message = outgoing.add(messages.Heartbeat(progress=progress))
    assert message.is_numbered == is_kept
    assert outgoing.since(0) == [message] * is_kept


def test_of_signs_of_life_the_newest_is_kept() -> None:
    outgoing = Outgoing()
    outgoing.add(messages.Heartbeat(progress={"examples": 1.0}))
    kept = outgoing.add(lease_done(0))
    newest = outgoing.add(messages.Heartbeat(progress={"examples": 2.0}))
    outgoing.add(messages.Heartbeat())
    assert outgoing.since(0) == [kept, newest]
